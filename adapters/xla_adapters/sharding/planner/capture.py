"""`capture`: exports forward and loss of a model as a graph, on the meta device."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree

from xla_adapters.errors import MODEL_FAILURES
from xla_adapters.sharding.mesh import Spec
from xla_adapters.sharding.planner.layers import Skeleton, skeleton

_ROOT = "model"
_CACHE = "TORCHINDUCTOR_CACHE_DIR"


class CaptureError(Exception):
    """The model cannot be captured as a graph; the planner then plans by parameters alone."""


@dataclass(frozen=True, kw_only=True)
class Capture:
    """A captured forward.

    Attributes:
        nodes: in execution order.
        parameters: for placeholders of parameters, the name in the user's model.
        batch: the batch dimension of each value that has one.
        modules: for each node, the modules (of the skeleton) that it runs in, outermost first.
        skeleton: the model that was captured.
        batch_size: number of rows of the batch.
    """

    nodes: tuple[fx.Node, ...]
    parameters: Mapping[fx.Node, str]
    batch: Mapping[fx.Node, int]
    modules: Mapping[fx.Node, tuple[str, ...]]
    skeleton: Skeleton
    batch_size: int


class _Loss(nn.Module):
    """Wraps a model so that it returns its loss, or else its outputs as a tuple of tensors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.model(*args, **kwargs)
        loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
        if isinstance(loss, torch.Tensor):
            return loss
        leaves = _pytree.tree_leaves(dict(output) if isinstance(output, dict) else output)
        return tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))


def batch_size(batch: Any) -> int:
    """Number of rows of a batch: the first dimension of its first tensor that has one; 1 if none has."""
    for leaf in _pytree.tree_leaves(batch):
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            return int(leaf.shape[0])
    return 1


def capture(
    model: nn.Module, batch: Mapping[str, Any] | Sequence[Any], fixed: Mapping[str, Spec], *, reduce: bool
) -> Capture:
    """Captures forward and loss with `torch.export`, on the meta device.

    Args:
        model: on any device; is not changed.
        batch: keyword arguments of `forward`, or positional ones; only shapes and dtypes matter.
        fixed: given specs of parameters.
        reduce: capture only two of each run of equal layers.

    Raises:
        CaptureError: the model cannot be captured.
    """
    rows = batch_size(batch)
    copied = skeleton(model, fixed, reduce=reduce)
    program = _export(copied.module, _resized(batch, rows, rows))
    nodes = tuple(program.graph.nodes)
    names = dict(_Loss(copied.module).named_parameters(remove_duplicate=False))
    parameters: dict[fx.Node, str] = {}
    placeholders = {node.name: node for node in nodes if node.op == "placeholder"}
    for spec in program.graph_signature.input_specs:
        if spec.target in names:
            parameters[placeholders[spec.arg.name]] = copied.parameters[id(names[spec.target])]
    return Capture(
        nodes=nodes,
        parameters=parameters,
        batch=_batch_dimensions(copied.module, batch, rows, nodes),
        modules={node: _modules_of(node) for node in nodes},
        skeleton=copied,
        batch_size=rows,
    )


def _export(module: nn.Module, batch: Any) -> torch.export.ExportedProgram:
    args: tuple[Any, ...] = () if isinstance(batch, Mapping) else tuple(batch)
    kwargs = dict(batch) if isinstance(batch, Mapping) else {}
    try:
        with warnings.catch_warnings(), _environment_kept():
            warnings.simplefilter("ignore")
            return torch.export.export(_Loss(module), args, kwargs, strict=False)
    except MODEL_FAILURES as error:
        first = str(error).strip().splitlines()
        raise CaptureError(f"{type(error).__name__}: {first[0] if first else 'no message'}") from error


@contextmanager
def _environment_kept() -> Iterator[None]:
    """Restores a variable that `torch.export` sets (a cache directory), since child processes would inherit it."""
    before = os.environ.get(_CACHE)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_CACHE, None)


def _resized(batch: Any, rows: int, new: int) -> Any:
    """The batch on the meta device, with another number of rows."""

    def leaf(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        shape = tuple(value.shape)
        if shape and shape[0] == rows:
            shape = (new, *shape[1:])
        return torch.empty(shape, dtype=value.dtype, device="meta")

    plain = dict(batch) if isinstance(batch, Mapping) else tuple(batch)
    return _pytree.tree_map(leaf, plain)


def _batch_dimensions(module: nn.Module, batch: Any, rows: int, nodes: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """Finds the batch dimension of each value, by a second capture with twice the rows.

    If the second graph differs, the first dimension of a value counts as the batch if the number of rows divides it.
    """
    try:
        other: Sequence[fx.Node] = tuple(_export(module, _resized(batch, rows, 2 * rows)).graph.nodes)
    except CaptureError:
        other = ()
    alike = [(node.op, str(node.target)) for node in nodes] == [(node.op, str(node.target)) for node in other]
    result: dict[fx.Node, int] = {}
    for position, node in enumerate(nodes):
        shape = shape_of(node)
        if shape is None:
            continue
        if alike:
            grown = shape_of(other[position])
            pairs = zip(shape, grown, strict=False) if grown is not None else ()
            moved = [index for index, (one, two) in enumerate(pairs) if one != two]
        else:
            moved = [0] if shape and shape[0] >= rows > 1 and shape[0] % rows == 0 else []
        if moved:
            result[node] = moved[0]
    return result


def tensor_of(node: fx.Node) -> torch.Tensor | None:
    """The (first) tensor that a node returns, on the meta device; None if it returns no tensor."""
    value = node.meta.get("val")
    if isinstance(value, (tuple, list)):
        value = next((item for item in value if isinstance(item, torch.Tensor)), None)
    return value if isinstance(value, torch.Tensor) else None


def shape_of(node: fx.Node) -> tuple[int, ...] | None:
    """The shape of the (first) tensor that a node returns; None if it returns no tensor."""
    value = tensor_of(node)
    return None if value is None else tuple(int(size) for size in value.shape)


def _modules_of(node: fx.Node) -> tuple[str, ...]:
    stack = node.meta.get("nn_module_stack") or {}
    paths = (re.sub(r"@\d+", "", str(entry[0])) for entry in stack.values())
    return tuple(path[len(_ROOT) + 1 :] for path in paths if path.startswith(f"{_ROOT}."))
