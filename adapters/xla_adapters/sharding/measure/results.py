"""`PlanResult`: the result of the measuring process for one plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from xla_adapters.sharding.plan_data import CollectiveCost, Measurement


class MeasuringError(Exception):
    """Plans could not be compiled to be measured; they are compared by their predictions."""


@dataclass(frozen=True, kw_only=True)
class PlanResult:
    """The result for one plan.

    Attributes:
        measurement: of its compiled step; None if it could not be compiled.
        collectives: by kind and mesh axis, without times.
        fits: False if the compiler refused the step because a device's memory is too small for it.
        seconds: time of tracing and compiling.
        problem: why there is no measurement.
    """

    measurement: Measurement | None = None
    collectives: tuple[CollectiveCost, ...] = ()
    fits: bool = True
    seconds: float = 0.0
    problem: str = ""

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> PlanResult:
        """Reads what `dataclasses.asdict` returned."""
        measurement = values["measurement"]
        read = {
            "measurement": None if measurement is None else Measurement(**measurement),
            "collectives": tuple(CollectiveCost(**item) for item in values["collectives"]),
        }
        return cls(**{**values, **read})
