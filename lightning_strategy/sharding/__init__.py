"""Sharding of what a strategy trains."""
