"""`CallSpec`: the description of one call of a step, for capturing and replaying it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from xla_adapters.replay.bound import Owner
from xla_adapters.replay.guards import nothing_exempt
from xla_adapters.replay.slots import CallTensors


@dataclass(frozen=True, kw_only=True)
class CallSpec:
    """What must be known of a call of a step to capture it, and to replay it later.

    Attributes:
        key: calls with different keys get executables of their own; all values hashable.
        batch: tensors on the device that the step only reads, in the same order each time.
        extras: further tensors that the step may update in place (a sum of losses, say), in the same order each time.
        modules: to guard in addition to those whose forward runs.
        set_modes: called before each replay to put modules into train or eval mode, as the step does.
        patience: calls that may be traced while the values to compare wait for another transfer to the host.
        obstacle: why the step cannot be replayed, None if it can; ignored under `step_replay=True`.
        bound: returns the objects whose attributes the step may reassign (default: none).
        watched: returns values, by name, that must be equal before and after the step (default: none).
        exempt: returns the names of a module's attributes that need no guard.
        constants: tensors that the step reads and never writes.
        change: what the user code reads that has changed since the call before; None if nothing.
        keeps_numbers: whether all numbers that a known library reads in the step are among what it returns, and the
            library decides and computes on the host by nothing else that may change.
        look_again: analyses the user code again, after a change that its own guards cannot see.
        strict: whether side effects and unknown optimizers are refused; set by `StepProgram`.
        tensors: `batch` and `extras` together.
    """

    key: tuple[Hashable, ...] = ()
    batch: Sequence[torch.Tensor] = ()
    extras: Sequence[torch.Tensor] = ()
    modules: Sequence[torch.nn.Module] = ()
    set_modes: Callable[[], object] | None = None
    patience: int = 0
    obstacle: str | None = None
    bound: Callable[[], Sequence[Owner]] = tuple
    watched: Callable[[], Mapping[str, object]] = dict
    exempt: Callable[[torch.nn.Module], Collection[str]] = nothing_exempt
    constants: Sequence[torch.Tensor] = ()
    change: str | None = None
    keeps_numbers: bool = False
    look_again: Callable[[], object] = tuple
    strict: bool = True
    tensors: CallTensors = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensors", CallTensors(self.batch, self.extras))
