"""Templates: the usual sharding schemes (data parallel, fully sharded, tensor parallel, and the last two combined).

Sources: ZeRO (arXiv 1910.02054) for `"fsdp"`, Megatron-LM (arXiv 1909.08053) for `"tp"`, GSPMD (arXiv 2105.04663)
for both on one mesh.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn

from xla_adapters.errors import ConfigError
from xla_adapters.sharding.config import ShardingConfig
from xla_adapters.sharding.mesh import DATA, MODEL, DimSpec, Mesh, Spec, axes_of, replicated
from xla_adapters.sharding.plan import ShardingPlan
from xla_adapters.sharding.plan_data import ActivationPlan, ParameterPlan

# Row-parallel layers of Megatron-LM: their input is split, their output is not.
_ROW_NAMES = frozenset({"o_proj", "out_proj", "c_proj", "down_proj", "fc2", "wo", "o", "w2", "dense_4h_to_h"})
_ROW_ENDINGS = ("output.dense",)


@dataclass(frozen=True, kw_only=True)
class NamedParameter:
    """A parameter of the user's model with all its names; the first is that of `named_parameters()`."""

    names: tuple[str, ...]
    value: torch.Tensor

    def planned(self, spec: Spec, decided_by: str, used: Spec | None = None) -> ParameterPlan:
        """The parameter's entry in a plan; the arguments are attributes of `ParameterPlan`."""
        return ParameterPlan(
            name=self.names[0],
            tied=self.names[1:],
            shape=tuple(self.value.shape),
            dtype=str(self.value.dtype).removeprefix("torch."),
            spec=spec,
            decided_by=decided_by,
            used=used,
        )


def list_parameters(model: nn.Module) -> list[NamedParameter]:
    """All parameters of a model; those with several names (tied weights) once."""
    found: dict[int, NamedParameter] = {}
    for name, value in model.named_parameters(remove_duplicate=False):
        names = found[id(value)].names if id(value) in found else ()
        found[id(value)] = NamedParameter(names=(*names, name), value=value)
    return list(found.values())


