"""Batches and the workers that load them."""
