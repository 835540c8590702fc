"""`compiler_for`: finds what compiles training steps for given devices, to compare plans by the compiled steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from xla_adapters.sharding.measure.child import measure_plans
from xla_adapters.sharding.measure.results import MeasuringError, PlanResult

# Compiles the step of a model under each plan, in another process: `measure_plans`, with its model, batch, plans and
# (by name) `around`.
Measure = Callable[..., list[PlanResult]]


@dataclass(frozen=True, kw_only=True)
class PlanCompiler:
    """A compiler and what it compiles for.

    Attributes:
        name: of the compiler and its target; measurements are stored under it.
        measure: compiles the steps.
    """

    name: str
    measure: Measure


Find = Callable[[str, int], PlanCompiler]
_registered: list[Find] = []


def register(find: Find) -> None:
    """Sets what `compiler_for` calls for devices that are no CPUs, for the rest of the process."""
    _registered[:] = [find]


def compiler_for(topology: str, devices: int) -> PlanCompiler:
    """The compiler for so many devices.

    Args:
        topology: as in `ShardingConfig`.
        devices: number of devices.

    Raises:
        MeasuringError: there is none; the message says what is missing.
        ConfigError: the topology is not one of so many devices.
    """
    if topology == "cpu":
        return PlanCompiler(name="cpu", measure=measure_plans)
    if not _registered:
        raise MeasuringError("plans are compiled for CPU devices only")
    return _registered[0](topology, devices)
