"""`Job`: a model without weights and plans for it, pickled for the measuring process."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch
from torch.utils import _pytree

from xla_adapters.runtime.transfers import to_host_in_one_transfer
from xla_adapters.sharding.measure.results import MeasuringError
from xla_adapters.sharding.plan import ShardingPlan

# Elements; larger buffers are sent as zeros, since control flow does not depend on them.
_LARGEST_BUFFER = 2**20


@dataclass(frozen=True, kw_only=True)
class Job:
    """The input of the measuring process.

    Attributes:
        model: its parameters are on the meta device.
        batch: keyword or positional arguments of `forward`, zeros on the host.
        plans: to compile steps for.
        around: returns a context for the forward pass, as in the training.
    """

    model: torch.nn.Module
    batch: Any
    plans: Sequence[ShardingPlan]
    around: Callable[[], AbstractContextManager[Any]] = nullcontext

    def empty(self, value: Any) -> Any:
        """A leaf of the batch as it is sent: without its values."""
        return torch.zeros(value.shape, dtype=value.dtype) if isinstance(value, torch.Tensor) else value


def pack(job: Job) -> bytes:
    """Pickles a job (of this class or one derived from it) without the values of parameters; it is not changed.

    Raises:
        MeasuringError: something in the model cannot be pickled.
    """
    buffers = list(job.model.buffers())
    hosts = dict(zip(map(id, buffers), to_host_in_one_transfer(buffers), strict=True))

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, torch.nn.Parameter):
                return _parameter, (tuple(value.shape), value.dtype, value.requires_grad, dict(value.__dict__))
            if isinstance(value, torch.Tensor) and value.device.type != "meta":
                host = hosts.get(id(value))
                if value.numel() > _LARGEST_BUFFER or (host is None and value.device.type != "cpu"):
                    return _zeros, (tuple(value.shape), value.dtype)
                if host is not None and value.device.type != "cpu":
                    return _same, (host.detach(),)
            return super().reducer_override(value)

    stream = io.BytesIO()
    emptied = dataclasses.replace(job, batch=_pytree.tree_map(job.empty, job.batch))
    try:
        Pickler(stream).dump(emptied)
    except (TypeError, AttributeError, RuntimeError, ValueError, NotImplementedError, OSError) as error:
        # Pickling a user's model may raise any of these.
        raise MeasuringError(f"the model cannot be pickled for another process: {error}") from error
    return stream.getvalue()


def unpack(data: bytes) -> Job:
    """Reads what `pack` returned."""
    job = cloudpickle.loads(data)
    assert isinstance(job, Job)
    return job


def _parameter(
    shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool, more: dict[str, Any]
) -> torch.nn.Parameter:
    value = torch.nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=requires_grad)
    value.__dict__.update(more)
    return value


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
