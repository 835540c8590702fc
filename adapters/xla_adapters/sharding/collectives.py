"""Exchanges between ranks that are part of a step's program.

torch's functional collectives; each rank must make the same ones in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

_exchanges = 0


def exchanges() -> bool:
    """Whether one of these exchanges is under way; what it computes with shards is right."""
    return _exchanges > 0


@contextmanager
def exchanging() -> Iterator[None]:
    """In the body an exchange is under way."""
    global _exchanges
    _exchanges += 1
    try:
        yield
    finally:
        _exchanges -= 1


# Elements. Smaller tensors travel together; larger ones by themselves, since joining them copies them.
_TOGETHER_BELOW = 1 << 18


def mean_over_ranks(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The means over all ranks of tensors on the device, summed in float32 if they have half its bits.

    Args:
        tensors: of the same shapes and dtypes on each rank, in the same order.
    """
    return _small_ones_together(_mean, tensors)


def of_first_rank(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The values that tensors on the device have on the first rank.

    Gathered, since a broadcast of torch_tpu is another program on the rank that sends.
    """
    return _small_ones_together(lambda tensor: gathered_in_step(tensor, False)[0], tensors)


def _small_ones_together(
    compute: Callable[[torch.Tensor], torch.Tensor], tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    results: list[torch.Tensor | None] = [None] * len(tensors)
    small: dict[torch.dtype, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if tensor.numel() < _TOGETHER_BELOW:
            small.setdefault(tensor.dtype, []).append(index)
        else:
            results[index] = compute(tensor)
    for indices in small.values():
        joined = compute(torch.cat([tensors[index].reshape(-1) for index in indices]))
        parts = joined.split([tensors[index].numel() for index in indices])
        for index, part in zip(indices, parts, strict=True):
            results[index] = part.view(tensors[index].shape)
    return [result for result in results if result is not None]


def reduced_in_step(tensor: torch.Tensor, operation: str) -> torch.Tensor:
    """A tensor on the device, reduced over all ranks.

    Args:
        tensor: of the same shape on each rank.
        operation: `mean` or `avg`, `sum`, `max`, `min` or `product`.
    """
    if operation in ("mean", "avg"):
        return _mean(tensor if tensor.is_floating_point() else tensor.float())
    reduced: torch.Tensor = functional.all_reduce(tensor, operation, _world()) + 0
    return reduced


def gathered_in_step(tensor: torch.Tensor, with_gradients: bool) -> torch.Tensor:
    """The tensors of all ranks, stacked.

    Args:
        tensor: on the device, of the same shape on each rank.
        with_gradients: whether the gradients that the other ranks compute for it are added to its own.
    """
    gather = functional.all_gather_tensor_autograd if with_gradients else functional.all_gather_tensor
    with torch.set_grad_enabled(with_gradients and torch.is_grad_enabled()):
        gathered: torch.Tensor = gather(tensor.unsqueeze(0).contiguous(), 0, _world()) + 0
    # Of booleans the sum is an integer.
    return gathered.to(tensor.dtype)


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _mean(tensor: torch.Tensor) -> torch.Tensor:
    precise = tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
    total: torch.Tensor = functional.all_reduce(precise, "sum", _world())
    return (total / dist.get_world_size()).to(tensor.dtype)


def sum_of_shards(tensor: torch.Tensor) -> torch.Tensor:
    """The sum over all ranks of what each has computed with its shards; the same value on each rank.

    Its backward is the mean over ranks of its gradient: they may use it with losses of their own rows.
    """
    total: torch.Tensor = _SumOfShards.apply(tensor)  # type: ignore[no-untyped-call]
    return total


def for_shards(tensor: torch.Tensor) -> torch.Tensor:
    """A value that is the same on all ranks, to compute with shards; its backward adds what all ranks give."""
    same: torch.Tensor = _ForShards.apply(tensor)  # type: ignore[no-untyped-call]
    return same


def whole_of(shard: torch.Tensor, dim: int) -> torch.Tensor:
    """The shards of all ranks, joined along a dimension; its backward is `shard_of_mean`.

    Args:
        shard: on the device, of the same shape on each rank.
        dim: along which they are joined.
    """
    whole: torch.Tensor = _Whole.apply(shard, dim)  # type: ignore[no-untyped-call]
    return whole


def shard_of_mean(whole: torch.Tensor, dim: int) -> torch.Tensor:
    """This rank's shard of the mean over all ranks, summed in float32 if the tensor has half its bits.

    Args:
        whole: on the device, of the same shape on each rank.
        dim: which the ranks split.
    """
    shard: torch.Tensor = _ShardOfMean.apply(whole, dim)  # type: ignore[no-untyped-call]
    return shard


# Gradients of shards, and of values that are the same on all ranks, are those of the mean of the ranks' losses. Those
# of what is a rank's own are of its own loss, N times as large.


class _Whole(torch.autograd.Function):
    @staticmethod
    @exchanging()
    def forward(shard: torch.Tensor, dim: int) -> torch.Tensor:
        whole: torch.Tensor = functional.all_gather_tensor(shard.contiguous(), dim, _world()) + 0
        return whole

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, int], output: torch.Tensor) -> None:
        ctx.dim = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return shard_of_mean(gradient, ctx.dim), None


class _ShardOfMean(torch.autograd.Function):
    @staticmethod
    @exchanging()
    def forward(whole: torch.Tensor, dim: int) -> torch.Tensor:
        precise = whole.float() if whole.dtype in (torch.bfloat16, torch.float16) else whole
        total: torch.Tensor = functional.reduce_scatter_tensor(precise.contiguous(), "sum", dim, _world())
        return (total / dist.get_world_size()).to(whole.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, int], output: torch.Tensor) -> None:
        ctx.dim = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return whole_of(gradient, ctx.dim), None


class _SumOfShards(torch.autograd.Function):
    @staticmethod
    @exchanging()
    def forward(tensor: torch.Tensor) -> torch.Tensor:
        return reduced_in_step(tensor, "sum")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None: ...

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return sum_of_shards(gradient) / dist.get_world_size()


class _ForShards(torch.autograd.Function):
    @staticmethod
    @exchanging()
    def forward(tensor: torch.Tensor) -> torch.Tensor:
        return tensor + 0

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None: ...

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return sum_of_shards(gradient)
