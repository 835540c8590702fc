"""Updates of SGD, Adam and AdamW, and clipping by norm, of lists of tensors: some 15 calls instead of 12 per parameter.

torch updates parameter by parameter on XLA devices, and each operator in place costs the host a second computation, of
shapes alone, in Python. Here the rules compute new values of whole lists with torch's `foreach` functions, on the
device tensors behind the parameters; then each tensor gets its new value. The values are the same to the last bit in
float32 and float64. In lower precisions XLA may keep other intermediate values in float32.

The numbers of an update (learning rate, decay, bias corrections) are inputs of the graph that nothing else shares, and
are uploaded together.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import SGD, Adam, AdamW

from xla_adapters.runtime import Runtime
from xla_adapters.utils.patching import replaced

_List = list[torch.Tensor]
# What `foreach` functions take and return.
_Tensors = list[torch.Tensor] | tuple[torch.Tensor, ...]
# `torch.optim` has no attributes of these names.
_ADAM, _SGD = (sys.modules[kind.__module__] for kind in (Adam, SGD))
# The optimizers whose numbers share no input with others.
LISTED = (SGD, Adam, AdamW)
_PLAIN = (torch.Tensor, torch.nn.Parameter)
# By name: `torch._foreach_add` would read a tensor of no dimensions, to take it for a number.
_plus: Any = torch.ops.aten._foreach_add.Tensor
_times: Any = torch.ops.aten._foreach_mul.Tensor
_over: Any = torch.ops.aten._foreach_div.Tensor


@dataclass(eq=False)
class ListUpdates:
    """What was updated in lists.

    Attributes:
        parameters: their `id`s.
        numbers: that the updates read, on the device.
    """

    parameters: set[int] = field(default_factory=set)
    numbers: list[torch.Tensor] = field(default_factory=list)


@contextmanager
def updates_of_lists(
    runtime: Runtime, record: Callable[[torch.Tensor], None], on_torchs_update: Callable[[], None]
) -> Iterator[ListUpdates]:
    """Inside the context, optimizers and clipping compute on lists of tensors.

    Calls with tensors of other kinds, or with numbers that are tensors, are torch's own.

    Args:
        runtime: the runtime, with lazy tensors.
        record: called with each gradient before it is clipped.
        on_torchs_update: called before torch's own function computes an update.

    Yields:
        What was updated so.
    """
    rules = _Lists(runtime, record)
    with ExitStack() as patches:
        for owner, name, on_torchs in (
            (_ADAM, "_single_tensor_adam", on_torchs_update),
            (_SGD, "_single_tensor_sgd", on_torchs_update),
            (torch.nn.utils, "clip_grad_norm_", None),
        ):
            rule = getattr(rules, name.removeprefix("_"))
            function = _or_else(rule, getattr(owner, name), on_torchs, runtime.device.owns)
            patches.enter_context(replaced(owner, name, function))
        yield rules.done


class _Unknown(Exception):
    """The lists are none that the rules know."""


def _or_else(
    rule: Callable[..., Any],
    torchs: Callable[..., Any],
    on_torchs: Callable[[], None] | None,
    owns: Callable[[torch.Tensor], bool],
) -> Callable[..., Any]:
    """The rule for tensors of the device in this thread; torch's own function where the rule does not apply."""
    thread = threading.get_ident()

    def computed(*args: Any, **kwargs: Any) -> Any:
        if not args or threading.get_ident() != thread:
            return torchs(*args, **kwargs)
        first, *others = args
        # An iterator can be read once.
        first = [first] if isinstance(first, torch.Tensor) else list(first)
        if not first or not owns(first[0]):
            return torchs(first, *others, **kwargs)
        with torch.no_grad(), torch._C.DisableTorchFunction():
            try:
                return rule(first, *others, **kwargs)
            except _Unknown:
                if on_torchs is not None:
                    on_torchs()
        return torchs(first, *others, **kwargs)

    return computed


