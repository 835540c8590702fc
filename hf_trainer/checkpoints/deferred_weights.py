"""`save_pretrained` of a sharded model that copies one weight at a time to the host."""

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

from xla_adapters import get_runtime
from xla_adapters.sharding.state import write_safetensors
from xla_adapters.utils.patching import replaced

# How many weights on the host are cached. Entries made from the same weight (the experts of a layer, which have an
# entry each in the file) are written one after the other.
_KEPT = 2


class DeferredWeight(torch.Tensor):
    """A weight that has only shape and dtype; its values are copied to the host when they are written.

    Operations of transformers on weights before it saves them (splitting, transposing) are applied to the values then.
    """

    _values: Callable[[], torch.Tensor]

    @staticmethod
    def __new__(cls, like: torch.Tensor, values: Callable[[], torch.Tensor]) -> DeferredWeight:
        """A tensor with the shape and dtype of `like`, and the values that `values` returns."""
        made: DeferredWeight = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=torch.device("meta")
        )
        made._values = values
        return made

    def __init__(self, like: torch.Tensor, values: Callable[[], torch.Tensor]) -> None: ...

    def on_host(self) -> torch.Tensor:
        """The values, on the host."""
        return self._values()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Applies the operation to shapes now, and to values in `on_host`."""
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
    """The weights of a model as `DeferredWeight`s, to pass to `save_pretrained`. Tied weights have one entry, under the
    name that transformers keeps."""
    weights = model.state_dict()
    shapes: dict[str, torch.Tensor] = {name: _shape_of(value) for name, value in weights.items()}
    kept = transformers.modeling_utils.remove_tied_weights_from_state_dict(shapes, model)

    @functools.lru_cache(maxsize=_KEPT)
    def values(name: str) -> torch.Tensor:
        return get_runtime().transfers.to_host([weights[name]])[0]

    return {name: DeferredWeight(weights[name], functools.partial(values, name)) for name in kept}


@contextmanager
def writing_deferred_weights() -> Iterator[None]:
    """Inside the context transformers can save the result of `deferred_state_dict`."""

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
