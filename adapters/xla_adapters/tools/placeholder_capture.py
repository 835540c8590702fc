"""`PlaceholderStepCapture`: takes the programs of steps that are traced with placeholders (TorchTPU)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from xla_adapters.errors import UnsupportedOptionError
from xla_adapters.hlo.annotations import with_donors
from xla_adapters.open_step import in_step
from xla_adapters.runtime import Runtime
from xla_adapters.runtime.interface.placeholders import Run
from xla_adapters.tools.step_capture import AbstractTransfers, Delegate, StepCapture, TracedStep, named_tensors
from xla_adapters.tracing.placeholders.scope import PlaceholderScope
from xla_adapters.tracing.step_mode import READS
from xla_adapters.tracing.step_scope import current_scope
from xla_adapters.utils.location import current_location
from xla_adapters.utils.torch_modes import function_called, is_of_torch


class PlaceholderStepCapture(StepCapture):
    """`StepCapture` on TorchTPU: takes a program where it would be compiled.

    What is copied from the host has no value, unless it is a single number. Outside of steps, what is computed of such
    tensors is recorded and never executed; other operations are executed by the plugin that stands in for the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self._valueless: _Valueless
        # Of all that was copied, by ids; with the tensors, so that no other gets the same id.
        self._on_device: dict[int, tuple[torch.Tensor, str]] = {}

    def _abstract(self, stack: ExitStack) -> Runtime:
        runtime = self._runtime
        runtime.device.initialize()
        self._valueless = _Valueless(runtime, self._copied)
        stack.enter_context(self._valueless)
        return runtime.with_parts(
            transfers=AbstractTransfers(runtime.transfers, self._valueless),
            random=_Random(runtime.random),
            placeholders=_Placeholders(runtime.placeholders, self._valueless, self._taken),
            is_abstract=True,
        )

    def _placeholder(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self._valueless.make(shape, dtype)

    def _name_on_device(self, tensor: torch.Tensor, name: str) -> None:
        self._on_device[id(tensor)] = tensor, name

    def _taken(self, results: Sequence[torch.Tensor], arguments: Sequence[torch.Tensor], donated: Sequence[int]) -> Run:
        """Takes a program, which is compiled once: for the first step that computes it."""
        scope = current_scope()
        assert isinstance(scope, PlaceholderScope)
        updates = bool(scope.undo_logs()[-1].optimizers())
        forms = [(result.shape, result.dtype) for result in results]
        module, _ = self._runtime.abstract.lower(results, arguments)
        self.steps.append(
            TracedStep(
                module=with_donors(module, donated),
                names=self._named(scope, arguments),
                seconds=time.monotonic() - self._began,
                kind=self._kind(scope, updates=updates),
                argument_bytes=sum(value.numel() * value.element_size() for value in arguments),
                batch=self._batch,
                form="mlir",
            )
        )

        def run(values: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            self._end_if_taken(updates=updates)
            return [self._placeholder(shape, dtype) for shape, dtype in forms]

        return run

    def _named(self, scope: PlaceholderScope, arguments: Sequence[torch.Tensor]) -> dict[int, str]:
        names = {key: name for key, (_, name) in self._on_device.items()}
        names |= {id(tensor): name for tensor, name in named_tensors(scope.undo_logs()[-1], self._runtime)}
        places = {id(argument): number for number, argument in enumerate(arguments)}
        return {places[id(item.stand_in)]: names[id(item.tensor)] for item in scope.inputs if id(item.tensor) in names}


class _Valueless(TorchFunctionMode):
    """Knows the tensors without a value by their storages, and records what is computed of them outside of steps.

    Args:
        runtime: of the device.
        copied: for the arguments of `Tensor.to`, a tensor without a value; None if it is to be called.
    """

    def __init__(self, runtime: Runtime, copied: Callable[..., torch.Tensor | None]) -> None:
        super().__init__()
        self._runtime = runtime
        self._copied = copied
        # With a tensor, so that no other storage gets the same address.
        self._storages: dict[int, torch.Tensor] = {}

    def make(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A new one."""
        made = self._runtime.abstract.placeholder(shape, dtype)
        self._note(made)
        return made

    def knows(self, value: object) -> bool:
        """Whether it is one."""
        return (
            isinstance(value, torch.Tensor)
            and self._runtime.device.owns(value)
            and value.untyped_storage()._cdata in self._storages
        )

    def _note(self, tensor: torch.Tensor) -> None:
        self._storages.setdefault(tensor.untyped_storage()._cdata, tensor.detach())

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not is_of_torch(func):
            func = function_called(func)
        if func is torch.Tensor.to and (made := self._copied(*args, **kwargs)) is not None:
            return made
        if in_step() or not any(map(self.knows, tree_leaves((args, kwargs)))):
            return func(*args, **kwargs)
        if func in READS:
            raise UnsupportedOptionError(
                f"{READS[func]} reads a tensor that has no value in a pre-flight: nothing is computed before its end\n"
                f"  at {current_location()}"
            )
        with self._runtime.placeholders.recording():
            result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        written = args[:1] if name.endswith("_") or name in ("__set__", "__setitem__") else ()
        for item in tree_leaves((result, written)):
            if isinstance(item, torch.Tensor) and self._runtime.device.owns(item):
                self._note(item)
        return result


class _Random(Delegate):
    def set_seed(self, seed: int) -> None:
        """Values do not matter."""


class _Placeholders(Delegate):
    def __init__(self, part: Any, valueless: _Valueless, take: Callable[..., Run]) -> None:
        super().__init__(part)
        self._valueless = valueless
        self._take = take

    def set_random_state(self, state: torch.Tensor) -> None:
        """The stream stays where it is in place of getting a state without a value."""
        if not self._valueless.knows(state):
            self._part.set_random_state(state)

    def compile(
        self, results: Sequence[torch.Tensor], arguments: Sequence[torch.Tensor], donated: Sequence[int], name: str
    ) -> Run:
        with self._part.recording():
            return self._take(results, arguments, donated)
