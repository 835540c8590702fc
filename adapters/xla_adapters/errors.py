"""The exceptions and warnings of this package.

Everything it raises on purpose derives from `XLAAdapterError`. A class's docstring is its entry in
`docs/reference/errors.md`, and what `xla-adapters explain NAME` prints: what it means, and what to do.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import pickle
import sys
import sysconfig
import warnings
from collections.abc import Iterable
from enum import StrEnum
from itertools import chain
from traceback import walk_stack, walk_tb
from types import FrameType

# What tracing a user's model may raise; each means that the model cannot be traced in this way.
MODEL_FAILURES = (
    *(RuntimeError, TypeError, ValueError, AttributeError),
    *(LookupError, AssertionError, ArithmeticError, ImportError),
)


_OWN_PACKAGES = ("xla_adapters", "hf_trainer", "lightning_strategy")
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def hide_own_frames(error: BaseException) -> None:
    """Has IPython and pytest leave the frames of this package out of the traceback of an error of the user's code.

    A traceback through a Trainer has some ten of them. Both tools leave out frames with a local variable
    `__tracebackhide__`; JAX marks its frames in the same way.
    """
    _hide(chain(walk_tb(error.__traceback__), walk_stack(sys._getframe(1))), libraries=False)


def _hide(frames: Iterable[tuple[FrameType, int]], *, libraries: bool) -> None:
    for frame, _ in frames:
        code = frame.f_code
        hides = str(frame.f_globals.get("__name__")).partition(".")[0] in _OWN_PACKAGES
        hides = hides or (libraries and code.co_filename.startswith(_LIBRARIES))
        # The locals of a module or class are its attributes.
        if hides and code.co_flags & inspect.CO_OPTIMIZED:
            frame.f_locals["__tracebackhide__"] = True


class XLAAdapterError(Exception):
    """Base of every error raised by xla-adapters.

    What to do: catch it to catch all of them. The message says what happened, where in your code, and what to do. A
    note at the end of the traceback names the entry to read.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        named = next(cls for cls in type(self).__mro__ if cls.__module__ == __name__)
        # The message names the user's line.
        _hide(walk_stack(sys._getframe(1)), libraries=True)
        self.add_note(f"more: xla-adapters explain {named.__name__} (or docs/reference/errors.md)")


class ConfigError(XLAAdapterError, ValueError):
    """An option has a value that cannot work; the message lists what can.

    What to do: use one of the listed values. Options that contradict each other (`accumulation="unrolled"` with
    `step_replay=True`, for example) are reported here too: the message names both.
    """


class UnsupportedOptionError(ConfigError):
    """An option of the host framework cannot work on XLA; the message names the alternative.

    Examples are `fp16=True`, fused optimizers that were asked for explicitly, and the FSDP and DeepSpeed flags of
    `TrainingArguments`. It is raised when the trainer is constructed, before any training.

    What to do: use the alternative that the message names.
    """


_IN_A_NOTEBOOK = "In a notebook: restart the kernel, and run what must come first in its first cell"


class RuntimeOrderError(XLAAdapterError, RuntimeError):
    """The XLA runtime was started before something that must come first.

    The runtime reads its settings once, when it starts. Moving a tensor to the device starts it, and so does creating
    `transformers.TrainingArguments`.

    What to do: call `xla_adapters.initialize(...)` with the options you need as the first statement of the program. In
    a notebook restart the kernel, and make the call in the first cell.
    """

    def __init__(self, message: str) -> None:
        if "ipykernel" in sys.modules and _IN_A_NOTEBOOK not in message:
            message = f"{message.removesuffix('.')}. {_IN_A_NOTEBOOK}"
        super().__init__(message)


class GraphLimitError(XLAAdapterError, RuntimeError):
    """A step was about to compile more different graphs than `max_graphs` or `on_recompile="error"` allows.

    Each new combination of shapes, dtypes and Python values in a step is a graph of its own, and is compiled. The step
    was discarded: parameters and optimizer state are as before it.

    What to do: what the message says; or raise `max_graphs`, or choose `on_recompile="warn"`.
    """


