"""Optimizations of speed and compile time on XLA:CPU; other devices are not affected.

Only what is right without this folder, and faster with it, belongs here; a figure in the docstring says how much. What
is wrong or cannot be traced is mended where `xla_adapters.lowerings` says.

`XLA_ADAPTERS_CPU_TUNING=0` in the environment, set before the import, leaves all of it out: steps are then traced as on
other devices. Results may differ in rounding, and other random numbers are drawn (`rng_algorithm="auto"`).
"""

import os

from xla_adapters.cpu.tuning import CPUTuning
from xla_adapters.runtime.extensions import register

__all__ = ["TUNING", "VARIABLE", "CPUTuning"]

VARIABLE = "XLA_ADAPTERS_CPU_TUNING"
TUNING = CPUTuning()

if os.environ.get(VARIABLE, "1") != "0":
    register(TUNING)
