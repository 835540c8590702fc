"""`ShardingPlan`: how each tensor of a training step is split over the mesh, and the expected cost."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from xla_adapters.errors import ConfigError
from xla_adapters.sharding.mesh import Mesh, as_spec
from xla_adapters.sharding.plan_data import (
    ActivationPlan,
    Alternative,
    CollectiveCost,
    Measurement,
    ParameterPlan,
    PlanCost,
    PlanData,
)
from xla_adapters.sharding.plan_report import report
from xla_adapters.sharding.visualize import visualize

FORMAT = 2
# Keys of the constraints in a saved plan.
_CONSTRAINTS: Mapping[Literal["output", "input"], str] = {"output": "activations", "input": "inputs"}


@dataclass(frozen=True, kw_only=True)
class ShardingPlan(PlanData):
    """How a model's training step is split over a mesh; can be applied, saved, printed and drawn."""

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
            for spec in (constraint.spec, constraint.gradient):
                if spec is not None:
                    self.mesh.check_axes(f"{constraint.of} of {constraint.module}", spec)

    def report(self, *, width: int = 110) -> str:
        """The plan and its costs as text; see `report.report`."""
        return report(self, width=width)

    def visualize(self, parameter: str | None = None, *, form: Literal["text", "html"] = "text") -> str:
        """A picture of the plan, or of one parameter; see `visualize.visualize`."""
        return visualize(self, parameter, form=form)

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON; it may be edited, and `load` reads it."""
        values = {"format": FORMAT, **dataclasses.asdict(self)}
        values["parameters"] = {entry.pop("name"): entry for entry in values["parameters"]}
        for kind, key in _CONSTRAINTS.items():
            values[key] = {entry.module: _constraint(entry) for entry in self.activations if entry.of == kind}
        Path(path).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> ShardingPlan:
        """Reads a plan that `save` wrote.

        Raises:
            ConfigError: the file is not a plan, or the plan is not consistent.
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
            _activation(module, entry, kind)
            for kind, key in _CONSTRAINTS.items()
            # Older files have no constraints of inputs.
            for module, entry in (values.pop(key) if kind == "output" else values.pop(key, {})).items()
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


def _constraint(entry: ActivationPlan) -> Any:
    """As it is saved: its spec, or two if its gradient has another."""
    return entry.spec if entry.gradient is None else {"spec": entry.spec, "gradient": entry.gradient}


def _activation(module: str, entry: Any, of: Literal["output", "input"]) -> ActivationPlan:
    if not isinstance(entry, dict):
        return ActivationPlan(module=module, spec=as_spec(entry), of=of)
    return ActivationPlan(module=module, of=of, **{name: as_spec(spec) for name, spec in entry.items()})


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
