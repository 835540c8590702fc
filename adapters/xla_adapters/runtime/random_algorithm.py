"""Which algorithm the device draws random numbers with: chosen once per process, before the first are drawn."""

from __future__ import annotations

import logging
import warnings

from xla_adapters.config import XLAConfig
from xla_adapters.errors import RandomAlgorithmWarning
from xla_adapters.runtime import Device, get_runtime
from xla_adapters.runtime.extensions import extensions

logger = logging.getLogger("xla_adapters")

_asked: dict[str, str] = {}


def use_random_algorithm(config: XLAConfig) -> str:
    """Has the device draw as the options say, if it can still be chosen: torch_xla asks once in a process.

    An environment variable that the user set wins.

    Args:
        config: its `rng_algorithm`.

    Returns:
        What the device draws with: `"default"`, `"philox"` or `"three_fry"`.
    """
    asked = config.rng_algorithm
    if asked not in _asked:
        runtime = get_runtime()
        runtime.device.initialize()
        wanted = _fastest(runtime.device) if asked == "auto" else asked
        variable = runtime.random.algorithm_variable
        given = runtime.random.ask_for_algorithm(wanted)
        found = _asked[asked] = runtime.random.algorithm()
        if given is None and found == wanted:
            told = "random numbers on the device are drawn by %s (%s was set to that while it was read)"
            logger.info(told, found, variable)
        elif found != wanted:
            why = f"{variable}={given} is set" if given == found else "numbers were drawn, or a step lowered, before"
            message = f"random numbers on the device are drawn by {found}, not by {wanted}: {why}"
            if asked == "auto":
                logger.info("%s", message)
            else:
                warnings.warn(f"rng_algorithm={asked!r}: {message}", RandomAlgorithmWarning, stacklevel=2)
    return _asked[asked]


def _fastest(device: Device) -> str:
    known = (extension.random_algorithm(device) for extension in extensions())
    return next((name for name in known if name is not None), "default")


def resume_random_algorithm(saved: str) -> None:
    """Goes on with the algorithm of the run that is resumed; warns if the device draws with another one.

    Args:
        saved: what `Random.algorithm` said there.
    """
    runtime = get_runtime()
    runtime.device.initialize()
    runtime.random.ask_for_algorithm(saved)
    found = runtime.random.algorithm()
    if found != saved:
        warnings.warn(
            f"the run that is resumed drew random numbers on the device by {saved}, this one draws them by {found}, "
            f"and so other numbers: set rng_algorithm={saved!r} before anything is drawn",
            RandomAlgorithmWarning,
            stacklevel=2,
        )
