"""xla-adapters: training steps that are one XLA graph, executed once."""

from xla_adapters.backend import get_backend, initialize
from xla_adapters.breaks import GraphBreakWarning
from xla_adapters.compiled_step import CompiledStep
from xla_adapters.config import XLAConfig
from xla_adapters.counters import StepCounters, count
from xla_adapters.errors import (
    CheckpointSaveError,
    CollectiveReadError,
    ConcurrentStepError,
    ConfigError,
    DeviceSyncError,
    DiscardedTensorError,
    GraphBreakError,
    GraphLimitError,
    ProfilerScopeError,
    RuntimeOrderError,
    TensorReadError,
    UnsupportedOptionError,
    XLAAdapterError,
)
from xla_adapters.modes import eager
from xla_adapters.optimizers import EagerOptimizerWarning, prime, register_eager_optimizer, register_state_init
from xla_adapters.program import StepProgram
from xla_adapters.rng import StepSeed
from xla_adapters.sharding.distribute import distribute_module
from xla_adapters.step import step
from xla_adapters.step_scope import StepScope, in_step

__all__ = [
    "CheckpointSaveError",
    "CollectiveReadError",
    "CompiledStep",
    "ConcurrentStepError",
    "ConfigError",
    "DeviceSyncError",
    "DiscardedTensorError",
    "EagerOptimizerWarning",
    "GraphBreakError",
    "GraphBreakWarning",
    "GraphLimitError",
    "ProfilerScopeError",
    "RuntimeOrderError",
    "StepCounters",
    "StepProgram",
    "StepScope",
    "StepSeed",
    "TensorReadError",
    "UnsupportedOptionError",
    "XLAAdapterError",
    "XLAConfig",
    "count",
    "distribute_module",
    "eager",
    "get_backend",
    "in_step",
    "initialize",
    "prime",
    "register_eager_optimizer",
    "register_state_init",
    "step",
]
