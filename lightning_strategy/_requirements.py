"""Raises with the extra to install if Lightning is missing: its import would only name the module."""

from importlib.util import find_spec

if find_spec("lightning") is None:
    raise ImportError("lightning_strategy needs lightning; install it with: pip install 'xla-adapters[lightning]'")
