"""xla-adapters: runs each PyTorch training step as one XLA graph, compiled once and replayed."""

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from xla_adapters.config import XLAConfig
from xla_adapters.errors import (
    CheckpointSaveError,
    CollectiveReadError,
    ConcurrentStepError,
    ConfigError,
    DeviceSyncError,
    DiscardedTensorError,
    EagerOptimizerWarning,
    FailedCheckError,
    GraphBreakError,
    GraphBreakWarning,
    GraphLimitError,
    HostOperatorError,
    ProfilerScopeError,
    ReplayMismatchError,
    ReplayMismatchWarning,
    RuntimeOrderError,
    TensorReadError,
    UnsupportedOptionError,
    XLAAdapterError,
)
from xla_adapters.open_step import in_step
from xla_adapters.utils import load_late

if TYPE_CHECKING:
    from xla_adapters.data.shapes import ShapePolicy
    from xla_adapters.insight.counters import StepCounters, count
    from xla_adapters.replay.compiled_step import CompiledStep
    from xla_adapters.replay.safety.trusted import replay_safe
    from xla_adapters.replay.step_program import StepProgram
    from xla_adapters.runtime import eager, get_runtime, initialize
    from xla_adapters.runtime.rng import StepSeed
    from xla_adapters.sharding import distribute_module
    from xla_adapters.tracing.optimizers import prime, register_eager_optimizer, register_state_init
    from xla_adapters.tracing.step import step
    from xla_adapters.tracing.step_scope import StepScope

__all__ = [
    "CheckpointSaveError",
    "CollectiveReadError",
    "CompiledStep",
    "ConcurrentStepError",
    "ConfigError",
    "DeviceSyncError",
    "DiscardedTensorError",
    "EagerOptimizerWarning",
    "FailedCheckError",
    "GraphBreakError",
    "GraphBreakWarning",
    "GraphLimitError",
    "HostOperatorError",
    "ProfilerScopeError",
    "ReplayMismatchError",
    "ReplayMismatchWarning",
    "RuntimeOrderError",
    "ShapePolicy",
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
    "get_runtime",
    "in_step",
    "initialize",
    "prime",
    "register_eager_optimizer",
    "register_state_init",
    "replay_safe",
    "step",
]

# Where the names are that need torch: imported when they are used, so that the command line answers at once.
_HOMES = {
    "CompiledStep": "replay.compiled_step",
    "ShapePolicy": "data.shapes",
    "StepCounters": "insight.counters",
    "StepProgram": "replay.step_program",
    "StepScope": "tracing.step_scope",
    "StepSeed": "runtime.rng",
    "count": "insight.counters",
    "distribute_module": "sharding",
    "eager": "runtime",
    "get_runtime": "runtime",
    "initialize": "runtime",
    "prime": "tracing.optimizers",
    "register_eager_optimizer": "tracing.optimizers",
    "register_state_init": "tracing.optimizers",
    "replay_safe": "replay.safety.trusted",
    "step": "tracing.step",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("xla-adapters")
    return load_late(__name__, _HOMES, name)
