"""Decides whether a replay may skip the Python of a step, by reading its source. Unknown code counts as unsafe.

`analyze` is the entry point. This package knows Python and torch, and nothing of XLA.
"""

from __future__ import annotations

from collections.abc import Callable

from xla_adapters.replay.safety.abstract_values import (
    DATA,
    MODULE_CALLS,
    UNKNOWN,
    Batch,
    FrameworkModel,
    Held,
    Unsafe,
    Value,
    Varying,
    nothing,
)
from xla_adapters.replay.safety.analysis import Analysis, Verdict
from xla_adapters.replay.safety.trusted import is_trusted

Examine = Callable[[Analysis], object]


def analyze(examine: Examine, framework: FrameworkModel) -> Verdict:
    """Reads the code of a step.

    Args:
        examine: passes the step's functions and their arguments to `Analysis.examine`.
        framework: describes the framework around the code.

    Returns:
        Whether the code may be skipped, and under which conditions. The code is not run.
    """
    analysis = Analysis(framework)
    try:
        examine(analysis)
    except Unsafe as unsafe:
        return analysis.verdict(str(unsafe))
    except RecursionError:
        return analysis.verdict("its code nests too deeply to be followed")
    return analysis.verdict(None)


__all__ = [
    "DATA",
    "MODULE_CALLS",
    "UNKNOWN",
    "Analysis",
    "Batch",
    "FrameworkModel",
    "Held",
    "Unsafe",
    "Value",
    "Varying",
    "Verdict",
    "analyze",
    "is_trusted",
    "nothing",
]
