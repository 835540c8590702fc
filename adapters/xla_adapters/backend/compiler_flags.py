"""What XLA's compiler for the CPU is asked to do otherwise: by `XLA_FLAGS`, which the runtime reads as it starts."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

_VARIABLE = "XLA_FLAGS"
_LEFT_OUT = "--xla_disable_hlo_passes="
# Makes windows of each sum, whose kernels are compiled one by one; a kernel of fused operations is compiled once for
# all that are alike, and without these windows sums are fused.
_SLOW = "tree_reduction_rewriter"
# Takes the barriers out of a graph before operations are fused, which are what they are for here.
_DROPS_BARRIERS = "cse_barrier_expander"
_PIECES = "--xla_multiheap_size_constraint_per_heap="


def leaves_out_slow_passes(environment: MutableMapping[str, str] = os.environ) -> bool:
    """Whether a runtime that starts now will leave out what `leave_out_slow_passes` asks it to."""
    return _SLOW in _asked(environment)


def leave_out_slow_passes(environment: MutableMapping[str, str] = os.environ) -> None:
    """Has the runtime, which must not have started, compile without the passes that slow the rest down most."""
    _leave_out(_SLOW, environment)


def keeps_barriers(environment: MutableMapping[str, str] = os.environ) -> bool:
    """Whether a runtime that starts now will fuse nothing across the barriers in a graph."""
    return _DROPS_BARRIERS in _asked(environment)


def keep_barriers(environment: MutableMapping[str, str] = os.environ) -> bool:
    """Has the runtime, which must not have started, fuse nothing across barriers, unless passes are left out already.

    Returns:
        Whether it is said now and was not before.
    """
    if _LEFT_OUT in environment.get(_VARIABLE, ""):
        return False
    _leave_out(_DROPS_BARRIERS, environment)
    return True


def keep_no_barriers(environment: MutableMapping[str, str] = os.environ) -> None:
    """Takes back what `keep_barriers` said, for a runtime that has not started."""
    flags = environment.get(_VARIABLE, "").split(" ")
    environment[_VARIABLE] = " ".join(flag for flag in flags if flag != f"{_LEFT_OUT}{_DROPS_BARRIERS}").strip()


def divide_temporary_memory(most: int, environment: MutableMapping[str, str] = os.environ) -> bool:
    """Has the runtime, which must not have started, take what a step needs for its temporary values in pieces.

    Args:
        most: bytes of a piece, but for single values that are larger.
        environment: where it is said, unless something is said of it there.

    Returns:
        Whether it is said now and was not before.
    """
    flags = environment.get(_VARIABLE, "")
    if _PIECES in flags:
        return False
    environment[_VARIABLE] = f"{flags} {_PIECES}{most}".strip()
    return True


def leave_temporary_memory_whole(most: int, environment: MutableMapping[str, str] = os.environ) -> None:
    """Takes back what `divide_temporary_memory` said, for a runtime that has not started."""
    flags = environment.get(_VARIABLE, "")
    environment[_VARIABLE] = flags.replace(f"{_PIECES}{most}", "").strip()


def _leave_out(name: str, environment: MutableMapping[str, str]) -> None:
    passes = _asked(environment)
    if name not in passes:
        # Of a flag that is given twice XLA takes the last.
        flag = _LEFT_OUT + ",".join([*passes, name])
        environment[_VARIABLE] = f"{environment.get(_VARIABLE, '')} {flag}".strip()


def _asked(environment: MutableMapping[str, str]) -> list[str]:
    flags = [flag for flag in environment.get(_VARIABLE, "").split() if flag.startswith(_LEFT_OUT)]
    return [name for name in flags[-1].removeprefix(_LEFT_OUT).split(",") if name] if flags else []