class ReplayMismatchError(XLAAdapterError, RuntimeError):
    """A verification has shown that a step, traced again, differs from its replays, whose results may be wrong.

    The Python of the step depends on something that no guard compares.

    What to do: go back to the checkpoint that the message names. Then either make the value that changes a tensor on
    the device or an attribute (both are compared), or train with `step_replay=False`.
    `on_replay_mismatch="retrace"` warns instead and traces the step from then on.

    Attributes:
        difference: what differs, in words.
        trusted_steps: number of steps before the first whose result may be wrong.
        checkpoint: path of the newest checkpoint saved by then; None if there is none.
    """

    def __init__(self, step: str, difference: str, *, trusted_steps: int, steps: int, checkpoint: str | None) -> None:
        self.difference = difference
        self.trusted_steps = trusted_steps
        self.checkpoint = checkpoint
        where = f"go back to {checkpoint}" if checkpoint else "no checkpoint was saved before that"
        super().__init__(
            f"the step {step!r}, traced again, computes something else than its replay: {difference} differs. So its "
            f"Python depends on something that no guard sees. Steps {trusted_steps + 1} to {steps} of this run are not "
            f"trustworthy: {where}. step_replay=False traces each step; on_replay_mismatch='retrace' goes on, tracing"
        )


class LossError(XLAAdapterError, ValueError):
    """What a training step returned as its loss is not a tensor with one element; the message names the function.

    What to do: return one number, `loss.mean()` of a number per sample. A model of transformers computes its loss only
    if the batch has labels.
    """


class IndexRangeError(XLAAdapterError, IndexError):
    """An index from the batch (a token, a label) or its shape (a position) is out of the range of what it looks up.

    On the plain CPU this is an IndexError. XLA devices read another row instead. It is found on the host, where the
    batch's integers are known; the message names the entry of the batch, its value and what is allowed.

    What to do: correct the data, or resize what is looked up (`model.resize_token_embeddings(len(tokenizer))`, or the
    number of classes), or make sequences shorter. Padding of labels is -100.
    """


class HostTensorError(XLAAdapterError, RuntimeError):
    """A call inside a step takes a tensor on the host together with tensors on the device.

    What to do: move it (`tensor.to(device)`, `module.to(device)`), or make it there (`torch.zeros(3, device=x.device)`)
    at the line that the message names. A tensor that belongs to a module is moved with it as a buffer. Only tensors of
    no dimensions are numbers, which arithmetic takes from the host.
    """


class DeviceOutOfMemoryError(XLAAdapterError, RuntimeError):
    """The device has too little memory for the step; the step was discarded.

    Parameters and optimizer state are as before the step. Batch size finders of accelerate and Lightning recognise
    this error.

    What to do: use a smaller batch and accumulate gradients, checkpoint activations, or shard the model.
    """

    @classmethod
    def of_step(cls, name: str, hardware: str) -> DeviceOutOfMemoryError:
        """The error of a step, and of the hardware that ran out of memory."""
        # accelerate's find_executable_batch_size knows it by " out of memory." in its one argument, Lightning's
        # BatchSizeFinder by "CUDA" and "out of memory".
        return cls(
            f"the step {name!r}: {hardware} out of memory. The step was discarded; parameters "
            "are as before it. Make the batch smaller (and accumulate gradients), or checkpoint activations "
            "(what raises OutOfMemoryError on CUDA)"
        )


class RankError(XLAAdapterError, RuntimeError):
    """Processes that train together (ranks) no longer do the same, or one of them is gone.

    Each rank must take the same steps, with the same code, on batches of the same shape. The step was not launched:
    parameters and optimizer state are as before it. On the device the ranks would wait for each other forever.

    What to do: what the message says; it names what this rank does, and what the other one does, or the error that the
    other one has raised. Then start all ranks again, and resume from the newest checkpoint.
    """


