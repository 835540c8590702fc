"""Measures plans: compiles the training step under each plan in a separate process, and reads the compiled program."""

from xla_adapters.sharding.measure.child import measure_plans
from xla_adapters.sharding.measure.compilers import PlanCompiler, compiler_for
from xla_adapters.sharding.measure.plan_cache import PlanCache
from xla_adapters.sharding.measure.results import MeasuringError, PlanResult

__all__ = ["MeasuringError", "PlanCache", "PlanCompiler", "PlanResult", "compiler_for", "measure_plans"]
