"""Sets flags of XLA's CPU compiler in the variable `XLA_FLAGS`, which the runtime reads once as it starts."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

_VARIABLE = "XLA_FLAGS"
_LEFT_OUT = "--xla_disable_hlo_passes="
# Splits each sum into windows whose kernels are compiled one by one. Without it sums are fused, and equal fusions share
# a kernel.
_SLOW = "tree_reduction_rewriter"
# Removes optimization barriers before fusion; here barriers are meant to limit fusion.
_DROPS_BARRIERS = "cse_barrier_expander"
_PIECES = "--xla_multiheap_size_constraint_per_heap="


def leaves_out_slow_passes(environment: MutableMapping[str, str] = os.environ) -> bool:
    """Whether `leave_out_slow_passes` is in effect for a runtime that starts now."""
    return _SLOW in _asked(environment)


def leave_out_slow_passes(environment: MutableMapping[str, str] = os.environ) -> None:
    """Disables the compiler passes that cost the most compile time; the runtime must not have started."""
    _leave_out(_SLOW, environment)


def keeps_barriers(environment: MutableMapping[str, str] = os.environ) -> bool:
    """Whether a runtime that starts now will fuse nothing across the barriers in a graph."""
    return _DROPS_BARRIERS in _asked(environment)


def keep_barriers(environment: MutableMapping[str, str] = os.environ) -> bool:
    """Stops the compiler from fusing across optimization barriers; the runtime must not have started.

    Returns:
        Whether the flag was set by this call; False if `XLA_FLAGS` already disables passes.
    """
    if _LEFT_OUT in environment.get(_VARIABLE, ""):
        return False
    _leave_out(_DROPS_BARRIERS, environment)
    return True


def keep_no_barriers(environment: MutableMapping[str, str] = os.environ) -> None:
    """Undoes `keep_barriers`; the runtime must not have started."""
    flags = environment.get(_VARIABLE, "").split(" ")
    environment[_VARIABLE] = " ".join(flag for flag in flags if flag != f"{_LEFT_OUT}{_DROPS_BARRIERS}").strip()


def divide_temporary_memory(most: int, environment: MutableMapping[str, str] = os.environ) -> bool:
    """Has XLA allocate a step's temporary memory in several pieces; the runtime must not have started.

    Args:
        most: the largest piece in bytes; a single value may be larger.
        environment: the environment to change.

    Returns:
        Whether the flag was set by this call; False if it was there already.
    """
    flags = environment.get(_VARIABLE, "")
    if _PIECES in flags:
        return False
    environment[_VARIABLE] = f"{flags} {_PIECES}{most}".strip()
    return True


def leave_temporary_memory_whole(most: int, environment: MutableMapping[str, str] = os.environ) -> None:
    """Undoes `divide_temporary_memory`; the runtime must not have started."""
    flags = environment.get(_VARIABLE, "")
    environment[_VARIABLE] = flags.replace(f"{_PIECES}{most}", "").strip()


def _leave_out(name: str, environment: MutableMapping[str, str]) -> None:
    passes = _asked(environment)
    if name not in passes:
        # XLA uses the last occurrence of a flag.
        flag = _LEFT_OUT + ",".join([*passes, name])
        environment[_VARIABLE] = f"{environment.get(_VARIABLE, '')} {flag}".strip()


def _asked(environment: MutableMapping[str, str]) -> list[str]:
    flags = [flag for flag in environment.get(_VARIABLE, "").split() if flag.startswith(_LEFT_OUT)]
    return [name for name in flags[-1].removeprefix(_LEFT_OUT).split(",") if name] if flags else []
