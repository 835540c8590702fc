"""`ReadsOnHost`: what one step reads of the integers of its batch, so that replays can read it of their own batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from xla_adapters.tracing.deferred_numbers import DeferredNumber, Expression, expression_of
from xla_adapters.tracing.host_values import HostValue, HostValues
from xla_adapters.utils.nested_values import is_simple


class ReadsOnHost:
    """Notes the values that a library reads on the host in one traced step, and what they decide there.

    A replay reads them of its own batch. It stands for the traced step only if everything is decided as there.

    Args:
        values: what the host knows in the step.

    Attributes:
        is_open: whether the step has not ended.
        reads: the values that are read.
        decisions: what is decided by them, and how it was in this step.
        uploads: positions in `reads` of tensors that are copied to the device, and the copies.
        is_repeatable: whether a replay can read and decide the same.
    """

    kind = "host"

    def __init__(self, values: HostValues) -> None:
        self._values = values
        self.is_open = True
        self.reads: list[HostValue] = []
        self.decisions: list[tuple[Expression, Any]] = []
        self.uploads: list[tuple[int, torch.Tensor]] = []
        self.is_repeatable = True

    def read(
        self, function: Callable[..., Any], tensor: HostValue, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """The result of a function that reads a tensor: a `DeferredNumber` for `item`, else a plain value."""
        # A copy, because the caller may write into the result.
        copy = HostValue((torch.clone, [tensor], {}), sources=tensor.sources)
        number = self._note(HostValue((function, [copy, *args], dict(kwargs)), sources=tensor.sources))
        return number if function is torch.Tensor.item else number.value()

    def uploaded(self, tensor: HostValue, upload: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """A tensor that the host computes, on the device."""
        self._note(tensor)
        copy = upload(self._values.value(tensor))
        self._values.follow(copy, tensor)
        self.uploads.append((len(self.reads) - 1, copy))
        return copy

    def _note(self, read: HostValue) -> DeferredNumber:
        # Not later: what the host has no copy of is there only in the step.
        self._values.fetch(read)
        self.reads.append(read)
        return DeferredNumber(self, len(self.reads) - 1)

    def value(self, index: int) -> Any:
        """A value that was read, for a use that needs it: in the step, a replay must then have the same one."""
        value = self._values.value(self.reads[index])
        if self.is_open:
            self.is_repeatable = self.is_repeatable and is_simple(value)
            self.decisions.append((("host", index), value))
        return value

    def decide(self, function: Callable[..., Any], operands: tuple[Any, ...]) -> Any:
        """See `Numbers`. In a replay the result must be the same."""
        expressions = [expression_of(operand) for operand in operands]
        if None in expressions:
            self.is_repeatable = False
            return function(*(one.value() if isinstance(one, DeferredNumber) else one for one in operands))
        expression = "call", function, *expressions
        outcome = compute(expression, _no_output, lambda index: self._values.value(self.reads[index]))
        self.decisions.append((expression, outcome))
        return outcome


def _no_output(index: int) -> Any:
    raise AssertionError("the host does not know what the device computes")


def compute(expression: Expression, output: Callable[[int], Any], on_host: Callable[[int], Any]) -> Any:
    """The value of an expression.

    Args:
        expression: what is computed of which numbers.
        output: returns a number that the device computes, by its position.
        on_host: returns a value that is read on the host, by its position.
    """
    kind, first, *operands = expression
    if kind == "call":
        return first(*(compute(operand, output, on_host) for operand in operands))
    return first if kind == "plain" else (output if kind == "output" else on_host)(first)
