"""Helpers that do not depend on XLA or on training steps."""
