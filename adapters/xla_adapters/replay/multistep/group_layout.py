"""`GroupLayout`: how several calls of one cached call become one executable."""

from __future__ import annotations

from dataclasses import dataclass

from xla_adapters.replay.cached_call import CachedCall
from xla_adapters.replay.number import Number
from xla_adapters.replay.slots import Slot
from xla_adapters.runtime.graphs import RepeatedGraph


@dataclass
class GroupLayout:
    """Which inputs each call of a group has for itself, and which values pass from one call to the next.

    Inputs and outputs are named by their positions in the graph of a single call.

    Attributes:
        varying: inputs of which each call has its own.
        carried: for each input that a call changes, the output that is the next call's input.
        written: for each output that is written into tensors in place, their slots.
        rebound: for each output that attributes are set to, their slots.
        each: outputs that are needed of each call, not only of the last one.
        replaceable: slots of inputs to which user code may assign another tensor between two calls.
        several: the executable for a whole group, once it was compiled.
        compiled: how many executables the process had compiled when that one was last used.
    """

    varying: list[int]
    carried: dict[int, int]
    written: dict[int, list[Slot]]
    rebound: dict[int, list[Slot]]
    each: list[int]
    replaceable: list[Slot]
    several: RepeatedGraph | None = None
    compiled: int = 0


def layout_of(call: CachedCall) -> GroupLayout | str:
    """The layout of a group of calls; or why each call must be executed by itself, in words."""
    sources, targets = call.values.sources, call.values.targets
    if not call.text:
        return "the step was traced without keeping its graph"
    if call.gradients.created:
        return "the step creates gradients and keeps them; free_grads=True drops them in the step"
    if any(slot.kind == "state" for slots in targets for slot in slots):
        return "the optimizer sets its state to new tensors"
    by_key = {
        source.key: index for index, source in enumerate(sources) if isinstance(source, Slot) and source.kind != "batch"
    }
    varying = [
        index
        for index, source in enumerate(sources)
        if source == "seed"
        or (isinstance(source, Slot) and source.kind == "batch")
        or (isinstance(source, Number) and source.roles)
    ]
    carried: dict[int, int] = {}
    written: dict[int, list[Slot]] = {}
    rebound: dict[int, list[Slot]] = {}
    for output, slots in enumerate(targets):
        for slot in slots:
            if slot.key in by_key:
                carried[by_key[slot.key]] = output
            binds = slot.kind == "buffer" or slot.key in call.host.rebound
            (rebound if binds else written).setdefault(output, []).append(slot)
    returned = {leaf for kept in call.values.kept.values() for leaf in kept.leaves if isinstance(leaf, int)}
    each = sorted(returned | rebound.keys() | (written.keys() - set(carried.values())))
    replaceable = [source for source in sources if isinstance(source, Slot) and source.kind not in ("batch", "tensor")]
    return GroupLayout(varying, carried, written, rebound, each, replaceable)
