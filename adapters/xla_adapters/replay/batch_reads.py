"""`BatchReads`: what a library reads in a traced step, and how a replay does it with the values of its own batch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from xla_adapters.replay.tensor_places import CannotReplay, Computed
from xla_adapters.runtime import Runtime
from xla_adapters.tracing.allowed_reads import AllowedReads
from xla_adapters.tracing.deferred_numbers import DeferredNumber, DeferredNumbers, Expression
from xla_adapters.tracing.host_values import HostValue, Known
from xla_adapters.tracing.reads_on_host import compute

# The name under which a step returns the tensors that bring its deferred numbers to the host.
NUMBERS = "deferred numbers"


@dataclass(eq=False)
class BatchReads:
    """What a library reads in one traced call of a step.

    Attributes:
        sources: the tensors of the batch that values on the host are computed from, with their positions.
        constants: what was copied to the device inside the step, which is the same in each replay.
        reads: the values that are read on the host.
        decisions: what they decide. A call in which it is decided otherwise is another one.
        uploads: positions in `reads` of those that are copied to the device; with shapes and dtypes.
        places: of the deferred numbers; see `DeferredNumbers`.
        key: equal for two calls that read the same.
    """

    sources: list[tuple[HostValue, int]]
    constants: Known
    reads: list[HostValue]
    decisions: list[tuple[Expression, Any]]
    uploads: list[tuple[int, Hashable]]
    places: list[tuple[int, int]]
    key: Hashable = field(init=False)

    def __post_init__(self) -> None:
        names: dict[HostValue, Hashable] = dict(self.sources)
        names |= {source: ("constant", repr(value.tolist())) for source, value in self.constants.items()}
        forms = tuple(read.form(names) for read in self.reads)
        self.key = forms, tuple(self.places), *self.course

    @property
    def course(self) -> tuple[Hashable, Hashable]:
        """What is decided: equal for two calls that go the same way."""
        return tuple((expression, repr(outcome)) for expression, outcome in self.decisions), tuple(self.uploads)

    def of(self, values: Mapping[int, torch.Tensor]) -> ReadsOfReplay | None:
        """The reads of another call; None if it is not known that it goes the same way.

        Args:
            values: of its batch, by position.
        """
        if not all(position in values for _, position in self.sources):
            return None
        known: Known = {**self.constants, **{source: values[position] for source, position in self.sources}}

        def on_host(index: int) -> Any:
            return self.reads[index].get(known)

        try:
            for expression, outcome in self.decisions:
                present = compute(expression, _unknown, on_host)
                if type(present) is not type(outcome) or present != outcome:
                    return None
            uploads = [on_host(index) for index, _ in self.uploads]
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError):
            # What is read after another decision need not be computable. The trace tells what is wrong, if anything is.
            return None
        if any(_form(value) != form for value, (_, form) in zip(uploads, self.uploads, strict=True)):
            return None
        return ReadsOfReplay(self, on_host, uploads)


class ReadsOfReplay:
    """What is read in one replayed call.

    Args:
        reads: what was read when it was traced.
        on_host: returns a value that is read on the host, by its position.
        uploads: what the step copies to the device.
    """

    def __init__(self, reads: BatchReads, on_host: Callable[[int], Any], uploads: Sequence[torch.Tensor]) -> None:
        self._reads = reads
        self._on_host = on_host
        self._uploads = uploads
        self._numbers: DeferredNumbers | None = None

    def upload(self, runtime: Runtime) -> list[torch.Tensor]:
        """Copies to the device what the step does."""
        return [runtime.transfers.to_device(value) for value in self._uploads]

    def value(self, computed: Computed, stacked: Callable[[], list[torch.Tensor]], runtime: Runtime) -> Any:
        """A number that the step returns.

        Args:
            computed: how.
            stacked: returns the tensors that bring the deferred numbers to the host.
            runtime: the runtime.
        """
        if self._numbers is None:
            self._numbers = DeferredNumbers.of_replay(runtime, stacked(), self._reads.places)
        numbers = self._numbers
        return compute(computed.expression, lambda index: DeferredNumber(numbers, index), self._on_host)

    def ended(self, *, executed: bool) -> None:
        """The call has ended: the numbers have values now, or never will."""
        if self._numbers is not None:
            if executed:
                self._numbers.executed()
            else:
                self._numbers.discard()


def reads_of(allowed_reads: AllowedReads | None, batch: Sequence[torch.Tensor]) -> BatchReads | None:
    """What was read in a traced call; None if it has noted nothing.

    Raises:
        CannotReplay: a replay cannot read the same.
    """
    if allowed_reads is None or allowed_reads.noted is None:
        return None
    noted = allowed_reads.noted
    if not noted.is_repeatable:
        raise CannotReplay("what is read in the step cannot be read again in a replay")
    positions = {id(tensor): index for index, tensor in enumerate(batch)}
    sources: list[tuple[HostValue, int]] = []
    constants: Known = {}
    for source in {source: None for read in noted.reads for source in read.sources}:
        tensor = source.tensor() if source.tensor is not None else None
        position = positions.get(id(tensor))
        if position is not None:
            sources.append((source, position))
        elif tensor is None:
            # It was made in the step, and is gone.
            constants[source] = allowed_reads.copied(source)
        else:
            raise CannotReplay("a value is read in the step that is not computed from its batch alone")
    return BatchReads(
        sources=sources,
        constants=constants,
        reads=noted.reads,
        decisions=noted.decisions,
        uploads=[(index, (tensor.shape, tensor.dtype)) for index, tensor in noted.uploads],
        places=allowed_reads.deferred.places,
    )


def _unknown(index: int) -> Any:
    raise AssertionError("nothing is decided by what the device computes")


def _form(value: torch.Tensor) -> Hashable:
    return value.shape, value.dtype
