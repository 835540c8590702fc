"""What XLA's compiler for the CPU leaves out on request; said through `XLA_FLAGS`, which the runtime reads once."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

_VARIABLE = "XLA_FLAGS"
_LEFT_OUT = "--xla_disable_hlo_passes="
# Makes windows of each sum, whose kernels are compiled one by one; a kernel of fused operations is compiled once for
# all that are alike, and without these windows sums are fused.
_SLOW = "tree_reduction_rewriter"


def leaves_out_slow_passes(environment: MutableMapping[str, str] = os.environ) -> bool:
    """Whether a runtime that starts now will leave out what `leave_out_slow_passes` asks it to."""
    return _SLOW in _asked(environment)


def leave_out_slow_passes(environment: MutableMapping[str, str] = os.environ) -> None:
    """Has the runtime, which must not have started, compile without the passes that slow the rest down most."""
    passes = _asked(environment)
    if _SLOW not in passes:
        # Of a flag that is given twice XLA takes the last.
        flag = _LEFT_OUT + ",".join([*passes, _SLOW])
        environment[_VARIABLE] = f"{environment.get(_VARIABLE, '')} {flag}".strip()


def _asked(environment: MutableMapping[str, str]) -> list[str]:
    flags = [flag for flag in environment.get(_VARIABLE, "").split() if flag.startswith(_LEFT_OUT)]
    return [name for name in flags[-1].removeprefix(_LEFT_OUT).split(",") if name] if flags else []