class DiscardedTensorError(XLAAdapterError, RuntimeError):
    """A tensor was used that has no value: a discarded step made it, or code changed it that the step cannot record.

    A step that ends with an exception or Ctrl-C is undone. The tensors that it created are never computed.

    What to do: use what a step creates only after the step has ended normally.
    """


class FailedCheckError(XLAAdapterError, ValueError):
    """A check of a library (`if not ...: raise`) failed in a step; it was compared when values came to the host.

    The library checks what the step computes, for example that no predicted box is NaN. Reading it there would execute
    the step in two parts, so the step goes on, and the check is compared with the next values that the host gets.

    What to do: read the line that the message names. The weights are those after the step with the bad values: go on
    from a checkpoint before it.
    """


class PlaceholderError(XLAAdapterError, RuntimeError):
    """A step on TorchTPU used a tensor that cannot be traced (the message says why); the step was discarded.

    What to do: run forward and backward in one step; make views inside the step, or write to a `clone`.
    """


class ConcurrentStepError(XLAAdapterError, RuntimeError):
    """Another thread used the device while a step was open, or steps were left in another order than entered.

    What a step traces belongs to the whole process, so only one thread can be inside a step, and no other one may read
    a tensor on the device or compute with one meanwhile.

    What to do: run steps in one thread, or guard them and reads with a lock. Do not suspend a generator inside a step.
    """


class BreakKind(StrEnum):
    """The kinds of graph breaks: operations that would have split the single graph of a step."""

    TENSOR_READ = "tensor read"
    CHECKPOINT_SAVE = "checkpoint save"
    DEVICE_SYNC = "device sync"
    COLLECTIVE_READ = "collective read"
    PROFILER_SCOPE = "profiler scope"
    HOST_OPERATOR = "operator on the host"
    HIDDEN_EXECUTION = "hidden execution"


class GraphBreakError(XLAAdapterError, RuntimeError):
    """Something inside a step would have split its graph.

    Raised as itself, it means that an operation needed a value in the middle of the step, usually because the shape of
    its result depends on values (`nonzero`, boolean indexing). The subclasses name more specific causes. The step was
    discarded: parameters and optimizer state are as before it.

    What to do: use an operation whose result has a fixed shape (`torch.where`, `masked_fill`), or move the operation
    after the step. `on_graph_break="warn"` executes what is pending, goes on, and reports each line once.

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
    """A value was read on the host (`.item()`, `.cpu()`, `print`, `bool(t)`, numpy) inside a step.

    The value is not computed yet: reading it would execute half of the step and compile the rest as a second graph.

    What to do: read it after the step, or keep it on the device: `torch.where` instead of `if`, a tensor that
    accumulates instead of a Python sum. In a Trainer, use `on_step_end` or the log.
    """

    kind = BreakKind.TENSOR_READ


class CheckpointSaveError(GraphBreakError):
    """Tensors were saved inside a step: the file would hold a half-done update.

    What to do: save after the step.
    """

    kind = BreakKind.CHECKPOINT_SAVE


class DeviceSyncError(GraphBreakError):
    """The device was synchronised (`torch_xla.sync`, `mark_step`, `wait_device_ops`) inside a step.

    What to do: remove the call. The end of the step executes it.
    """

    kind = BreakKind.DEVICE_SYNC


class CollectiveReadError(GraphBreakError):
    """The result of a collective (`gather`, `mesh_reduce`) was read on the host inside a step.

    What to do: gather after the step.
    """

    kind = BreakKind.COLLECTIVE_READ


class ProfilerScopeError(GraphBreakError):
    """A profiler scope was opened or closed across the edge of a step.

    The step executes at its end, so the scope would measure the wrong time.

    What to do: open and close the scope inside the step, or open it before the step and close it after.
    """

    kind = BreakKind.PROFILER_SCOPE


class HostOperatorError(GraphBreakError):
    """An operator that the device has no kernel for (a Fourier transform, Cholesky) was called inside a step.

    torch_xla copies its inputs to the host, computes it there, and copies the result back. The message names it; one
    whose name ends with `_backward` is the backward of a call in the forward.

    What to do: compute it outside of the step (in the dataset, if it needs no weights), or with operators that the
    device has. `on_graph_break="warn"` executes the step in pieces.
    """

    kind = BreakKind.HOST_OPERATOR


GRAPH_BREAK_ERRORS: dict[BreakKind, type[GraphBreakError]] = {
    cls.kind: cls
    for cls in (
        GraphBreakError,
        TensorReadError,
        CheckpointSaveError,
        DeviceSyncError,
        CollectiveReadError,
        ProfilerScopeError,
        HostOperatorError,
    )
}


class SolverError(XLAAdapterError, RuntimeError):
    """The solver of the sharding planner failed; the message has its reason.

    What to do: choose a template (`sharding="fsdp"`, say), or give `auto_sharding` another `mesh_shape` or a larger
    `memory_budget`.
    """


class CheckpointError(XLAAdapterError):
    """Base of what can go wrong with checkpoints on a disk.

    Raised as itself, it carries a problem that has no class of its own; the message describes it.

    What to do: `xla-adapters checkpoint list DIR` and `verify DIR` show what is in a folder of checkpoints.
    """


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is nothing at the path that was asked for.

    What to do: check the path; `xla-adapters checkpoint list DIR` shows what is there.
    """


