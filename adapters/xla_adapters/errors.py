"""The exception tree: everything this package raises on purpose derives from `XLAAdapterError`."""

from __future__ import annotations

from enum import Enum

# What tracing somebody's model may raise; each means that this model cannot be traced so.
MODEL_FAILURES = (
    RuntimeError,
    TypeError,
    ValueError,
    AttributeError,
    LookupError,
    AssertionError,
    ArithmeticError,
    ImportError,
)


class XLAAdapterError(Exception):
    """Base of every error raised by xla-adapters."""


class ConfigError(XLAAdapterError, ValueError):
    """An option has a value that cannot work; the message lists what can."""


class UnsupportedOptionError(ConfigError):
    """An option of the host framework cannot work on XLA; the message names the alternative."""


class RuntimeOrderError(XLAAdapterError, RuntimeError):
    """The XLA runtime was touched too early or too late for what is asked of it now."""


class GraphLimitError(XLAAdapterError, RuntimeError):
    """A step was about to compile more different graphs than `max_graphs` allows."""


class DeviceOutOfMemoryError(XLAAdapterError, RuntimeError):
    """The device has too little memory for the step; the step was discarded."""

    @classmethod
    def of_step(cls, name: str, hardware: str) -> DeviceOutOfMemoryError:
        """The error of a step.

        Args:
            name: of the step.
            hardware: what ran out of memory.
        """
        # accelerate's find_executable_batch_size knows it by " out of memory." in its one argument, Lightning's
        # BatchSizeFinder by "CUDA" and "out of memory".
        return cls(
            f"the step {name!r}: {hardware} out of memory. The step was discarded; parameters "
            "are as before it. Make the batch smaller (and accumulate gradients), or checkpoint activations "
            "(what raises OutOfMemoryError on CUDA)"
        )


class DiscardedTensorError(XLAAdapterError, RuntimeError):
    """A tensor was used that has no value: a discarded step had made it, or it was written where no step sees it."""


class ConcurrentStepError(XLAAdapterError, RuntimeError):
    """A step was opened while another thread is inside one, or edges of steps cross."""


class BreakKind(str, Enum):
    """What would have broken the one graph of a step."""

    TENSOR_READ = "tensor read"
    CHECKPOINT_SAVE = "checkpoint save"
    DEVICE_SYNC = "device sync"
    COLLECTIVE_READ = "collective read"
    PROFILER_SCOPE = "profiler scope"
    HIDDEN_EXECUTION = "hidden execution"


class GraphBreakError(XLAAdapterError, RuntimeError):
    """Something inside a step would have split its graph.

    Attributes:
        kind: what happened.
        filename, lineno: the line of the user's code that caused it (`None` if it has no such line).
    """

    kind: BreakKind = BreakKind.HIDDEN_EXECUTION

    def __init__(self, message: str, *, filename: str | None = None, lineno: int | None = None) -> None:
        super().__init__(message)
        self.filename = filename
        self.lineno = lineno


class TensorReadError(GraphBreakError):
    """A value was read on the host (`.item()`, `.cpu()`, `print`, `bool(t)`, numpy) inside a step."""

    kind = BreakKind.TENSOR_READ


class CheckpointSaveError(GraphBreakError):
    """Tensors were saved inside a step: the file would hold a half-done update."""

    kind = BreakKind.CHECKPOINT_SAVE


class DeviceSyncError(GraphBreakError):
    """The device was synchronised (`torch_xla.sync`, `mark_step`, `wait_device_ops`) inside a step."""

    kind = BreakKind.DEVICE_SYNC


class CollectiveReadError(GraphBreakError):
    """The result of a collective was read on the host inside a step."""

    kind = BreakKind.COLLECTIVE_READ


class ProfilerScopeError(GraphBreakError):
    """A profiler scope was opened or closed across the edge of a step."""

    kind = BreakKind.PROFILER_SCOPE


GRAPH_BREAK_ERRORS: dict[BreakKind, type[GraphBreakError]] = {
    cls.kind: cls
    for cls in (
        GraphBreakError,
        TensorReadError,
        CheckpointSaveError,
        DeviceSyncError,
        CollectiveReadError,
        ProfilerScopeError,
    )
}


class CheckpointError(XLAAdapterError):
    """Base of what can go wrong with checkpoints on a disk."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is nothing at the path that was asked for."""


class CheckpointDamagedError(CheckpointError, ValueError):
    """A checkpoint is not what was written; the message names the files and what is wrong with them."""


class CheckpointWriteError(CheckpointError, OSError):
    """A checkpoint could not be written; those that were there before still are."""


class StallError(XLAAdapterError, RuntimeError):
    """A step, a save or a barrier did not end before its deadline; the stacks of all threads were printed."""
