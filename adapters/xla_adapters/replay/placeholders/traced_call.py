"""`PlaceholderCall`: a traced call of a step, described as a call of its program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from xla_adapters.replay.guards.snapshot import ModuleSnapshot
from xla_adapters.replay.number_inputs import HostUpdate, numbers_of
from xla_adapters.replay.tensor_places import CallTensors, Returned, TensorPlace
from xla_adapters.replay.traced_call import HostEffects
from xla_adapters.runtime import Runtime
from xla_adapters.runtime.interface.placeholders import Run
from xla_adapters.tracing.placeholders.numbers import uploaded_numbers
from xla_adapters.tracing.placeholders.trace import is_plain, plain

# How such a reason begins.
OTHER_GRADIENTS = "a gradient is"


@dataclass(eq=False, kw_only=True)
class PlaceholderCall:
    """One traced call: everything that a replay of it does. Two calls that agree can be replayed.

    Attributes:
        program: names the program.
        sources: for each tensor that the program reads a place, or the value of what the step itself copies to the
            device: known to be the same each time, because the step's code may be left out.
        targets: for each result the places that get it.
        returned: the values that the step returns, by name.
        roles: for each number that the program reads its position among those of the updates.
        chunks: how these numbers are packed; see `TraceNumbers`.
        draws: whether it moves the random stream.
        before: the leaves, and whether they have a gradient before the step.
        dropped: leaves that have no gradient after the step.
        host: what the step does on the host.
        updates: the optimizers' host math in this call, or in its last replay.
        snapshot: the modules that the program depends on.
        forms: shape and dtype of those results that the step returns.
        told_ranks: what other ranks are told before each launch; empty if the program does without them.
        unrepeatable: what this call did that a replay cannot do; empty if nothing.
        run: the executable; set when the call was executed.
        flops: of the program; not known.
    """

    program: str
    sources: list[TensorPlace | torch.Tensor]
    targets: list[list[TensorPlace]]
    returned: dict[str, Returned]
    roles: list[int]
    chunks: list[tuple[int, torch.dtype]]
    draws: bool
    before: list[tuple[torch.Tensor, bool]]
    dropped: list[torch.Tensor]
    host: HostEffects
    updates: list[HostUpdate]
    snapshot: ModuleSnapshot
    forms: dict[int, tuple[torch.Size, torch.dtype]]
    told_ranks: str = ""
    unrepeatable: str = ""
    run: Run | None = None
    flops: int | None = None

    @property
    def graph(self) -> bytes:
        """The name of the program, as that of the graph of a `TracedCall`."""
        return self.program.encode()

    @property
    def identity(self) -> Hashable:
        """Equal for two calls of one program with the same inputs and outputs."""
        sources = tuple(source.key if isinstance(source, TensorPlace) else "constant" for source in self.sources)
        before = tuple((id(leaf), was_there) for leaf, was_there in self.before)
        dropped = tuple(map(id, self.dropped))
        return (
            self.program,
            sources,
            self._target_keys(),
            repr(self._returned_keys()),
            tuple(self.roles),
            before,
            dropped,
        )

    def _target_keys(self) -> str:
        return repr([[place.key for place in places] for places in self.targets])

    def _returned_keys(self) -> dict[str, Any]:
        return {
            name: (returned.spec, [leaf.key if isinstance(leaf, TensorPlace) else leaf for leaf in returned.leaves])
            for name, returned in self.returned.items()
        }

    def difference(self, other: PlaceholderCall) -> str | None:
        """How this call differs from an earlier one, in words; None if a replay of one is a replay of the other."""
        theirs_before = {id(leaf): was_there for leaf, was_there in other.before}
        if any(theirs_before.get(id(leaf), was_there) is not was_there for leaf, was_there in self.before):
            return f"{OTHER_GRADIENTS} there, or absent, other than in the call before"
        if self.program != other.program:
            return "the program is another one than in the call before"
        if self.identity != other.identity:
            return "the program reads, writes or returns other tensors than in the call before"
        if any(now.takes_another_course(before) for now, before in zip(self.updates, other.updates, strict=True)):
            return "the optimizer took another course than in the call before"
        if any(
            isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor) and not torch.equal(mine, theirs)
            for mine, theirs in zip(self.sources, other.sources, strict=True)
        ):
            return "the step copies other values to the device than in the call before"
        if self.fixed() != other.fixed():
            return "a number of the optimizer that is no input of the program changed"
        return self.host.difference(other.host) or other.snapshot.changed_until(self.snapshot)

    def fixed(self) -> dict[int, float]:
        """The numbers of the updates that are constants of the program, by position."""
        variable = set(self.roles)
        return {role: value for role, value in enumerate(numbers_of(self.updates)) if role not in variable}


class _Places:
    """Where a program's tensors are: most of them in the same tensor each time.

    Args:
        sources: places, or values.
    """

    def __init__(self, sources: Sequence[TensorPlace | torch.Tensor]) -> None:
        self._fixed: list[Any] = [
            source if isinstance(source, torch.Tensor) else source.owner if source.kind == "tensor" else None
            for source in sources
        ]
        self._elsewhere = [
            (index, source)
            for index, source in enumerate(sources)
            if isinstance(source, TensorPlace) and source.kind != "tensor"
        ]

    def tensors(self, given: CallTensors) -> list[torch.Tensor]:
        """The tensors that are there now."""
        found = self._fixed.copy()
        for index, place in self._elsewhere:
            found[index] = place.get(given)
        return found


@dataclass(eq=False)
class PlaceholderLauncher:
    """Runs the program of a traced call again: checks that it still applies, collects its inputs, stores its results.

    Attributes:
        call: two traced calls agreed on it.
        compiled: not used; for the interface of `Launcher`.
    """

    call: PlaceholderCall
    compiled: int = 0
    _numbers: list[float] = field(default_factory=list)
    _uploads: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._fixed = self.call.fixed()
        # `reason_to_trace` looks at the others.
        self._to_check = [
            index
            for index, source in enumerate(self.call.sources)
            if isinstance(source, torch.Tensor) or source.kind != "tensor" or not is_plain(source.owner)
        ]
        written = {place.key for places in self.call.targets for place in places if place.kind != "created"}
        taken = written - self.call.host.reassigned
        places = [source for source in self.call.sources if isinstance(source, TensorPlace)]
        self._written = [place for place in places if place.key in taken]
        self._read = [
            place for place in places if place.kind == "tensor" and place.key not in taken and is_plain(place.owner)
        ]
        self._inputs = _Places(self.call.sources)
        self._looked_at = _Places([*self._written, *self._read])
        # The address of each of these, and whether it is contiguous, when they were looked at last.
        self._addresses: tuple[list[int], list[bool]] = [], []
        stored = [(index, place) for index, places in enumerate(self.call.targets) for place in places]
        in_place = [place.kind == "tensor" and place.key not in self.call.host.reassigned for _, place in stored]
        self._stored = [(index, place.owner) for (index, place), own in zip(stored, in_place, strict=True) if own]
        self._assigned = [item for item, own in zip(stored, in_place, strict=True) if not own]
        modules = [module for _, module in self.call.snapshot.modules]
        self._parameters = [item for module in modules for item in module._parameters.values() if item is not None]

    def reason_to_trace(
        self, tensors: CallTensors, runtime: Runtime, set_modes: Callable[[], object] | None
    ) -> str | None:
        """Why the next call of the step is not this one, in words; None if it is. See `Launcher`."""
        change = self.call.snapshot.changed_in_modes(set_modes) or self.call.host.reason_to_trace()
        if change is not None:
            return change
        for leaf, was_there in self.call.before:
            if (leaf.grad is not None) is not was_there:
                return f"{OTHER_GRADIENTS} {'absent' if was_there else 'there'}, other than when the step was traced"
        return self._replaced_data(tensors)

    def _addresses_now(self, tensors: CallTensors) -> tuple[list[int], list[bool]]:
        found = self._looked_at.tensors(tensors)
        return list(map(torch.Tensor.data_ptr, found)), list(map(torch.Tensor.is_contiguous, found))

    def _replaced_data(self, tensors: CallTensors) -> str | None:
        """Which tensor got data since the last call that the program cannot use, in words; None if none."""
        addresses = self._addresses_now(tensors)
        # Of now: other steps may have freed what was written last.
        taken = set(addresses[0][: len(self._written)])
        if any(tensor.untyped_storage().data_ptr() in taken for tensor in tensors.batch):
            return "the batch has the memory of a tensor that the step writes"
        if addresses == self._addresses:
            return None
        for place in (*self._written, *self._read):
            if not is_plain(place.get(tensors)):
                return _said(place.get(tensors), "that is a view of other data, or lies otherwise")
        memory = Counter(_memory(place.get(tensors)) for place in self.call.sources if isinstance(place, TensorPlace))
        for place in self._written:
            if memory[_memory(place.get(tensors))] > 1:
                return _said(place.get(tensors), "that another one has, too")
        self._addresses = addresses
        return None

    def new_numbers(self, updates: Sequence[HostUpdate]) -> list[float] | str:
        """The numbers that the program reads in the next call; or which constant of it changed, in words."""
        numbers = numbers_of(updates)
        for role, value in self._fixed.items():
            if numbers[role] != value:
                return f"a number of the optimizer that is no input of the program: {value:g} -> {numbers[role]:g}"
        return [numbers[role] for role in self.call.roles]

    def run(self, tensors: CallTensors, numbers: list[float], runtime: Runtime) -> Sequence[torch.Tensor]:
        """Runs the program; returns its results."""
        ranks = runtime.device.ranks
        if ranks is not None and self.call.told_ranks:
            ranks.launches(self.call.program, numbers, self.call.told_ranks)
        if numbers != self._numbers:
            self._numbers, self._uploads = numbers, uploaded_numbers(numbers, self.call.chunks, runtime)
        inputs = self._inputs.tensors(tensors)
        for index in self._to_check:
            inputs[index] = plain(inputs[index])
        inputs += self._uploads
        if self.call.draws:
            inputs.append(runtime.placeholders.random_state())
        assert self.call.run is not None
        return self.call.run(inputs)

    def write_back(self, results: Sequence[torch.Tensor], tensors: CallTensors, runtime: Runtime) -> None:
        """Stores the results where the step stores them."""
        for index, tensor in self._stored:
            tensor.data = results[index]
        for index, place in self._assigned:
            result = results[index]
            if place.kind == "created":
                place.owner.grad = result
            elif place.kind == "buffer":
                place.owner._buffers[place.name] = result
            elif place.key in self.call.host.reassigned:
                vars(place.owner)[place.name] = result
            else:
                place.get(tensors).data = result
        self._addresses = self._addresses_now(tensors)
        for attribute in self.call.host.attributes:
            attribute.apply()
        for leaf in self.call.dropped:
            leaf.grad = None
        if self.call.draws:
            runtime.placeholders.set_random_state(results[-1])

    def without_gradients(self) -> bool:
        """Whether no parameter of the modules has a gradient."""
        return all(parameter.grad is None for parameter in self._parameters)


def _memory(tensor: torch.Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def _said(tensor: torch.Tensor, what: str) -> str:
    return f"a tensor of the shape {tuple(tensor.shape)} got data {what}"