class _Lists:
    """The rules.

    Args:
        runtime: the runtime.
        record: called with each gradient before it is clipped.
    """

    def __init__(self, runtime: Runtime, record: Callable[[torch.Tensor], None]) -> None:
        self._runtime = runtime
        self._record = record
        self.done = ListUpdates()

    # ---- optimizers ------------------------------------------------------------------------------

    def single_tensor_adam(
        self,
        params: _List,
        grads: _List,
        exp_avgs: _List,
        exp_avg_sqs: _List,
        max_exp_avg_sqs: _List,
        state_steps: _List,
        **options: Any,
    ) -> None:
        """As `torch.optim.adam._single_tensor_adam`."""
        beta1, beta2, lr = options["beta1"], options["beta2"], options["lr"]
        weight_decay, eps = options["weight_decay"], options["eps"]
        maxima = max_exp_avg_sqs if options["amsgrad"] else []
        _check(options, (beta1, beta2, lr, weight_decay, eps))
        state = [exp_avgs, exp_avg_sqs, *([maxima] if maxima else [])]
        groups = self._groups([params, grads, *state], state_steps, stored=[params, *state])
        torch._foreach_add_(state_steps, 1)
        for (dtype, steps), (weights, slopes, means, squares, *most) in groups.items():
            step = steps + 1
            decay = 1 - lr * weight_decay if options["decoupled_weight_decay"] else weight_decay
            correction, correction_of_squares = 1 - beta1**step, 1 - beta2**step
            numbers = (1 - beta1, beta2, 1 - beta2, correction_of_squares**0.5, eps, -(lr / correction), decay)
            mean_of, square_by, square_of, root_of, eps_, size, decay_ = self._uploaded(numbers, dtype)
            values: _Tensors = self._values(weights)
            slope: _Tensors = self._values(slopes)
            if options["maximize"]:
                slope = torch._foreach_neg(slope)
            decayed: _Tensors = values
            if weight_decay and options["decoupled_weight_decay"]:
                decayed = _times(values, decay_)
            elif weight_decay:
                slope = _sum(slope, _times(values, decay_))
            mean, square = self._values(means), self._values(squares)
            new_mean = _sum(mean, _times(torch._foreach_sub(slope, mean), mean_of))
            of_slope = _times(torch._foreach_mul(slope, slope), square_of)
            new_square = _sum(_times(square, square_by), of_slope)
            largest: _Tensors = new_square
            if most:
                before = self._values(most[0])
                largest = torch._foreach_maximum(before, new_square)
                self._store(most[0], before, largest)
            root = _plus(_over(torch._foreach_sqrt(largest), root_of), eps_)
            change = _times(torch._foreach_div(new_mean, root), size)
            self._store(weights, values, _sum(decayed, change))
            self.done.parameters.update(map(id, weights))
            self._store(means, mean, new_mean)
            self._store(squares, square, new_square)

    def single_tensor_sgd(
        self, params: _List, grads: _List, momentum_buffer_list: list[torch.Tensor | None], **options: Any
    ) -> None:
        """As `torch.optim.sgd._single_tensor_sgd`."""
        lr, weight_decay = options["lr"], options["weight_decay"]
        momentum, dampening = options["momentum"], options["dampening"]
        _check(options, (lr, weight_decay, momentum, dampening))
        buffers: Any = momentum_buffer_list if momentum else []
        if any(buffer is None for buffer in buffers):
            raise _Unknown
        state = [buffers] if momentum else []
        groups = self._groups([params, grads, *state], stored=[params, *state])
        for (dtype, _), (weights, slopes, *rest) in groups.items():
            size, decay, kept, taken = self._uploaded((-lr, weight_decay, momentum, 1 - dampening), dtype)
            values: _Tensors = self._values(weights)
            slope: _Tensors = self._values(slopes)
            if options["maximize"]:
                slope = torch._foreach_neg(slope)
            if weight_decay:
                slope = _sum(slope, _times(values, decay))
            for buffer in rest:
                before = self._values(buffer)
                added = _times(slope, taken) if dampening else slope
                now = _sum(_times(before, kept), added)
                slope = _sum(slope, _times(now, kept)) if options["nesterov"] else now
                self._store(buffer, before, now)
            self._store(weights, values, _sum(values, _times(slope, size)))
            self.done.parameters.update(map(id, weights))

    # ---- clipping --------------------------------------------------------------------------------

    def clip_grad_norm_(
        self,
        parameters: _List,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        """As `torch.nn.utils.clip_grad_norm_`."""
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if error_if_nonfinite or foreach or not grads or isinstance(max_norm, torch.Tensor):
            raise _Unknown
        groups = self._groups([grads], stored=[grads])
        if len(groups) > 1:
            raise _Unknown
        for grad in grads:
            self._record(grad)
        values = self._values(grads)
        norms = torch._foreach_norm(values, float(norm_type))
        total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), float(norm_type))
        factor = torch.clamp(float(max_norm) / (total + 1e-6), max=1.0)
        self._store(grads, values, _times(values, factor))
        return total

    # ---- lists -----------------------------------------------------------------------------------

    def _groups(
        self, lists: Sequence[_List], steps: Sequence[torch.Tensor] = (), *, stored: Sequence[_List]
    ) -> dict[tuple[torch.dtype, float], list[_List]]:
        """The lists, split such that all tensors have one dtype and were updated equally often.

        Args:
            lists: of equal length.
            steps: the step count of each parameter, on the host.
            stored: those lists whose tensors get new values.

        Raises:
            _Unknown: a tensor is not on the device, has no real numbers, is no plain tensor, or has another dtype or
                shape than the others of its parameter; or two tensors that get new values share their memory.
        """
        found: dict[tuple[torch.dtype, float], list[_List]] = {}
        counts = [0.0] * len(lists[0])
        if steps:
            if any(step.device.type != "cpu" for step in steps) or len(set(map(id, steps))) < len(steps):
                raise _Unknown
            counts = [step.item() for step in steps]
        owns, is_functional = self._runtime.device.owns, torch._is_functional_tensor
        for count, first, *others in zip(counts, *lists, strict=True):
            dtype, shape = first.dtype, first.shape
            for tensor in (first, *others):
                if (
                    type(tensor) not in _PLAIN
                    or tensor.dtype != dtype
                    or tensor.shape != shape
                    or not owns(tensor)
                    or not is_functional(tensor)
                ):
                    raise _Unknown
            if not dtype.is_floating_point:
                raise _Unknown
            group = found.get((dtype, count))
            if group is None:
                group = found[dtype, count] = [[] for _ in lists]
            for members, tensor in zip(group, (first, *others), strict=True):
                members.append(tensor)
        storages, _ = self._runtime.lazy.storage_marks([tensor for tensors in stored for tensor in tensors])
        if len(set(storages)) < len(storages):
            raise _Unknown
        return found

    def _uploaded(self, numbers: Sequence[float], dtype: torch.dtype) -> _List:
        uploads = self._runtime.transfers.upload_numbers([(number, dtype) for number in numbers])
        self.done.numbers += uploads
        return uploads

    def _values(self, tensors: _List) -> _List:
        return list(map(self._runtime.values.snapshot, tensors))

    def _store(self, tensors: _List, before: _Tensors, after: _Tensors) -> None:
        """Gives tensors new values, as operators in place do."""
        self._runtime.lazy.update(tensors, before, after)
        # A backward that needs the old values is to raise.
        torch.autograd.graph.increment_version(tensors)


def _sum(one: _Tensors, other: _Tensors) -> tuple[torch.Tensor, ...]:
    found: tuple[torch.Tensor, ...] = torch._foreach_add(one, other)
    return found


def _check(options: dict[str, Any], numbers: Sequence[Any]) -> None:
    """Raises `_Unknown` on options that the rules do not have."""
    unknown = ("capturable", "differentiable", "has_complex", "has_sparse_grad")
    if any(options.get(name) for name in unknown) or any(
        options.get(name) is not None for name in ("grad_scale", "found_inf")
    ):
        raise _Unknown
    if any(isinstance(number, torch.Tensor) for number in numbers):
        raise _Unknown
