"""`ShardingPlan`: how every tensor of a training step lies on the mesh, and what that is expected to cost."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from xla_adapters.errors import ConfigError
from xla_adapters.sharding.mesh import DATA, Mesh, Spec, as_spec, without

FORMAT = 2
# The names of constraints in a file.
_CONSTRAINTS: Mapping[Literal["output", "input"], str] = {"output": "activations", "input": "inputs"}
Collective = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"]


@dataclass(frozen=True, kw_only=True)
class ParameterPlan:
    """One parameter (its gradient and optimizer state lie as it does).

    Attributes:
        name: as in `named_parameters()`; further names of a tied weight are in `tied`.
        shape, dtype: of the whole, e.g. `"float32"`.
        spec: how it lies on the mesh.
        tied: other names of the same parameter.
        decided_by: `"planner"`, `"template"`, `"user"` (it was annotated before) or `"override"`.
        used: how modules take it, if it is put together further than over the data axis.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    spec: Spec
    tied: tuple[str, ...] = ()
    decided_by: str = "planner"
    used: Spec | None = None

    @property
    def spec_in_use(self) -> Spec:
        """How modules take it: whole on the data axis, if `used` says no more."""
        return self.used if self.used is not None else without(self.spec, DATA)


@dataclass(frozen=True, kw_only=True)
class ActivationPlan:
    """A constraint on what a module returns or takes.

    Attributes:
        module: its name as in `named_modules()`.
        spec: of its (first) output or argument; one of another rank is left alone.
        of: which of them.
    """

    module: str
    spec: Spec
    of: Literal["output", "input"] = "output"


@dataclass(frozen=True, kw_only=True)
class CollectiveCost:
    """Collectives of one kind over one axis, per step.

    Attributes:
        kind: of the collective.
        axis: of the mesh; several are joined by `+`.
        count: how many.
        wire_bytes: sent by each device, by the ring algorithm.
        seconds: they take.
        cause: what they are for, e.g. `"gradients"`, `"parameters"`, `"activations"`.
    """

    kind: str
    axis: str
    count: int
    wire_bytes: float
    seconds: float = 0.0
    cause: str = ""


