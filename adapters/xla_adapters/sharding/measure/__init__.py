"""Measuring: plans are compiled in a process of their own, and compared by what the compiled steps do."""

from xla_adapters.sharding.measure.child import measure_plans
from xla_adapters.sharding.measure.kept import KeptPlans
from xla_adapters.sharding.measure.results import MeasuringError, PlanResult

__all__ = ["KeptPlans", "MeasuringError", "PlanResult", "measure_plans"]
