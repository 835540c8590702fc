"""`Trace`: puts placeholders in place of the tensors that a step uses, and makes a program of what it records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from xla_adapters.errors import PlaceholderError
from xla_adapters.runtime import Runtime
from xla_adapters.runtime.traced_tensors import TracedTensors
from xla_adapters.tracing.placeholders.numbers import TraceNumbers
from xla_adapters.tracing.placeholders.program import Program, returned_values, unused_arguments
from xla_adapters.tracing.undo_log import UndoLog
from xla_adapters.utils.location import Location, current_location
from xla_adapters.utils.torch_modes import unwrapped

# What torch_tpu says of a tensor that a trace reads and that is no argument of its program.
_NOT_GIVEN = "was not provided"


@dataclass(eq=False)
class ProgramInput:
    """A tensor that has a placeholder in its place.

    Attributes:
        tensor: that the step uses.
        value: what it held before.
        stand_in: the argument of the program.
        is_upload: whether the step itself copied it from the host.
        aliases: other tensors with the same memory, shape and strides.
        line: where the step first used it, if it shares its memory with others.
    """

    tensor: torch.Tensor
    value: torch.Tensor
    stand_in: torch.Tensor
    is_upload: bool
    aliases: list[torch.Tensor]
    line: Location | None = None


class Trace:
    """Records what a step does as a program.

    A tensor gets its placeholder when the step first uses it. In-place operations then change the tensor as on any
    device, but no buffer: at the end the tensor gets what the program computed, or its value from before back.

    Args:
        runtime: the runtime.
        undo_logs: returns the undo logs of the open steps, the innermost first.

    Attributes:
        inputs: the tensors with placeholders, in the order of the program's arguments.
        numbers: further arguments.
        traced: the tensors of the trace.
    """

    def __init__(self, runtime: Runtime, undo_logs: Callable[[], Sequence[UndoLog]]) -> None:
        self._runtime = runtime
        self._undo_logs = undo_logs
        self._contexts = ExitStack()
        self.inputs: list[ProgramInput] = []
        self._by_memory: dict[int, list[ProgramInput]] = {}
        self.numbers = TraceNumbers(runtime)
        self.traced = TracedTensors()

    def begin(self) -> None:
        """Starts recording."""
        placeholders = self._runtime.placeholders
        # What is pending would be a part of the trace. torch_tpu aborts the process if it is launched meanwhile.
        self._runtime.tracing.flush()
        self._random = self._contexts.enter_context(placeholders.tracing_random())
        self._random_before = self._random()
        self._contexts.enter_context(placeholders.recording())
        self._runtime.tracing.begin_trace(self.traced)

    def end(self) -> None:
        """Stops recording."""
        self._runtime.tracing.begin_trace(None)
        self._contexts.close()

    # ---- while the step runs -----------------------------------------------------------------------

    def take_in(self, tensor: torch.Tensor, *, is_upload: bool = False) -> None:
        """Puts a placeholder in place of a tensor of the device, unless it is part of the trace already.

        To be called with torch's function modes off.
        """
        if self.traced.has(tensor):
            return
        tensor = unwrapped(tensor)
        # A backward adds to it; that of a parameter which is frozen now is still there. torch_tpu's
        # `average.copy_(parameter)` gives the parameter's also to the average, which is none.
        has_own = tensor.requires_grad or isinstance(tensor, torch.nn.Parameter)
        grad = tensor.grad if tensor.is_leaf and has_own else None
        # A transform of `torch.func` that is under way would wrap the placeholder, too.
        with torch.no_grad(), torch._C._DisableFuncTorch():
            outermost, *inner = list(self._undo_logs())[::-1]
            if tensor.is_leaf and (tensor.requires_grad or grad is not None):
                outermost.record_leaf(tensor)
            else:
                outermost.record(tensor)
            self._swap(tensor, is_upload)
            for log in inner:
                log.record(tensor)
        if grad is not None and self._runtime.device.owns(grad):
            self.take_in(grad)

    def _swap(self, tensor: torch.Tensor, is_upload: bool) -> None:
        value = tensor.detach()
        memory = value.untyped_storage()._cdata
        sharing = self._by_memory.setdefault(memory, [])
        known = next((found for found in sharing if _lies_as(found.value, value)), None)
        if known is not None and known.tensor is tensor:
            # A step inside the step has put its value from before back.
            tensor.data = known.stand_in.clone()
            self.traced.add(tensor)
            return
        if known is not None:
            known.aliases.append(tensor)
            tensor.data = known.tensor.detach()
            return
        stand_in = self._runtime.placeholders.stand_in(torch.empty(value.shape, dtype=value.dtype, device="meta"))
        tensor.data = stand_in.clone()
        self.traced.add(tensor)
        is_view = bool(sharing) or tensor._base is not None or _is_part(value)
        found = ProgramInput(tensor, value, stand_in, is_upload, [], current_location() if is_view else None)
        self.inputs.append(found)
        sharing.append(found)

    # ---- its end -----------------------------------------------------------------------------------

    def program(self, leaves: Sequence[tuple[torch.Tensor, torch.Tensor | None]]) -> Program:
        """What the trace computes.

        Args:
            leaves: with their gradients from before the step; new ones are results, too.

        Raises:
            PlaceholderError: it reads a tensor that has no placeholder, or writes to memory that two tensors share.
        """
        try:
            return self._program(leaves)
        except RuntimeError as error:
            if _NOT_GIVEN not in str(error):
                raise
            form = str(error).rpartition("not provided: ")[2].strip()
            raise PlaceholderError(
                f"the step reads a tensor of the form {form} that no function of torch was given in it: was it saved "
                "for a backward before the step? The step was discarded; parameters are as before it"
            ) from error

    def _program(self, leaves: Sequence[tuple[torch.Tensor, torch.Tensor | None]]) -> Program:
        placeholders = self._runtime.placeholders
        arguments = [item.stand_in for item in self.inputs] + self.numbers.stand_ins
        made = self._made(leaves)
        draws = not placeholders.same_value(self._random_before, self._random())
        results = [item.tensor.detach() for item in self.inputs] + [tensor.detach() for tensor in made]
        if draws:
            arguments.append(self._random_before)
            results.append(self._random())
        if not results:
            return Program(self._runtime, text="", arguments=[], results=[], changed=[], made=[], draws=False)
        text = placeholders.text(results, arguments)
        unused = unused_arguments(text)
        if unused:
            inputs, values = self._leave_out(unused)
            try:
                return self._program(leaves)
            except RuntimeError as error:
                if _NOT_GIVEN not in str(error):
                    raise
                # The trace needs their shapes. So they are arguments of which nothing is computed.
                self._take_back(inputs, values)
        returned = returned_values(text)
        changed = [index for index in range(len(self.inputs)) if returned[index] != f"%arg{index}"]
        given = [index for index in range(len(results)) if index in changed or index >= len(self.inputs)]
        shared = _without_own_buffer(returned, given)
        if shared:
            for index in shared:
                results[index] = _copied(results[index])
            text = placeholders.text(results, arguments)
        self._check_memory(changed)
        return Program(
            self._runtime,
            text=text,
            arguments=arguments,
            results=[results[index] for index in changed] + results[len(self.inputs) :],
            changed=changed,
            made=made,
            draws=draws,
        )

    def _leave_out(self, unused: set[int]) -> tuple[list[ProgramInput], list[torch.Tensor]]:
        """Tensors that had placeholders whose values the step did not use have none any more.

        Otherwise the first step, which finds no gradients that it drops, would be another program.

        Returns:
            What `_take_back` needs.
        """
        inputs, values = self.inputs, [item.tensor.detach() for item in self.inputs]
        self.inputs = [item for index, item in enumerate(inputs) if index not in unused]
        for index in unused:
            item = inputs[index]
            for tensor in (item.tensor, *item.aliases):
                tensor.data = item.value.detach()
            self._by_memory[item.value.untyped_storage()._cdata].remove(item)
        return inputs, values

    def _take_back(self, inputs: list[ProgramInput], values: list[torch.Tensor]) -> None:
        """They have placeholders again."""
        here = set(map(id, self.inputs))
        for item, value in zip(inputs, values, strict=True):
            if id(item) not in here:
                for tensor in (item.tensor, *item.aliases):
                    tensor.data = value
                self._by_memory[item.value.untyped_storage()._cdata].append(item)
        self.inputs = inputs

    def _made(self, leaves: Sequence[tuple[torch.Tensor, torch.Tensor | None]]) -> list[torch.Tensor]:
        """The tensors without a value that code can use after the step."""
        inputs = {id(tensor) for item in self.inputs for tensor in (item.tensor, *item.aliases)}
        grads = [leaf.grad for leaf, before in leaves if leaf.grad is not None and leaf.grad is not before]
        grads = [grad for grad in grads if self._runtime.device.owns(grad)]
        found = {id(tensor): tensor for tensor in (*self.traced.alive(), *grads)}
        return [tensor for key, tensor in found.items() if key not in inputs]

    def _check_memory(self, changed: Sequence[int]) -> None:
        written = {id(self.inputs[index]) for index in changed}
        for sharing in self._by_memory.values():
            for item in sharing:
                is_view = len(sharing) > 1 or item.tensor._base is not None or _is_part(item.value)
                if is_view and id(item) in written:
                    line = next((used.line for used in (item, *sharing) if used.line is not None), None)
                    raise PlaceholderError(
                        f"the step writes to a tensor of the shape {tuple(item.value.shape)}, which is a view of "
                        "another one, or has one, made before the step: the other would not see it. Make the view in "
                        f"the step, or write before or after it\n  where the step first uses the view: {line}"
                    )

    def give_values(self, program: Program, results: Sequence[torch.Tensor]) -> None:
        """Gives all tensors their values; after `end`, with function modes off.

        Args:
            program: of the trace.
            results: what it has computed.
        """
        found = dict(zip(program.changed, results, strict=False))
        for index, item in enumerate(self.inputs):
            value = found.get(index, item.value)
            for tensor in (item.tensor, *item.aliases):
                tensor.data = value.detach()
        for tensor, value in zip(program.made, results[len(program.changed) :], strict=False):
            tensor.data = value
        if program.draws:
            self._runtime.placeholders.set_random_state(results[-1])

    def values(self, program: Program) -> list[torch.Tensor]:
        """The values of the program's arguments."""
        values = [plain(item.value) for item in self.inputs] + self.numbers.uploads()
        return [*values, self._runtime.placeholders.random_state()] if program.draws else values


def _without_own_buffer(returned: Sequence[str], given: Sequence[int]) -> list[int]:
    """Which of the given results are arguments, or the same value as an earlier one: torch_tpu lets them share."""
    seen: set[str] = set()
    found = []
    for index in given:
        if returned[index] in seen or returned[index].startswith("%arg"):
            found.append(index)
        seen.add(returned[index])
    return found


def _copied(value: torch.Tensor) -> torch.Tensor:
    """The same as another value of the trace. `clone` is none."""
    return torch.cat([value.unsqueeze(0)]).squeeze(0)


def _is_part(value: torch.Tensor) -> bool:
    return value.numel() * value.element_size() != value.untyped_storage().nbytes()


def is_plain(value: torch.Tensor) -> bool:
    """Whether a tensor is all of its memory, in the order of its elements."""
    return value.is_contiguous() and not _is_part(value)


def plain(value: torch.Tensor) -> torch.Tensor:
    """The value as an argument of a program: of a view a copy."""
    return value if is_plain(value) else value.detach().clone(memory_format=torch.contiguous_format)


def _lies_as(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.shape == other.shape
        and one.dtype == other.dtype
        and one.stride() == other.stride()
        and one.storage_offset() == other.storage_offset()
    )
