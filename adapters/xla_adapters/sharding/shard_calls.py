"""`ShardCalls`: what a step computes with shards of parameters and gradients is what it would compute with the whole.

Each element of a shard can be computed with by itself, as most optimizers do. A sum, a norm or a mean over a shard
becomes that over all ranks, so that clipping, regularizers and optimizers with norms (LAMB) are right. Any other
operation would silently give another result on each rank: it is an error.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from xla_adapters.errors import UnsupportedOptionError, XLAAdapterError
from xla_adapters.sharding.collectives import exchanges, exchanging, for_shards, reduced_in_step, sum_of_shards
from xla_adapters.tracing.step_mode import writes_in_place
from xla_adapters.utils.location import current_location
from xla_adapters.utils.torch_modes import in_transform, unwrapped

_Call = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
# Operations whose result is a shard of what they would give for the whole, beside those that torch marks as pointwise.
_KEEP = frozenset(
    {
        *("grad.__get__", "grad.__set__", "grad.__delete__", "data.__get__", "data.__set__", "detach", "clone"),
        *("contiguous", "to", "type", "float", "half", "bfloat16", "double", "requires_grad", "copy", "fill", "zero"),
        *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "alias", "type_as"),
        *("retain_grad", "lerp", "clip", "where", "normal", "uniform"),
        *("true_divide", "nan_to_num", "grad"),
    }
)
# Operators that Python calls by other names.
_OPERATORS = {
    **{"truediv": "div", "floordiv": "floor_divide", "mod": "remainder", "invert": "bitwise_not"},
    **{"and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor"},
}
_SUMS = frozenset({"sum", "mean", "nansum", "count_nonzero"})
_EXTREMES = frozenset({"max", "min", "amax", "amin", "any", "all"})
_NORMS = frozenset({"norm", "linalg_vector_norm", "linalg_norm"})

# What torch says of tensors that do not fit each other.
_OTHER_SHAPE = re.compile(r"must match|broadcast|shape|size|inconsistent tensor")
# The attribute of a parameter that says how it is split.
SHARD = "_xla_adapters_shard"


def is_split(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a parameter of which this rank has a shard."""
    return hasattr(tensor, SHARD)