class CheckpointDamagedError(CheckpointError, ValueError):
    """A checkpoint is not what was written; the message names the files and what is wrong with them.

    A file is missing, was cut short, or has bytes that differ from the manifest.

    What to do: resume from another checkpoint. `resume_from_checkpoint=True` (HF) and `ckpt_path="last"` (Lightning)
    take the newest valid one. `xla-adapters checkpoint verify DIR` names the valid ones. If you have rewritten the
    files on purpose, say so by `CheckpointConfig(trust_files=True)`.
    """


class CheckpointUnsafeError(CheckpointError, pickle.UnpicklingError):
    """A file of a checkpoint names code that reading it would run; the file was refused, and nothing of it was run.

    Checkpoints are read as tensors and plain values: numbers, texts, lists, dicts, arrays of numpy, paths, dates.

    What to do: if you do not know who wrote the checkpoint, do not use it. If objects of a class of yours are in it,
    call `torch.serialization.add_safe_globals([TheClass])` before it is loaded; in Lightning `weights_only=False`, to
    `fit` or `fabric.load`, reads anything, and so runs whatever the file names.
    """


class CheckpointWriteError(CheckpointError, OSError):
    """A checkpoint could not be written; those that were there before still are.

    What to do: the message has the cause, usually a full disk or missing permissions. While a checkpoint is saved the
    disk needs room for one more than are kept. `xla-adapters checkpoint repair DIR` removes what was left over.
    """


class StallError(XLAAdapterError, RuntimeError):
    """A step, a save or a barrier did not end before its deadline; the stacks of all threads were printed.

    What to do: look at the printed stacks for what hangs. A compile counts as part of its step: if it is only slow,
    raise `stall_deadline` of the `CheckpointConfig`.
    """


class GraphBreakWarning(UserWarning):
    """A graph break that `on_graph_break="warn"` let pass, or that TRL's own code makes; reported once per line.

    What to do: as for `GraphBreakError` and its subclasses. `on_graph_break="allow"` silences it. A break that TRL
    makes costs an execution per step; nothing need be done.
    """


class EagerOptimizerWarning(UserWarning):
    """An optimizer that cannot be part of the step's graph runs eagerly: each of its operations is an execution.

    Training is correct but slower. A closure that is given to it, with forward and backward, runs eagerly as well.

    What to do: nothing, or use an optimizer that can be traced, such as `torch.optim.AdamW`.
    """


