"""`Verification`: compares a traced call with what its replay computes from the same state and batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from xla_adapters.replay.launcher import Launcher
from xla_adapters.replay.tensor_places import CallTensors, CannotReplay, TensorPlace
from xla_adapters.replay.traced_call import TracedCall
from xla_adapters.runtime import Runtime
from xla_adapters.utils.nested_values import same_bits

# The numbers of replays after which a call is verified; after the last one, every `replay_verify_every`.
FIRST = tuple(2**power for power in range(3, 11))


def next_due(replays: int, every: int | None) -> int | None:
    """After how many replays the next call is verified; None for never.

    Args:
        replays: how many there were so far.
        every: as `XLAConfig.replay_verify_every`.
    """
    if every is None:
        return None
    early = next((count for count in FIRST if count > replays), replays + every)
    return min(early, replays + every)


@dataclass
class Verification:
    """Verifies a call that is traced, although it could be replayed.

    If the traced call has the same graph, inputs and outputs, its results are the same to the last bit. Otherwise the
    executable of replays is run on copies of the inputs, and the results are compared.

    Attributes:
        launcher: what replays call.
        tensors: of the call.
        inputs: of the executable, before the step.
        agrees: whether the traced call is the same; set by `before_execution`.
        was_cut: whether part of the traced call was executed before its end.
    """

    launcher: Launcher
    tensors: CallTensors
    inputs: list[torch.Tensor]
    agrees: bool = False
    was_cut: bool = False
    _results: list[torch.Tensor] = field(default_factory=list)

    def before_execution(self, traced: TracedCall | CannotReplay, runtime: Runtime, *, was_cut: bool) -> None:
        """To be called when the call is traced and not executed yet.

        Args:
            traced: the call, or why it cannot be captured.
            runtime: the runtime.
            was_cut: whether part of it was executed before its end. Then the inputs are overwritten already.
        """
        self.was_cut = was_cut
        if was_cut:
            self.inputs = []
            return
        call = self.launcher.call
        if isinstance(traced, TracedCall) and traced.identity == call.identity:
            values = runtime.transfers.to_host([number.value for number in traced.numbers])
            expected = [number.present for number in call.numbers]
            self.agrees = [float(value) for value in values] == expected
        if not self.agrees:
            copies = dict(zip(call.values.donated, self._copies(runtime), strict=True))
            inputs = [copies.get(index, value) for index, value in enumerate(self.inputs)]
            self._results = self.launcher.run(inputs, runtime)
        self.inputs = []

    def _copies(self, runtime: Runtime) -> list[torch.Tensor]:
        taken = [self.inputs[index] for index in self.launcher.call.values.donated]
        return runtime.values.copies(taken) if taken else []

    def difference(self, returned: dict[str, list[object]], runtime: Runtime) -> str | None:
        """What differs between the executed call and its replay, in words; None if nothing.

        Args:
            returned: the leaves of the values that the call returned, by name.
            runtime: the runtime.
        """
        if self.was_cut:
            return "where it is executed (the traced call reads a value before its end)"
        with torch.no_grad(), torch._C.DisableTorchFunction():
            pairs = list(self._pairs(returned))
            present = runtime.transfers.to_host([tensor for _, tensor, _ in pairs])
            expected = runtime.transfers.to_host([result for _, _, result in pairs])
        for (what, _, _), mine, theirs in zip(pairs, present, expected, strict=True):
            if mine.shape != theirs.shape or not same_bits(mine, theirs):
                return what
        return None

    def _pairs(self, returned: dict[str, list[object]]) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        call = self.launcher.call
        names = call.names_of_tensors()
        for output, places in enumerate(call.values.targets):
            for place in places:
                if place.kind != "grad" or place.owner.grad is not None:
                    yield _name(place, names), place.get(self.tensors), self._results[output]
        for name, value in call.values.returned.items():
            for leaf, now in zip(value.leaves, returned.get(name, ()), strict=False):
                if isinstance(leaf, int) and isinstance(now, torch.Tensor):
                    yield f"what the step returns ({name})", now, self._results[leaf]


def _name(place: TensorPlace, names: dict[int, str]) -> str:
    if place.kind in ("tensor", "grad"):
        name = names.get(id(place.owner), "an optimizer's state or another tensor")
        return name if place.kind == "tensor" else f"the gradient of {name}"
    return f"the {place.kind} {place.name}"
