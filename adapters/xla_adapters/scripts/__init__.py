"""Runs a user's script in a process of its own, with trainers changed and nothing saved: `check` and `preflight`."""