@dataclass(frozen=True, kw_only=True)
class PlanCost:
    """What one step costs on each device.

    Attributes:
        memory: bytes by kind: `"parameters"`, `"gradients"`, `"optimizer"`, `"activations"`, `"batch"`.
        collectives: by kind, axis and cause.
        compute_seconds: of matrix products and the rest.
    """

    memory: Mapping[str, float] = field(default_factory=dict)
    collectives: tuple[CollectiveCost, ...] = ()
    compute_seconds: float = 0.0

    @property
    def memory_bytes(self) -> float:
        """All kinds together."""
        return sum(self.memory.values())

    @property
    def wire_bytes(self) -> float:
        """Sent by each device."""
        return sum(item.wire_bytes for item in self.collectives)

    @property
    def communication_seconds(self) -> float:
        """Of all collectives, one after the other."""
        return sum(item.seconds for item in self.collectives)

    @property
    def step_seconds(self) -> float:
        """Compute and communication, one after the other."""
        return self.compute_seconds + self.communication_seconds


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What the compiled step really does, per device and step.

    Attributes:
        wire_bytes: by collectives of the optimised program.
        memory_bytes: arguments, outputs that reuse none of them, and temporary values.
        collectives: number by kind.
    """

    wire_bytes: float
    memory_bytes: float
    collectives: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """A plan that was considered.

    Attributes:
        name: of the scheme.
        mesh: as text, e.g. `"data=4, model=2"`.
        predicted_wire_bytes, predicted_memory_bytes: by the cost model, per device.
        seconds: of a step, by which plans are compared: compute as predicted, communication as measured, or as
            predicted where it was not measured.
        measured: of its compiled step; None if it was not compiled.
        remark: why it was not chosen, if for another reason than its cost.
    """

    name: str
    mesh: str
    predicted_wire_bytes: float
    predicted_memory_bytes: float
    seconds: float
    measured: Measurement | None = None
    remark: str = ""


@dataclass(frozen=True, kw_only=True)
class ShardingPlan:
    """How a model's training step is split over a mesh.

    Attributes:
        name: of the scheme: `"dp"`, `"fsdp"`, `"tp"`, `"2d"` or `"planner"`.
        mesh: the devices.
        parameters: one entry per distinct parameter.
        batch: what the first dimension of every tensor of the batch is split over.
        activations: constraints inside the model.
        predicted: by the cost model; None if nobody predicted.
        measured: of the compiled step; None if it was not compiled.
        notes: what was decided otherwise than asked for, and why.
        alternatives: what it was chosen among, itself included, the cheapest first; empty if nothing was compared.
    """

    name: str
    mesh: Mesh
    parameters: tuple[ParameterPlan, ...]
    batch: tuple[str, ...] = ()
    activations: tuple[ActivationPlan, ...] = ()
    predicted: PlanCost | None = None
    measured: Measurement | None = None
    notes: tuple[str, ...] = ()
    alternatives: tuple[Alternative, ...] = ()

    def spec_of(self, parameter: str) -> Spec:
        """The spec of a parameter, by any of its names.

        Raises:
            ConfigError: the plan has no such parameter.
        """
        return self.parameter(parameter).spec

    def parameter(self, name: str) -> ParameterPlan:
        """The entry of a parameter, by any of its names.

        Raises:
            ConfigError: the plan has no such parameter.
        """
        for entry in self.parameters:
            if name == entry.name or name in entry.tied:
                return entry
        raise ConfigError(f"the plan {self.name!r} has no parameter {name!r}: it was made for another model")

    def fits(self, model: torch.nn.Module) -> bool:
        """Whether the model has the parameters that were planned, by name and shape."""
        planned = {name: entry.shape for entry in self.parameters for name in (entry.name, *entry.tied)}
        found = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        return len(found) == len(self.parameters) and found.items() <= planned.items()

    def check(self) -> None:
        """Raises if a tensor cannot be split as planned.

        Raises:
            ConfigError: an axis is unknown or used twice, or a dimension does not divide.
        """
        for entry in self.parameters:
            for spec in (entry.spec, entry.used):
                if spec is not None:
                    self.mesh.check(entry.name, entry.shape, spec)
        self.mesh.check_axes("batch", (self.batch,))
        for constraint in self.activations:
            self.mesh.check_axes(f"{constraint.of} of {constraint.module}", constraint.spec)

    def report(self, *, width: int = 110) -> str:
        """The plan and its costs as text; see `report.report`."""
        from xla_adapters.sharding.report import report

        return report(self, width=width)

    def visualize(self, parameter: str | None = None, *, form: Literal["text", "svg", "html"] = "text") -> str:
        """A picture of the plan, or of one parameter; see `visualize.visualize`."""
        from xla_adapters.sharding.visualize import visualize

        return visualize(self, parameter, form=form)

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON, to read, edit and load again."""
        values = {"format": FORMAT, **dataclasses.asdict(self)}
        values["parameters"] = {entry.pop("name"): entry for entry in values["parameters"]}
        for kind, key in _CONSTRAINTS.items():
            values[key] = {entry.module: entry.spec for entry in self.activations if entry.of == kind}
        Path(path).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> ShardingPlan:
        """Reads a plan that `save` wrote.

        Raises:
            ConfigError: the file is no plan, or one that contradicts itself.
        """
        try:
            values: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path} is no sharding plan: line {error.lineno}: {error.msg}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path} is no sharding plan: it is no text") from error
        if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
            raise ConfigError(f"{path} is no sharding plan of format {FORMAT}")
        try:
            plan = cls._from_values(values)
        except KeyError as error:
            raise ConfigError(f"{path} is no sharding plan: it lacks {error}") from error
        except (AttributeError, TypeError, ConfigError) as error:
            raise ConfigError(f"{path} is no sharding plan: {error}") from error
        plan.check()
        return plan

    @classmethod
    def _from_values(cls, values: dict[str, Any]) -> ShardingPlan:
        parameters = tuple(
            ParameterPlan(
                name=name,
                **{
                    **entry,
                    "shape": _sizes(name, entry["shape"]),
                    "tied": _names(f"tied of {name}", entry["tied"]),
                    "spec": as_spec(entry["spec"]),
                    "used": None if entry.get("used") is None else as_spec(entry["used"]),
                },
            )
            for name, entry in values.pop("parameters").items()
        )
        activations = tuple(
            ActivationPlan(module=module, spec=as_spec(spec), of=kind)
            for kind, key in _CONSTRAINTS.items()
            # There were none of inputs once.
            for module, spec in (values.pop(key) if kind == "output" else values.pop(key, {})).items()
        )
        predicted, measured = values.pop("predicted"), values.pop("measured")
        if predicted is not None:
            predicted = PlanCost(
                **{**predicted, "collectives": tuple(CollectiveCost(**item) for item in predicted["collectives"])}
            )
        return cls(
            mesh=Mesh(**values.pop("mesh")),
            parameters=parameters,
            activations=activations,
            predicted=predicted,
            measured=_measurement(measured),
            batch=_names("batch", values.pop("batch")),
            notes=_names("notes", values.pop("notes")),
            alternatives=tuple(
                Alternative(**{**item, "measured": _measurement(item["measured"])})
                for item in values.pop("alternatives")
            ),
            **values,
        )


def _measurement(values: dict[str, Any] | None) -> Measurement | None:
    return None if values is None else Measurement(**values)


def _sizes(name: str, values: object) -> tuple[int, ...]:
    if not isinstance(values, list) or any(isinstance(size, bool) or not isinstance(size, int) for size in values):
        raise ConfigError(f"the shape of {name} must be a list of integers; got {values!r}")
    return tuple(values)


def _names(what: str, values: object) -> tuple[str, ...]:
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ConfigError(f"{what} must be a list of strings; got {values!r}")
    return tuple(values)
