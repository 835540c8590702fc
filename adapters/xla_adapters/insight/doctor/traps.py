"""`TRAPS`: what is known to go wrong with particular versions, devices and variables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from xla_adapters.insight.doctor.system import System

# The pair that this package is written for.
_PAIR = (2, 9)


@dataclass(frozen=True, kw_only=True)
class Trap:
    """Something that is known to go wrong.

    Attributes:
        applies: whether it does on a system.
        what: what happens, and what to do.
        is_fault: whether nothing works right with it; others are only good to know.
    """

    applies: Callable[[System], bool]
    what: str
    is_fault: bool = False


def traps_of(system: System) -> list[Trap]:
    """The traps that a system has, the faults first."""
    return sorted((trap for trap in TRAPS if trap.applies(system)), key=lambda trap: not trap.is_fault)


def _is_on(hardware: str) -> Callable[[System], bool]:
    return lambda system: system.hardware == hardware


def _is_set(variable: str) -> Callable[[System], bool]:
    return lambda system: system.is_set(variable)


TRAPS = (
    Trap(
        applies=lambda system: system.number("torch") != system.number("torch_xla"),
        what="torch and torch_xla are of different releases: torch_xla does not load, or crashes. Install the pair "
        "torch==2.9.0 torch_xla==2.9.0",
        is_fault=True,
    ),
    Trap(
        applies=lambda system: system.number("torch_xla") not in (_PAIR, (0, 0)),
        what="this package is written for torch_xla 2.9: with another release steps may not be replayed (a warning "
        "says so), and errors may have other texts",
        is_fault=True,
    ),
    Trap(
        applies=_is_set("XLA_DISABLE_FUNCTIONALIZATION"),
        what="XLA_DISABLE_FUNCTIONALIZATION is set: a failed step could not be undone, so it is refused. Unset it",
        is_fault=True,
    ),
    Trap(
        applies=_is_set("XLA_AUTO_SPMD"),
        what="XLA_AUTO_SPMD is set: torch_xla's own automatic sharding is refused. Unset it and use auto_sharding=True",
        is_fault=True,
    ),
    Trap(
        applies=lambda system: system.is_set("XLA_USE_BF16") or system.is_set("XLA_DOWNCAST_BF16"),
        what="XLA_USE_BF16 or XLA_DOWNCAST_BF16 is set: torch_xla removed these; values stay float32. Use bf16=True "
        "(HF) or precision='bf16-true' (Lightning)",
    ),
    Trap(
        applies=_is_set("XLA_USE_SPMD"),
        what="XLA_USE_SPMD is set: the process drives all its devices as one. A Trainer without sharding= is refused",
    ),
    Trap(
        applies=lambda system: any(system.is_set(name) for name in ("PT_XLA_DEBUG", "PT_XLA_DEBUG_LEVEL")),
        what="PT_XLA_DEBUG is set: torch_xla prints an analysis of each execution, which takes time in each step",
    ),
    Trap(
        applies=lambda system: any(name.startswith("XLA_SAVE_TENSORS") for name in system.environment),
        what="XLA_SAVE_TENSORS_FILE is set: torch_xla appends each graph to that file",
    ),
    Trap(
        applies=lambda system: "XLA_COMPILATION_CACHE_SIZE" in system.environment,
        what="XLA_COMPILATION_CACHE_SIZE is set: torch_xla forgets executables beyond that number, and compiles them "
        "again; 2,048 is the default",
    ),
    Trap(
        applies=_is_set("ACCELERATE_USE_CPU"),
        what="ACCELERATE_USE_CPU is set: accelerate takes the plain CPU, and our Trainer refuses it. Unset it",
    ),
    Trap(
        applies=lambda system: "PJRT_DEVICE" not in system.environment,
        what="PJRT_DEVICE is not set: torch_xla takes a TPU if it finds one, else the CPU. Set it to be sure",
    ),
    Trap(
        applies=_is_on("CPU"),
        what="XLA:CPU does not load compiled graphs from torch_xla's persistent cache: each process compiles again",
    ),
    Trap(
        applies=_is_on("CPU"),
        what="XLA:CPU compiles deep models slowly: xla_adapters.initialize(fast_compile=True) helps",
    ),
    Trap(
        applies=_is_on("TPU"),
        what="torch_xla 2.9 does not load its persistent cache on TPUs (pytorch/xla#9094): each process compiles again",
    ),
    Trap(
        applies=_is_on("TPU"),
        what="a TPU belongs to one process at a time: another one that uses it makes the start of the runtime fail",
    ),
    Trap(
        applies=lambda system: system.hardware in ("CUDA", "GPU"),
        what="torch_xla has no released plugin for CUDA since 2.8, and nothing of this package was tried on one",
    ),
)
