"""Random numbers per step, and the algorithm that they are drawn with.

The same (seed, step, micro step) always draws the same numbers.
"""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass

from xla_adapters.config import XLAConfig
from xla_adapters.errors import RandomAlgorithmWarning
from xla_adapters.runtime import Device, get_runtime
from xla_adapters.runtime.extensions import extensions

_MASK = (1 << 64) - 1


def _splitmix64(state: int) -> int:
    """One round of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014)."""
    state = (state + 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


@dataclass(frozen=True, kw_only=True)
class StepSeed:
    """Names the random stream of one (micro) step.

    torch_xla moves its stream on at every sync, so any additional sync changes later dropout masks.
    A step that starts from its own seed does not depend on what ran before it: runs repeat, and a
    resumed run draws what the uninterrupted one would have drawn. The seed is an input of the graph
    and never causes a compile.

    Args:
        seed: the run's seed.
        step: index of the optimizer step, from 0.
        micro_step: index of the micro batch within it, from 0.
        replica: index of the process, so that data-parallel replicas draw different masks.
        stream: tells apart steps of one run that share an index (training, evaluation).
    """

    seed: int
    step: int
    micro_step: int = 0
    replica: int = 0
    stream: int = 0

    def value(self) -> int:
        """The seed as an integer of 63 bits."""
        state = 0
        for part in (self.seed, self.stream, self.replica, self.step, self.micro_step):
            state = _splitmix64(state ^ (part & _MASK))
        return state >> 1


# ---- the algorithm of the device ------------------------------------------------------------------


logger = logging.getLogger("xla_adapters")

_asked: dict[str, str] = {}


def apply_process_options(config: XLAConfig) -> None:
    """Applies what holds for the whole process: the folder of the compile cache, and the random algorithm.

    Raises:
        RuntimeOrderError: the folder is asked for too late.
    """
    if config.cache_dir is not None:
        get_runtime().device.use_compile_cache(config.cache_dir)
    use_random_algorithm(config)


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