class IdleOptimizerWarning(UserWarning):
    """An optimizer updates nothing: none of its parameters has a gradient, but others have.

    Its parameters are probably no longer those of the model. A model that is moved from the device to the host gets new
    `Parameter` objects, and so does one that is moved to the device before `xla_adapters.initialize()`.

    What to do: create the optimizer after the last `model.to(...)`. Nothing, if the parameters get gradients later.
    """


class DenseGradientWarning(UserWarning):
    """An embedding with `sparse=True` has dense gradients, because XLA devices have no sparse tensors.

    What to do: nothing. `sparse=False` is the same there. `torch.optim.SparseAdam` takes sparse gradients only and is
    refused; `Adam` also moves the rows that a batch does not look up.
    """


@functools.cache
def warn_of_dense_gradients() -> None:
    """Gives a `DenseGradientWarning`, once in a process."""
    warnings.warn(
        "an embedding with sparse=True: its gradients are dense on XLA devices, which have no sparse tensors. SGD "
        "computes the same; sparse=False says what happens",
        DenseGradientWarning,
        stacklevel=2,
    )


class ReplayMismatchWarning(UserWarning):
    """A step that was traced again computes something else than its replays (`on_replay_mismatch="retrace"`).

    The step is traced from now on. The steps since the last verification may be wrong.

    What to do: as for `ReplayMismatchError`.
    """


class RandomAlgorithmWarning(UserWarning):
    """Random numbers are drawn with another algorithm than was asked for, or than in the run that is resumed.

    torch_xla reads the algorithm once in a process, when it first draws.

    What to do: create the trainer or strategy before anything draws random numbers on the device. To resume a run
    exactly, use its `rng_algorithm`.
    """


class CheckpointWarning(UserWarning):
    """A checkpoint was passed over; the message says which, and why.

    What to do: nothing, if an older checkpoint will do. `xla-adapters checkpoint verify DIR` shows what is wrong.
    """


class CheckpointMismatchWarning(UserWarning):
    """A run goes on from a checkpoint of other versions, settings or devices; the message is a diff.

    What to do: check that each difference is intended. With any of them the resumed run may differ from the run that
    was not interrupted.
    """


class LibraryVersionWarning(UserWarning):
    """A library is of a version that was not tested, or lacks a private name that is replaced; the message says which.

    What is replaced there has no effect: it costs more executions or transfers, or an option has no effect.

    What to do: install a version of the range that the message names. `pip install 'xla-adapters[EXTRA]'` chooses one.
    If your training does what it should, nothing.
    """


def explained() -> dict[str, type[Exception]]:
    """All exceptions and warnings of this file by name, in its order."""
    return {
        name: found
        for name, found in globals().items()
        if isinstance(found, type) and issubclass(found, (XLAAdapterError, UserWarning))
    }


def entry(name: str) -> str:
    """What a class means, and what to do, for the command `explain`.

    Args:
        name: of the class, in any case.

    Raises:
        ConfigError: there is no such class; the message lists those there are.
    """
    classes = explained()
    found = next((cls for known, cls in classes.items() if known.lower() == name.lower()), None)
    if found is None:
        near = difflib.get_close_matches(name.lower(), [known.lower() for known in classes], n=3)
        likely = [known for known in classes if known.lower() in near]
        listed = f"near: {', '.join(likely)}" if likely else f"there are: {', '.join(classes)}"
        raise ConfigError(
            f"there is no error or warning {name!r}; {listed}. The text of a message is in docs/reference/messages.md"
        )
    bases = ", ".join(base.__name__ for base in found.__bases__)
    return f"{found.__name__} ({bases})\n\n{meaning(found)}"


def meaning(cls: type[Exception]) -> str:
    """The docstring of a class, without its attributes."""
    return (inspect.getdoc(cls) or "").partition("\n\nAttributes:")[0]
