"""`capture`: exports forward and loss of a model as a graph, on the meta device.

The model is copied without weights, with only two of each run of equal layers (`skeleton`), so that planning is fast.
"""

from __future__ import annotations

import copy
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree

from xla_adapters.errors import MODEL_FAILURES
from xla_adapters.sharding.mesh import Spec

# Attributes with the number of a layer; equal layers differ in them.
_POSITION = re.compile(r"idx|index|layer_id|layer_num|block_id|depth")
# Key, module, number of its group of equal layers, keys of the layers it represents.
_Child = tuple[str, nn.Module | None, int | None, tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A layer of the skeleton that represents one or more equal layers of the user's model.

    Attributes:
        name: in the skeleton.
        keys: of the layers it represents, in their container.
        group: a number that equal layers share.
        weight: number of layers of the user's model that it represents, including copies of its parents.
    """

    name: str
    keys: tuple[str, ...]
    group: int
    weight: int


@dataclass(frozen=True, kw_only=True)
class Skeleton:
    """A copy of the user's model on the meta device, possibly with fewer equal layers.

    Attributes:
        module: the copy.
        parameters: by `id` of a parameter of the copy, its name in the user's model.
        layers: the layers of the copy that are equal to others.
        same: by name of a parameter in an equal layer, the name of the parameter that represents it.
        keys: by name of a module of the copy, its key in its parent in the user's model.
    """

    module: nn.Module
    parameters: Mapping[int, str]
    layers: tuple[Layer, ...]
    same: Mapping[str, str]
    keys: Mapping[str, str]

    def originals(self, name: str) -> tuple[str, ...]:
        """Names of the modules of the user's model that a module of the copy represents."""
        layers = {layer.name: layer.keys for layer in self.layers}
        found = [""]
        path = ""
        for part in name.split("."):
            path = _join(path, part)
            keys = layers.get(path, (self.keys[path],))
            found = [_join(prefix, key) for prefix in found for key in keys]
        return tuple(found)


def skeleton(model: nn.Module, fixed: Mapping[str, Spec], *, reduce: bool) -> Skeleton:
    """Copies a model to the meta device.

    Args:
        model: is not changed.
        fixed: given specs; layers are equal only if their specs are.
        reduce: keep only two of three or more equal layers in a row.
    """
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        names[id(parameter)] = name
    work = _Copy(names=names, fixed=fixed, reduce=reduce)
    module = work.module(model, "", "", 1)
    parameters = {id(work.tensors[identity]): name for identity, name in names.items() if identity in work.tensors}
    return Skeleton(
        module=module,
        parameters=parameters,
        layers=tuple(work.layers),
        same=work.same,
        keys=work.keys,
    )


@dataclass(kw_only=True)
class _Copy:
    """Copies a model recursively, and collects what a `Skeleton` needs."""

    names: Mapping[int, str]
    fixed: Mapping[str, Spec]
    reduce: bool
    tensors: dict[int, torch.Tensor] = field(default_factory=dict)
    modules: dict[int, nn.Module] = field(default_factory=dict)
    layers: list[Layer] = field(default_factory=list)
    same: dict[str, str] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    groups: int = 0

    def module(self, module: nn.Module, name: str, original: str, weight: int) -> nn.Module:
        if id(module) in self.modules:
            return self.modules[id(module)]
        result = copy.copy(module)
        self.modules[id(module)] = result
        state = result.__dict__
        state["_parameters"] = {key: self._tensor(value) for key, value in module._parameters.items()}
        state["_buffers"] = {key: self._tensor(value) for key, value in module._buffers.items()}
        children = {}
        for position, (key, child, group, stands) in enumerate(self._children(module, original)):
            # Renumbered, because models access layers by position.
            new = str(position) if isinstance(module, (nn.ModuleList, nn.Sequential)) and key.isdigit() else key
            path, source = _join(name, new), _join(original, key)
            times = weight * len(stands)
            self.keys[path] = key
            if group is not None:
                self.layers.append(Layer(name=path, keys=stands, group=group, weight=times))
            children[new] = None if child is None else self.module(child, path, source, times)
        state["_modules"] = children
        return result

    def _tensor(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None:
            return None
        if id(tensor) not in self.tensors:
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            self.tensors[id(tensor)] = (
                nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
            )
        return self.tensors[id(tensor)]

    def _children(self, module: nn.Module, original: str) -> list[_Child]:
        """The children to copy, with the layers that each represents."""
        children = list(module._modules.items())
        plain: list[_Child] = [(key, child, None, (key,)) for key, child in children]
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
            return plain
        found: dict[Any, tuple[int, str]] = {}
        kept: list[_Child] = []
        run: list[Any] = []
        seen: set[int] = set()
        for key, child in children:
            shared = {id(parameter) for parameter in child.parameters()} if child is not None else set()
            if child is None or not _is_block(child) or shared & seen:
                return plain
            seen |= shared
            signature = self._signature(child, _join(original, key))
            if signature not in found:
                found[signature] = (self.groups, key)
                self.groups += 1
            group, first = found[signature]
            self._tie(child, _join(original, key), _join(original, first))
            run = [*run, signature] if run and run[-1] == signature else [signature]
            if self.reduce and len(run) > 2:
                last = kept.pop()
                kept.append((last[0], last[1], last[2], (*last[3], key)))
            else:
                kept.append((key, child, group, (key,)))
        return kept

    def _signature(self, block: nn.Module, prefix: str) -> Any:
        modules = tuple(
            (name, type(module), module.training, _settings(module)) for name, module in block.named_modules()
        )
        parameters = tuple(
            (
                name,
                tuple(parameter.shape),
                str(parameter.dtype),
                parameter.requires_grad,
                self.fixed.get(self.names.get(id(parameter), "")),
            )
            for name, parameter in block.named_parameters()
        )
        return modules, parameters

    def _tie(self, block: nn.Module, name: str, first: str) -> None:
        for suffix, parameter in block.named_parameters():
            own = self.names.get(id(parameter))
            if own == f"{name}.{suffix}" and name != first:
                self.same[own] = f"{first}.{suffix}"


def _is_block(module: nn.Module) -> bool:
    """Whether a module has several submodules with parameters; equal single layers in a row are planned separately."""
    return sum(1 for part in module.modules() if part._parameters) > 1


def _settings(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    """The plain attributes of a module that may change what it computes."""
    return tuple(
        (name, value)
        for name, value in sorted(vars(module).items())
        if isinstance(value, (bool, int, float, str, type(None))) and not _POSITION.search(name)
    )


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


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
    """

    nodes: tuple[fx.Node, ...]
    parameters: Mapping[fx.Node, str]
    batch: Mapping[fx.Node, int]
    modules: Mapping[fx.Node, tuple[str, ...]]
    skeleton: Skeleton


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