def default_mesh(scheme: str, devices: int) -> Mesh:
    """The mesh of a template if the user gives none; for `"2d"` the data axis is the longer one."""
    if scheme == "tp":
        return Mesh.data_and_model(1, devices)
    if scheme == "2d":
        model = max(n for n in range(1, math.isqrt(devices) + 1) if devices % n == 0)
        return Mesh.data_and_model(devices // model, model)
    return Mesh.data_and_model(devices, 1)


def template(
    scheme: str,
    model: nn.Module,
    mesh: Mesh,
    *,
    config: ShardingConfig | None = None,
    fixed: Mapping[str, Spec] | None = None,
) -> ShardingPlan:
    """Makes the plan of a scheme for a model, by types and names of its layers.

    Args:
        scheme: `"dp"`, `"fsdp"`, `"tp"` or `"2d"`.
        model: on any device; values are not read.
        mesh: has an axis `data`, `model`, or both.
        config: for its `overrides`.
        fixed: specs of parameters that are already annotated; they are kept.

    Raises:
        ConfigError: an override matches no parameter or does not divide, or the mesh lacks the scheme's axis.
    """
    config = config if config is not None else ShardingConfig(scheme=scheme)  # type: ignore[arg-type]
    data, layers = _axes(mesh)
    for axis, wanted in ((data, scheme in ("dp", "fsdp", "2d")), (layers, scheme in ("tp", "2d"))):
        if wanted and axis is None:
            raise ConfigError(
                f"sharding={scheme!r} splits over an axis named {DATA if axis is data else MODEL!r}; the mesh has "
                f"{', '.join(mesh.axis_names)}"
            )
    entries = _parameter_plans(scheme, model, mesh, config, fixed or {})
    notes: list[str] = []
    whole = [entry for entry in entries if mesh.shards(entry.spec) == 1]
    if scheme in ("fsdp", "2d") and mesh.size > 1 and whole:
        names = ", ".join(entry.name for entry in whole[:3]) + (", ..." if len(whole) > 3 else "")
        notes.append(f"{len(whole)} parameters have no dimension that divides and are held whole: {names}")
    plan = ShardingPlan(
        name=scheme,
        mesh=mesh,
        parameters=tuple(entries),
        batch=() if data is None or mesh.axis_size(data) == 1 else (data,),
        activations=() if scheme == "dp" else tuple(_between_layers(model, mesh, data, layers)),
        notes=tuple(notes),
    )
    plan.check()
    return plan


def _axes(mesh: Mesh) -> tuple[str | None, str | None]:
    """The axis that splits the batch and the one that splits layers; None where the mesh has no such axis."""
    return DATA if DATA in mesh.axis_names else None, MODEL if MODEL in mesh.axis_names else None


def _parameter_plans(
    scheme: str, model: nn.Module, mesh: Mesh, config: ShardingConfig, fixed: Mapping[str, Spec]
) -> list[ParameterPlan]:
    """Decides the spec of each parameter: by an override, else by its annotation, else by the template.

    Raises:
        ConfigError: an override fits no parameter.
    """
    data, layers = _axes(mesh)
    plans = []
    unused = set(config.overrides)
    for parameter in list_parameters(model):
        spec, decided_by = replicated(parameter.value.ndim), "template"
        if scheme in ("tp", "2d") and layers is not None:
            spec = _megatron(parameter, model, mesh, layers)
        if scheme in ("fsdp", "2d") and data is not None:
            spec = _fully_sharded(parameter.value, spec, mesh, data)
        annotated = next((fixed[name] for name in parameter.names if name in fixed), None)
        if annotated is not None:
            spec, decided_by = annotated, "user"
        for pattern, wanted in config.overrides.items():
            if any(fnmatchcase(name, pattern) for name in parameter.names):
                unused.discard(pattern)
                if decided_by != "override":
                    spec, decided_by = wanted, "override"
        plans.append(parameter.planned(spec, decided_by))
    if unused:
        raise ConfigError(f"overrides {', '.join(map(repr, sorted(unused)))} fit no parameter of the model")
    return plans


def _megatron(parameter: NamedParameter, model: nn.Module, mesh: Mesh, axis: str) -> Spec:
    """The spec of Megatron-LM: outputs of column-parallel layers are split, inputs of row-parallel layers."""
    value, layer = parameter.value, parameter.names[0].rpartition(".")[0]
    owner = model.get_submodule(layer)
    whole = replicated(value.ndim)
    if isinstance(owner, nn.Embedding):
        return _split(value, whole, mesh, axis, [0]) if _is_vocabulary(parameter) else whole
    if value.ndim >= 3 and not _is_convolution(owner):
        # Experts, one per entry of the first dimension.
        return _split(value, whole, mesh, axis, [0])
    row = layer.rpartition(".")[2] in _ROW_NAMES or layer.endswith(_ROW_ENDINGS)
    if isinstance(owner, nn.Linear) or type(owner).__name__ == "Conv1D" or _is_convolution(owner):
        outputs = 1 if type(owner).__name__ == "Conv1D" and value.ndim == 2 else 0
        if value.ndim == 1:
            return whole if row else _split(value, whole, mesh, axis, [0])
        return _split(value, whole, mesh, axis, [1 - outputs if row else outputs])
    return whole


def _is_vocabulary(parameter: NamedParameter) -> bool:
    """Whether an embedding is that of the vocabulary: tied to the output layer, or much longer than wide."""
    return len(parameter.names) > 1 or parameter.value.shape[0] >= 4 * parameter.value.shape[1]


def _is_convolution(owner: nn.Module) -> bool:
    return isinstance(owner, (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d))


def _fully_sharded(value: torch.Tensor, spec: Spec, mesh: Mesh, axis: str) -> Spec:
    """Splits the longest dimension that is not split yet; if none divides, one that is split over another axis."""
    order = sorted(range(value.ndim), key=lambda dim: (-value.shape[dim], dim))
    return _split(value, spec, mesh, axis, [dim for dim in order if spec[dim] is None] + order)


def _split(value: torch.Tensor, spec: Spec, mesh: Mesh, axis: str, dims: list[int]) -> Spec:
    """`spec` with the first of `dims` that divides split over `axis`; unchanged if none divides."""
    if mesh.axis_size(axis) == 1:
        return spec
    for dim in dims:
        if value.shape[dim] % (mesh.parts(spec[dim]) * mesh.axis_size(axis)) == 0:
            axes = (*axes_of(spec[dim]), axis)
            entry: DimSpec = axes[0] if len(axes) == 1 else axes
            return (*spec[:dim], entry, *spec[dim + 1 :])
    return spec


def _between_layers(model: nn.Module, mesh: Mesh, data: str | None, layers: str | None) -> Iterator[ActivationPlan]:
    """Constraints on the outputs of repeated layers: split over the data axis as the batch is, and not otherwise."""
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or len(module) < 2:
            continue
        if len({type(block) for block in module}) != 1:
            continue
        rank = 4 if any(isinstance(part, nn.Conv2d) for part in module[0].modules()) else 3
        for index in range(len(module)):
            yield ActivationPlan(module=f"{name}.{index}", spec=(data, *[None] * (rank - 1)))
