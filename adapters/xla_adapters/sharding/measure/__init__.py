"""Measures plans: compiles the training step under each plan in a separate process, and reads the compiled program."""

from xla_adapters.sharding.measure.plan_cache import PlanCache
from xla_adapters.sharding.measure.process import MeasuringError, PlanCompiler, PlanResult, compiler_for, measure_plans

__all__ = ["MeasuringError", "PlanCache", "PlanCompiler", "PlanResult", "compiler_for", "measure_plans"]
