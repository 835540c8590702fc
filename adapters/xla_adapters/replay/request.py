"""`Request`: what is known of a pass before it begins."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from xla_adapters.replay.bound import Owner
from xla_adapters.replay.facts import all_related
from xla_adapters.replay.places import PassTensors


@dataclass(kw_only=True)
class Request:
    """What is known of a pass before it begins.

    Attributes:
        tensors: the batch, and what else changes from pass to pass.
        modules: beside those that are called in the pass.
        set_modes: what the step does first to put its modules into their modes.
        patience: passes that may be traced while the proof waits for somebody else's transfer to the host.
        several: whether the graph is kept, for several passes to be one executable.
        strict: whether the step's Python must be free of effects that a replay would leave out.
        bound: the objects whose attributes the step may bind anew, as they are when it is called.
        watched: what the step's Python must leave as it is, by name: compared before and behind the step.
        unrelated: of a module, the attributes that no graph depends on, or that are noted elsewhere.
        constants: tensors that the step may read and nobody writes.
    """

    tensors: PassTensors = field(default_factory=PassTensors)
    modules: Sequence[torch.nn.Module] = ()
    set_modes: Callable[[], object] | None = None
    patience: int = 0
    several: bool = False
    strict: bool = True
    bound: Callable[[], Sequence[Owner]] = tuple
    watched: Callable[[], Mapping[str, object]] = dict
    unrelated: Callable[[torch.nn.Module], Collection[str]] = all_related
    constants: Sequence[torch.Tensor] = ()
