"""Measures plans: compiles the training step under each plan in a separate process, and reads the compiled program."""

from xla_adapters.sharding.measure.measuring_process import (
    Job,
    MeasuringError,
    PlanCompiler,
    PlanResult,
    compiler_for,
    loss_of,
    measure_plans,
    pack,
    register,
    unpack,
)
from xla_adapters.sharding.measure.plan_cache import PlanCache, digest_of_step

__all__ = [
    "Job",
    "MeasuringError",
    "PlanCache",
    "PlanCompiler",
    "PlanResult",
    "compiler_for",
    "digest_of_step",
    "loss_of",
    "measure_plans",
    "pack",
    "register",
    "unpack",
]
