"""`TracedCall`: a traced call of a step, described as a call of its executable."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from xla_adapters.replay.attribute_changes import AttributeChange
from xla_adapters.replay.batch_reads import BatchReads
from xla_adapters.replay.guards.snapshot import ModuleSnapshot
from xla_adapters.replay.number_inputs import HostUpdate, Number
from xla_adapters.replay.optimizer_host_math import OptimizerHostMath
from xla_adapters.replay.tensor_places import Returned, TensorPlace, is_state


@dataclass(frozen=True, kw_only=True)
class GraphValues:
    """Where the inputs of the executable come from, and where its outputs go.

    Attributes:
        sources: for each input a place, `"seed"` (the device's random seed), or a Python number.
        targets: for each output the places that it is written to.
        donated: positions in `sources` whose buffers the executable reuses.
        elsewhere: the places of tensors that are read or written in place, and are part neither of the state nor of the
            batch (gradients, say).
        returned: the values that the step returns, by name.
    """

    sources: list[TensorPlace | str | Number]
    targets: list[list[TensorPlace]]
    donated: list[int]
    elsewhere: list[TensorPlace]
    returned: dict[str, Returned]

    @cached_property
    def state(self) -> list[torch.Tensor]:
        """The tensors that the executable reads or writes, each once. Without those of a batch and gradients."""
        read = [source.owner for source in self.sources if is_state(source)]
        written = [place.owner for places in self.targets for place in places if is_state(place)]
        return list({id(tensor): tensor for tensor in (*read, *written)}.values())


@dataclass(frozen=True, kw_only=True)
class GradientChanges:
    """What the step does to the `grad` attributes of leaves.

    Attributes:
        before: the leaves, and whether they have a gradient before the step.
        created: `id` of each leaf that gets a new tensor as its gradient.
        dropped: leaves that have no gradient after the step.
    """

    before: list[tuple[torch.Tensor, bool]]
    created: set[int]
    dropped: list[torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class HostEffects:
    """What the step does on the host.

    Attributes:
        optimizers: the host math of those that step, in the order of their updates.
        attributes: plain attributes that the step changes.
        reassigned: keys of the places that get a new tensor, not a new value.
    """

    optimizers: list[OptimizerHostMath]
    attributes: list[AttributeChange]
    reassigned: set[tuple[str, int, str | int]]

    def reason_to_trace(self) -> str | None:
        """Why the next call may do other things on the host, in words; None if it does the same."""
        changing: list[OptimizerHostMath | AttributeChange] = [*self.optimizers, *self.attributes]
        return next((reason for item in changing if (reason := item.reason_to_trace()) is not None), None)

    def difference(self, earlier: HostEffects) -> str | None:
        """How these differ from those of the call before, in words; None if a replay does both."""
        if self.reassigned != earlier.reassigned or len(self.attributes) != len(earlier.attributes):
            return "other attributes were changed than in the call before"
        for mine, theirs in zip(self.attributes, earlier.attributes, strict=True):
            if not mine.agree(theirs):
                return f"{type(mine.owner).__name__}.{mine.name} was changed otherwise than in the call before"
        return None


@dataclass(eq=False)
class TracedCall:
    """One traced call of a step: everything that a replay of it does. Two calls that agree can be replayed.

    Attributes:
        values: inputs and outputs of the executable.
        gradients: what becomes of gradients.
        host: what the step does on the host.
        snapshot: the modules and other objects that the graph depends on.
        updates: the optimizers' host math of this call, or of its last replay.
        unrepeatable: what this call did that a replay cannot do; empty if nothing.
        sharing: which tensors of the state, and at the places elsewhere, shared their storage, as `groups`.
        graph: the name of the graph.
        reads: what is read in the step, if that is noted.
        executable: its name; empty until the call was executed.
        flops: of the graph, if they are known.
        outputs: those outputs of the last call that are needed as examples for pending outputs, by position.
    """

    values: GraphValues
    gradients: GradientChanges
    host: HostEffects
    snapshot: ModuleSnapshot
    updates: list[HostUpdate]
    unrepeatable: str
    sharing: tuple[int, ...]
    graph: bytes
    reads: BatchReads | None = None
    executable: bytes = b""
    flops: int | None = None
    outputs: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def returned(self) -> dict[str, Returned]:
        """The values that the step returns, by name."""
        return self.values.returned

    @cached_property
    def identity(self) -> Hashable:
        """Equal for two calls of the same graph with the same inputs and outputs."""
        return (self.graph, tuple(map(_key, self.values.sources)), *self._state_key(), *self._results_key())

    def _state_key(self) -> tuple[Hashable, ...]:
        gradients = self.gradients
        before = tuple((id(leaf), was_there) for leaf, was_there in gradients.before)
        return tuple(self.values.donated), tuple(map(id, gradients.dropped)), before, frozenset(self.host.reassigned)

    def _results_key(self) -> tuple[Hashable, ...]:
        return (
            repr(_keys(self.values.targets)),
            frozenset(self.gradients.created),
            repr(self._returned_keys()),
            self._reads_key,
        )

    @property
    def _reads_key(self) -> Hashable:
        return None if self.reads is None else self.reads.key

    def _returned_keys(self) -> dict[str, Any]:
        return {
            name: (returned.spec, [_key(leaf) for leaf in returned.leaves])
            for name, returned in self.values.returned.items()
        }

    @cached_property
    def numbers(self) -> list[Number]:
        """The inputs that began as Python numbers, in the order in which they were traced."""
        return [source for source in self.values.sources if isinstance(source, Number)]

    def names_of_tensors(self) -> dict[int, str]:
        """For messages: the names of the modules' tensors, by `id`."""
        return {
            id(tensor): f"{name}.{key}"
            for name, module in self.snapshot.modules
            for group in (module._parameters, module._buffers)
            for key, tensor in group.items()
            if tensor is not None
        }

    def remember_outputs(self, results: Sequence[torch.Tensor]) -> None:
        """Stores the outputs that `outputs` is for. Others would be kept alive until the end of the next call."""
        self.outputs = {index: results[index] for index in self._remembered}

    @cached_property
    def _remembered(self) -> list[int]:
        return sorted({leaf for value in self.returned.values() for leaf in value.leaves if isinstance(leaf, int)})

    def difference(self, other: TracedCall) -> str | None:
        """How this call differs from an earlier one, in words; None if a replay of one is a replay of the other.

        Args:
            other: the call before.
        """
        mine, theirs = self.values, other.values
        gradients, earlier = self.gradients, other.gradients
        if self.executable != other.executable:
            return "the graph is another one than in the call before"
        if list(map(_key, mine.sources)) != list(map(_key, theirs.sources)):
            return "the inputs of the graph come from other tensors than in the call before"
        if _keys(mine.targets) != _keys(theirs.targets) or gradients.created != earlier.created:
            return "the results of the graph go to other tensors than in the call before"
        if mine.donated != theirs.donated or list(map(id, gradients.dropped)) != list(map(id, earlier.dropped)):
            return "other values are overwritten or dropped than in the call before"
        if [(id(leaf), was) for leaf, was in gradients.before] != [(id(leaf), was) for leaf, was in earlier.before]:
            return "other gradients exist than before the last call"
        if any(now.takes_another_course(before) for now, before in zip(self.updates, other.updates, strict=True)):
            return "the optimizer took another course than in the call before"
        if self._returned_keys() != other._returned_keys():
            return "the step returns other things than in the call before"
        if self._reads_key != other._reads_key:
            return "other values are read in the step than in the call before"
        return self.host.difference(other.host) or other.snapshot.changed_until(self.snapshot)


def _key(source: Any) -> Any:
    if isinstance(source, TensorPlace):
        return source.key
    return ("number", str(source.value.dtype), source.of_update) if isinstance(source, Number) else source


def _keys(targets: list[list[TensorPlace]]) -> list[list[Any]]:
    return [sorted(map(repr, (place.key for place in places))) for places in targets]
