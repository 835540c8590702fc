"""Raises with the extra to install if Lightning is missing: its import would only name the module."""

from importlib.util import find_spec

from xla_adapters.utils.patching import warn_of_untested

if find_spec("lightning") is None:
    raise ImportError("lightning_strategy needs lightning; install it with: pip install 'xla-adapters[lightning]'")
warn_of_untested("lightning", ("lightning",))
