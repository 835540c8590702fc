"""`save_pretrained` of a model on the devices, with one weight at a time on the host."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import transformers.modeling_utils
from torch.utils import _pytree
from transformers import PreTrainedModel

from xla_adapters import get_backend
from xla_adapters.patching import replaced
from xla_adapters.sharding.state import write_safetensors

# What is made of one weight (the experts of a layer, which are files' entries of their own) is written in a row.
_KEPT = 2


class DeferredWeight(torch.Tensor):
    """A weight with shape and dtype only; its values are brought to the host when they are written.

    What transformers does to weights before it saves them (splitting, transposing) is done to the values then.
    """

    _values: Callable[[], torch.Tensor]

    @staticmethod
    def __new__(cls, like: torch.Tensor, values: Callable[[], torch.Tensor]) -> DeferredWeight:
        """Of the shape of `like`, with what `values` returns."""
        made: DeferredWeight = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=torch.device("meta")
        )
        made._values = values
        return made

    def __init__(self, like: torch.Tensor, values: Callable[[], torch.Tensor]) -> None: ...

    def on_host(self) -> torch.Tensor:
        """The values."""
        return self._values()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """The operation on shapes now, on values when they are asked for."""
        given = (args, dict(kwargs or {}))

        def values(index: int) -> torch.Tensor:
            on_host_args, on_host_kwargs = _pytree.tree_map_only(DeferredWeight, DeferredWeight.on_host, given)
            leaf: torch.Tensor = _pytree.tree_leaves(func(*on_host_args, **on_host_kwargs))[index]
            return leaf

        shape_args, shape_kwargs = _pytree.tree_map_only(DeferredWeight, _shape_of, given)
        leaves, structure = _pytree.tree_flatten(func(*shape_args, **shape_kwargs))
        made = [
            cls(leaf, functools.partial(values, index)) if isinstance(leaf, torch.Tensor) else leaf
            for index, leaf in enumerate(leaves)
        ]
        return _pytree.tree_unflatten(made, structure)


def deferred_state_dict(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The weights of a model to give to `save_pretrained`: of tied ones the name that transformers keeps."""
    weights = model.state_dict()
    shapes: dict[str, torch.Tensor] = {name: _shape_of(value) for name, value in weights.items()}
    kept = transformers.modeling_utils.remove_tied_weights_from_state_dict(shapes, model)

    @functools.lru_cache(maxsize=_KEPT)
    def values(name: str) -> torch.Tensor:
        return get_backend().to_host([weights[name]])[0]

    return {name: DeferredWeight(weights[name], functools.partial(values, name)) for name in kept}


@contextmanager
def writing_deferred_weights() -> Iterator[None]:
    """Lets transformers save what `deferred_state_dict` returns, until the exit."""

    def save_file(
        tensors: dict[str, torch.Tensor], filename: str | os.PathLike[str], metadata: dict[str, str] | None = None
    ) -> None:
        shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
        values = (
            (name, tensor.on_host() if isinstance(tensor, DeferredWeight) else tensor)
            for name, tensor in tensors.items()
        )
        write_safetensors(os.fspath(filename), shapes, values, metadata=metadata)

    with replaced(transformers.modeling_utils, "safe_save_file", save_file):
        yield


def _shape_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
