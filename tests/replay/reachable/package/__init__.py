"""Helpers of a research group, installed as a package of their own."""