class ShardCalls:
    """Looks at the calls of a step whose arguments are shards.

    Attributes:
        computed: what was computed from shards, and is a shard itself.
        same: what was computed from all of a shard by all ranks, and so is the same on each.
        wholes: parameters that were gathered for a call of the model, and what shares their memory.
        on_write: called before a shard of a parameter is written, after which what was gathered is stale.
    """

    def __init__(self) -> None:
        self.computed, self.same = WeakIdKeyDictionary(), WeakIdKeyDictionary()
        self.wholes = WeakIdKeyDictionary()
        self.on_write: Callable[[], None] = lambda: None

    def __call__(self, call: _Call, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Makes a call of a function of torch.

        Args:
            call: makes it, or another one in its place; those are part of the step.
            func, args, kwargs: which one.

        Raises:
            UnsupportedOptionError: it needs more than a shard.
        """
        if exchanges():
            return call(func, args, kwargs)
        given = _given((args, kwargs))
        if any(map(self._is_shard, given)):
            return self._with_shards(call, func, args, kwargs)
        if in_transform() and any(self._is_shard(unwrapped(value)) for value in given):
            raise _needs_all(f"{_name(func)} of a shard in a transform of torch.func")
        result = call(func, args, kwargs)
        if any(value in self.wholes for value in given):
            self._follow_whole(func, given, kwargs, result)
        elif any(map(self._is_same, given)) and all(
            self._is_same(each) or (each.ndim == 0 and not each.requires_grad) for each in given
        ):
            self._note_same(result)
        return result

    def _note_same(self, result: Any) -> None:
        for tensor in _tensors(result):
            self.same[tensor] = None

    def _is_same(self, tensor: torch.Tensor) -> bool:
        # Parameters that cannot be split are equal on all ranks.
        return tensor in self.same or (isinstance(tensor, torch.nn.Parameter) and not is_split(tensor))

    def _with_shards(self, call: _Call, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = _name(func)
        if name in ("numel", "nelement"):
            return call(func, args, kwargs) * dist.get_world_size()
        if writes_in_place(func) and args and isinstance(args[0], torch.Tensor) and is_split(args[0]):
            self.on_write()
        if self._keeps(name, args, kwargs):
            # `torch.autograd.grad` is given the loss.
            if torch.is_grad_enabled() and name != "grad":
                args, kwargs = tree_map_only(torch.Tensor, lambda value: self._entering(call, value), (args, kwargs))
            result = _shaped(call, func, args, kwargs)
            lists = [value for value in args if isinstance(value, (list, tuple))]
            for index, tensor in enumerate(result if isinstance(result, (list, tuple)) else (result,)):
                if not isinstance(tensor, torch.Tensor):
                    continue
                # Of lists of tensors some may be whole.
                given = [values[index] for values in lists if index < len(values)] if lists else (args, kwargs)
                if any(map(self._is_shard, _given(given))) and not isinstance(tensor, torch.nn.Parameter):
                    self.computed[tensor] = None
            return result
        reduce = self._reduction(name, args, kwargs)
        if reduce is not None:
            with exchanging():
                result = call(reduce, (func, *args), kwargs)
            self._note_same(result)
            return result
        result = _shaped(call, func, args, kwargs)
        if name == "setitem" or any(True for _ in _tensors(result)):
            raise _needs_all(f"{name} of a shard")
        return result

    def _entering(self, call: _Call, value: torch.Tensor) -> torch.Tensor:
        """A value that is computed with a shard: its gradient is what all shards give together."""
        if not value.requires_grad or self._is_shard(value):
            return value
        if not self._is_same(value):
            raise _needs_all(
                "a shard and a value with gradients of this rank's own (of its batch, or of a whole parameter)"
            )
        found: torch.Tensor = call(for_shards, (value,), {})
        return found

    def _follow_whole(
        self, func: Callable[..., Any], given: Sequence[torch.Tensor], kwargs: dict[str, Any], result: Any
    ) -> None:
        """A change of a gathered parameter would be lost when the call of the model ends."""
        written = [kwargs.get("out")] if kwargs.get("out") is not None else given[: writes_in_place(func)]
        if any(value in self.wholes for value in _given(written)) and _name(func) != "requires_grad":
            raise UnsupportedOptionError(
                "a parameter is changed in the model's forward: under sharding='fsdp' that is a gathered copy, and the "
                "change would be lost. Change it between steps, by model.parameters(), or use sharding='dp'\n  at "
                f"{current_location()}"
            )
        storages = {value.untyped_storage()._cdata for value in given if value in self.wholes}
        for tensor in _tensors(result):
            if tensor.untyped_storage()._cdata in storages:
                self.wholes[tensor] = None

    def _is_shard(self, tensor: torch.Tensor) -> bool:
        return is_split(tensor) or tensor in self.computed

    # ---- kinds of calls --------------------------------------------------------------------------

    def _keeps(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if name in ("max", "min"):
            return len(args) == 2 and isinstance(args[1], torch.Tensor)
        return name in _KEEP or (name.removeprefix("_foreach_") not in _EXTREMES and _is_pointwise(name))

    def _reduction(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
        """What reduces over all ranks in place of a function; None if it is no reduction to one number."""

        def norm(func: Callable[..., Any], tensor: torch.Tensor, *rest: Any, **options: Any) -> Any:
            def of_one(tensors: Sequence[torch.Tensor], *more: Any, **named: Any) -> list[torch.Tensor]:
                return [func(tensors[0], *more, **named)]

            return self._norms(of_one, [tensor], *rest, **options)[0]

        def total(func: Callable[..., Any], *given: Any, **options: Any) -> Any:
            found = sum_of_shards(func(*given, **options))
            return found / dist.get_world_size() if name == "mean" else found

        def extreme(func: Callable[..., Any], *given: Any, **options: Any) -> Any:
            return _extreme(name, func(*given, **options))

        if not args:
            return None
        if name == "_foreach_norm":
            return self._norms
        if any(kwargs.get(key) not in (None, (), []) for key in ("dim", "axis")) or kwargs.get("keepdim"):
            return None
        if name in _NORMS and (len(args) < 3 or args[2] is None):
            order = args[1] if len(args) > 1 else kwargs.get("p", kwargs.get("ord"))
            is_of_matrix = isinstance(order, str) or (name == "linalg_norm" and order is not None and args[0].ndim == 2)
            return None if is_of_matrix and order != "fro" else norm
        if name in _SUMS and len(args) == 1:
            return total
        return extreme if name in _EXTREMES and len(args) == 1 else None

    def _norms(
        self, func: Callable[..., Any], tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any
    ) -> list[torch.Tensor]:
        """Norms of tensors, of which some are shards; exchanged together."""
        order = next((value for value in (*args[:1], kwargs.get("ord"), kwargs.get("p")) if value is not None), 2.0)
        power = 2.0 if order == "fro" else float(order)
        norms = list(func(tensors, *args, **kwargs))
        at = [index for index, tensor in enumerate(tensors) if self._is_shard(tensor)]
        joined = torch.stack([norms[index] for index in at])
        dtype = joined.dtype
        # The square of a norm of half precision may be too large, or zero.
        joined = joined.float() if dtype in (torch.bfloat16, torch.float16) else joined
        if math.isinf(power):
            totals = reduced_in_step(_without_gradient(joined), "max" if power > 0 else "min")
        elif power == 0:
            totals = sum_of_shards(joined)
        else:
            total = sum_of_shards(joined.pow(power))
            # As in torch, the gradient of a norm that is zero is zero.
            is_zero = total == 0
            totals = torch.where(is_zero, 0.0, torch.where(is_zero, 1.0, total).pow(1 / power))
        for index, total in zip(at, totals.to(dtype).unbind(), strict=True):
            norms[index] = total
        return norms


def _needs_all(what: str) -> UnsupportedOptionError:
    return UnsupportedOptionError(
        f"{what}: under sharding='fsdp' each rank has a part of each parameter, of its gradient and of the "
        "optimizer's state, and this needs all of it. Use an optimizer that updates each element by itself (AdamW, "
        "SGD, Lion and most others), compute with the parameters inside the model's forward, where they are whole, or "
        f"use sharding='dp'\n  at {current_location()}"
    )


def _shaped(call: _Call, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Makes a call with shards. What has the shape of the whole does not fit."""
    try:
        return call(func, args, kwargs)
    except RuntimeError as error:
        if isinstance(error, XLAAdapterError) or not _OTHER_SHAPE.search(str(error)):
            raise
        raise _needs_all(f"{_name(func)} of a shard and of a tensor of another shape ({error})") from error


def _extreme(name: str, local: torch.Tensor) -> torch.Tensor:
    if name not in ("any", "all"):
        return reduced_in_step(_without_gradient(local), "max" if name.endswith("max") else "min")
    found = reduced_in_step((local != 0).float(), "max" if name == "any" else "min")
    return (found > 0).to(local.dtype)


def _without_gradient(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.requires_grad and torch.is_grad_enabled():
        raise UnsupportedOptionError(
            "the gradient of a maximum over a parameter of which each rank has a shard: use sharding='dp'\n  at "
            f"{current_location()}"
        )
    return tensor


def _given(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _tensors(result: Any) -> Iterator[torch.Tensor]:
    values: Iterable[Any] = result if isinstance(result, (list, tuple)) else (result,)
    return (value for value in values if isinstance(value, torch.Tensor))


def _name(func: Callable[..., Any]) -> str:
    """How torch's operators are named: of `Tensor.__iadd__` and `Tensor.add_` it is `add`."""
    name: str = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return f"{getattr(getattr(func, '__self__', None), '__name__', '')}.{name}"
    if name.startswith("__") and name.endswith("__"):
        name = name.strip("_")
        if name not in _OPERATORS and not hasattr(torch.ops.aten, name) and name[:1] in "ri":
            name = name[1:]
        return _OPERATORS.get(name, name)
    return name if name.startswith("_foreach_") else name.removesuffix("_")


@functools.cache
def _is_pointwise(name: str) -> bool:
    name = name.removeprefix("_foreach_").removesuffix("_")
    packet = getattr(torch.ops.aten, name, None) if name else None
    overloads = [] if packet is None else [getattr(packet, overload) for overload in packet.overloads()]
    return name in _KEEP or any(torch.Tag.pointwise in overload.tags for overload in overloads)
