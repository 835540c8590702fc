"""The data of a sharding plan: entries for parameters and activations, costs, and `PlanData`, which holds them."""

from __future__ import annotations

import difflib
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from xla_adapters.errors import ConfigError
from xla_adapters.sharding.mesh import DATA, Mesh, Spec, tiles_of, without

Collective = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"]


@dataclass(frozen=True, kw_only=True)
class ParameterPlan:
    """The sharding of one parameter; its gradient and optimizer state are sharded in the same way.

    Attributes:
        name: as in `named_parameters()`; further names of a tied weight are in `tied`.
        shape: of the whole parameter.
        dtype: e.g. `"float32"`.
        spec: how it is stored: the mesh axes that each dimension is split over.
        tied: other names of the same parameter.
        decided_by: `"planner"`, `"template"`, `"user"` (annotated before) or `"override"`.
        used: its sharding during the forward, if more than the data axis is gathered before use.
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
        """Its sharding during the forward: `used`, or else `spec` gathered over the data axis."""
        return self.used if self.used is not None else without(self.spec, DATA)


@dataclass(frozen=True, kw_only=True)
class ActivationPlan:
    """A sharding constraint on the output or input of a module.

    Attributes:
        module: its name as in `named_modules()`.
        spec: of the first output or argument; ignored if the rank differs.
        of: whether it is for the output or the input.
        gradient: of its gradient in the backward, if that is needed in another layout.
    """

    module: str
    spec: Spec
    of: Literal["output", "input"] = "output"
    gradient: Spec | None = None


@dataclass(frozen=True, kw_only=True)
class CollectiveCost:
    """The collectives of one kind, axis and cause in a step.

    Attributes:
        kind: e.g. `"all-reduce"`.
        axis: of the mesh; several are joined by `+`.
        count: number of collectives per step.
        wire_bytes: bytes that each device sends per step (ring algorithm).
        seconds: predicted time per step.
        cause: `"gradients"`, `"parameters"`, `"activations"`, ...
    """

    kind: str
    axis: str
    count: int
    wire_bytes: float
    seconds: float = 0.0
    cause: str = ""


@dataclass(frozen=True, kw_only=True)
class PlanCost:
    """The predicted cost of one step, per device.

    Attributes:
        memory: bytes by kind: `"parameters"`, `"gradients"`, `"optimizer"`, `"activations"`, `"batch"`.
        collectives: by kind, axis and cause.
        compute_seconds: without communication.
    """

    memory: Mapping[str, float] = field(default_factory=dict)
    collectives: tuple[CollectiveCost, ...] = ()
    compute_seconds: float = 0.0

    @property
    def memory_bytes(self) -> float:
        """Bytes of all kinds together."""
        return sum(self.memory.values())

    @property
    def wire_bytes(self) -> float:
        """Communication volume: bytes that each device sends per step."""
        return sum(item.wire_bytes for item in self.collectives)

    @property
    def communication_seconds(self) -> float:
        """Time of all collectives, without overlap."""
        return sum(item.seconds for item in self.collectives)

    @property
    def step_seconds(self) -> float:
        """Compute and communication, without overlap."""
        return self.compute_seconds + self.communication_seconds


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The cost of the compiled step, read from XLA's optimised program; per device and step.

    Attributes:
        wire_bytes: communication volume of its collectives.
        memory_bytes: arguments, outputs that do not reuse an argument's memory, and temporary values.
        collectives: number by kind.
    """

    wire_bytes: float
    memory_bytes: float
    collectives: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """A summary of a plan that was compared with others.

    Attributes:
        name: of the scheme.
        mesh: as text, e.g. `"data=4, model=2"`.
        predicted_wire_bytes, predicted_memory_bytes: by the cost model, per device.
        seconds: time of a step by which plans are compared: predicted compute, and communication from the measured
            volume (predicted if not measured).
        measured: of its compiled step; None if it was not compiled.
        remark: why it was not chosen, if not for its cost.
    """

    name: str
    mesh: str
    predicted_wire_bytes: float
    predicted_memory_bytes: float
    seconds: float
    measured: Measurement | None = None
    remark: str = ""


@dataclass(frozen=True, kw_only=True)
class PlanData:
    """The data of a `ShardingPlan`.

    Attributes:
        name: of the scheme: `"dp"`, `"fsdp"`, `"tp"`, `"2d"` or `"planner"`.
        mesh: the devices.
        parameters: one entry per distinct parameter.
        batch: the axes that the first dimension of each tensor of the batch is split over.
        activations: sharding constraints inside the model.
        predicted: cost by the cost model; None if not estimated.
        measured: cost of the compiled step; None if it was not compiled.
        notes: deviations from the user's options, and why.
        alternatives: all compared plans, including this one, the cheapest first.
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
        names = [known for entry in self.parameters for known in (entry.name, *entry.tied)]
        near = ", ".join(difflib.get_close_matches(name, names, n=3, cutoff=0)) or "none"
        raise ConfigError(
            f"the plan {self.name!r} has no parameter {name!r}, near: {near}; it was made for another model"
        )


def tiles_of_plan(plan: PlanData) -> Hashable:
    """All tile assignments of a plan. Plans of one model with equal ones compile to the same step."""
    mesh = plan.mesh
    stored = tuple(tiles_of(mesh, spec) for entry in plan.parameters for spec in (entry.spec, entry.spec_in_use))
    held = tuple(
        (entry.module, entry.of, tiles_of(mesh, entry.spec), tiles_of(mesh, entry.gradient or entry.spec))
        for entry in plan.activations
    )
    return stored, held, tiles_of(mesh, (plan.batch,))
