"""Activation checkpointing on XLA devices: `torch.utils.checkpoint.checkpoint`, both variants of it.

torch decides what is saved and when it is computed again. On an XLA device three things must be added:

- Barriers. The recomputation is the same expression as the forward, so XLA would compute it once and keep the result
  (common subexpression elimination). It reads its inputs from behind an optimization barrier. The gradients of the
  outputs pass through the same barrier, so that no compiler can recompute before the backward needs it. That is how
  `torch_xla.utils.checkpoint` and `jax.checkpoint` (`prevent_cse`) do it; torch_xla has the reentrant variant only.
- The device's random stream. The recomputation draws from where the forward drew, so dropout masks are the same.
- The device's autocast, which torch restores only for devices that have a module `torch.<device>`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint as torchs

from xla_adapters.open_step import in_step
from xla_adapters.runtime import Runtime, get_runtime
from xla_adapters.utils.nested_values import replaced, tensors_in
from xla_adapters.utils.patching import replaced as patched
from xla_adapters.utils.torch_modes import device_type

_TORCHS: Any = torchs.checkpoint.__wrapped__  # type: ignore[attr-defined]


@contextmanager
def checkpointing_on_device() -> Iterator[None]:
    """Has `torch.utils.checkpoint.checkpoint` compute as `checkpoint` inside, by whatever name it is called.

    Modules import that function by name, transformers binds it with `functools.partial`, so another function in its
    place would be missed. torch looks up what it really calls as an attribute of the function that it decorated.
    """
    with patched(_TORCHS, "__dynamo_disable", checkpoint):
        yield


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool | None = None,
    preserve_rng_state: bool = True,
    context_fn: Callable[[], Any] = torchs.noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    **kwargs: Any,
) -> Any:
    """As `torch.utils.checkpoint.checkpoint`, for functions of tensors on an XLA device.

    Functions of other tensors are handed to torch.

    Args:
        function: computed now, and again in the backward. Tensors that a `functools.partial` binds are inputs, too.
        *args: its arguments.
        use_reentrant: the variant. In the reentrant one, nothing inside gets a gradient unless one of `args` needs
            one; hence None means False here.
        preserve_rng_state: whether the recomputation draws the same random numbers.
        context_fn, determinism_check, debug: as for torch; of the non-reentrant variant only.
        early_stop: for tensors that are not on the device. There XLA computes no more than is used in any case, and
            the function runs to its end.
        **kwargs: keyword arguments of the function, for the non-reentrant variant only.

    Returns:
        What the function returns.

    Raises:
        ValueError: an option that the reentrant variant does not have.
    """
    runtime = get_runtime()
    options: dict[str, Any] = {
        "preserve_rng_state": preserve_rng_state,
        "context_fn": context_fn,
        "debug": debug,
        "determinism_check": determinism_check,
        "early_stop": early_stop,
    }
    again = _Recomputed(function, runtime, preserve_rng_state)
    if not any(map(runtime.device.owns, tensors_in((again.bound, args, kwargs)))):
        return _TORCHS(function, *args, use_reentrant=use_reentrant, **options, **kwargs)
    if use_reentrant:
        if kwargs or debug or context_fn is not torchs.noop_context_fn:
            given = sorted(kwargs) or "context_fn or debug"
            raise ValueError(f"{given}: only with use_reentrant=False, as in torch.utils.checkpoint.checkpoint")
        with _no_device_module_needed():
            outputs = torchs.CheckpointFunction.apply(again, preserve_rng_state, *args)
    else:
        outputs = _without_reentrant(again, options, args, kwargs)
    again.wait_for_gradients_of(outputs)
    return outputs


def _without_reentrant(again: _Recomputed, options: dict[str, Any], args: Any, kwargs: dict[str, Any]) -> Any:
    phases = torchs._checkpoint_without_reentrant_generator(
        again,
        options["preserve_rng_state"],
        options["context_fn"],
        options["determinism_check"],
        options["debug"],
        options["early_stop"],
        *args,
        **kwargs,
    )
    try:
        # To stop early is to raise an error in the middle of a module's forward, and in a step torch calls none of its
        # hooks then. It saves nothing here: XLA computes what is used.
        with _no_device_module_needed(), torchs.set_checkpoint_early_stop(False):
            next(phases)
        outputs = again(*args, **kwargs)
        next(phases, None)
    finally:
        # An error in the function leaves its hooks on saved tensors installed until somebody drops the traceback.
        phases.close()
    return outputs


def _no_device_module_needed() -> Any:
    """Has torch save the state of the CPU only: there is no `torch.xla` to ask for that of the device."""
    return patched(torchs, "_infer_device_type", lambda *args: "cpu")


class _Recomputed:
    """A function whose first call is the forward, and whose every other call is a recomputation.

    Args:
        function: the function.
        runtime: of the device.
        preserves_stream: whether a recomputation draws the same random numbers.
    """

    def __init__(self, function: Callable[..., Any], runtime: Runtime, preserves_stream: bool) -> None:
        args: tuple[Any, ...] = ()
        kwargs: dict[str, Any] = {}
        while isinstance(function, partial):
            args, kwargs = (*function.args, *args), {**function.keywords, **kwargs}
            function = function.func
        self.bound = args, kwargs
        self._function = function
        self._runtime = runtime
        self._preserves_stream = preserves_stream
        self._is_first = True
        self._stream: Any = None
        self._autocast: dict[str, Any] = {}
        # Of the outputs. Weak: left without a recomputation, they would be outputs of the step's graph.
        self._gradients: list[weakref.ref[torch.Tensor]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function's result."""
        if not self._is_first:
            return self._recompute(args, kwargs)
        self._is_first = False
        self._autocast = {
            "device_type": device_type(),
            "enabled": torch.is_autocast_enabled(device_type()),
            "dtype": torch.get_autocast_dtype(device_type()),
            "cache_enabled": torch.is_autocast_cache_enabled(),
        }
        stream = self._runtime.random.position()
        outputs = self._call(self.bound, args, kwargs)
        if self._preserves_stream and not self._runtime.random.is_at(stream):
            # Otherwise nothing was drawn, and the stream need not be set, which would be an input of the graph.
            self._stream = stream
        return outputs

    def wait_for_gradients_of(self, outputs: Any) -> None:
        """Has no recomputation begin before the gradients of these outputs are there."""
        for tensor in tensors_in(outputs):
            # A leaf may be a parameter, which would keep the hook.
            if tensor.grad_fn is not None:
                tensor.register_hook(self._gradient_came)

    def _gradient_came(self, gradient: torch.Tensor | None) -> None:
        # Autograd calls hooks without one where nothing comes back.
        if gradient is not None and self._runtime.device.owns(gradient):
            self._gradients.append(weakref.ref(gradient))

    def _recompute(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        (bound, args, kwargs), stream = self._behind_barrier((self.bound, args, kwargs))
        if stream is not None:
            present = self._runtime.random.position()
            self._runtime.random.go_to(stream)
        try:
            with torch.autocast(**self._autocast):
                return self._call(bound, args, kwargs)
        finally:
            if stream is not None:
                self._runtime.random.go_to(present)

    def _call(
        self, bound: tuple[tuple[Any, ...], dict[str, Any]], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return self._function(*bound[0], *args, **{**bound[1], **kwargs})

    def _behind_barrier(self, inputs: Any) -> tuple[Any, Any]:
        """The same inputs and position of the stream as other tensors, which XLA does not know to be the same."""
        copies: dict[int, torch.Tensor] = {}

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            if not self._runtime.device.owns(tensor):
                return tensor
            # Gradients pass through a clone, which the reentrant variant needs.
            if id(tensor) not in copies:
                copies[id(tensor)] = tensor.clone()
            return copies[id(tensor)]

        gradients = [gradient for reference in self._gradients if (gradient := reference()) is not None]
        self._gradients = []
        if self._runtime.tracing.eager() and not (self._runtime.has_placeholders and in_step()):
            # Each operation is an execution of its own: XLA sees no two that are the same.
            return inputs, self._stream
        inputs, stream = replaced(inputs, copied), self._stream
        if isinstance(stream, torch.Tensor):
            # Otherwise masks would be kept. A mode would take it for a tensor that the step uses.
            with torch._C.DisableTorchFunction():
                stream = copies[id(stream)] = stream.clone()
        self._runtime.tracing.optimization_barrier([*copies.values()], after=gradients)
        return inputs, stream
