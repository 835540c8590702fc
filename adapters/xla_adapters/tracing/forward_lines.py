"""The line of the forward for what torch_xla cannot compute in the graph: in the backward, or at a line not known."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

import torch

from xla_adapters.errors import MODEL_FAILURES
from xla_adapters.tracing.operation_log import Call, OperationLog
from xla_adapters.tracing.step_mode import StepMode
from xla_adapters.utils.location import Location, is_plumbing, location_of_line

# The frame in which torch's Python calls the autograd engine.
ENGINE = "_engine_run_backward"
# Parts of an operator's name that say nothing of which one it is.
_GENERIC = frozenset(("", "aten", "backward", "forward", "out", "ex", "input", "with", "to", "torch", "special"))


def failed_call(
    traceback: TracebackType | None,
    operations: OperationLog,
    names: Sequence[str],
    is_refused: Callable[[BaseException], bool],
) -> Call | None:
    """The call of the forward whose backward was refused; None if that is not known, or it was no backward.

    The graph of autograd is still there: its nodes are called once more with zeros, in the engine's order, until one
    is refused again. The step is discarded anyway, and only a step that fails pays for this.

    Args:
        traceback: of the error.
        operations: what the step called.
        names: of the operators that were computed on the host: nodes that are called alike are tried first.
        is_refused: whether an error is the runtime's for an execution that it refuses.
    """
    roots = _roots(traceback)
    nodes = sorted(_nodes(roots), key=_number, reverse=True)
    alike = [node for node in nodes if _shared(node.name(), names)]
    for node in (*alike, *nodes):
        if _refuses(node, is_refused):
            return operations.maker(_number(node))
    return None


def refused_function(traceback: TracebackType | None) -> str:
    """The name of torch's function that the step called and that was refused; empty if it was no such call."""
    name = ""
    while traceback is not None:
        frame = traceback.tb_frame
        if frame.f_code is StepMode.__torch_function__.__code__:
            name = getattr(frame.f_locals["func"], "__name__", "").strip("_")
        traceback = traceback.tb_next
    return name


def line_by_name(operations: OperationLog, names: Sequence[str]) -> Location | None:
    """The only line of the step that calls a function which is named as these operators are; None if there is none.

    Args:
        operations: what the step called.
        names: of torch's operators, e.g. `"_fft_r2c"`.
    """
    calls = [entry for entry in operations.entries if isinstance(entry, Call)]
    alike = [_shared(getattr(call.function, "__name__", ""), names) for call in calls]
    most = max(alike, default=0)
    lines = {(call.file, call.line) for call, shared in zip(calls, alike, strict=True) if most and shared == most}
    return location_of_line(*lines.pop()) if len(lines) == 1 else None


def _roots(traceback: TracebackType | None) -> list[Any]:
    """The nodes from which the engine was started that raised; none if Python code raised that it called."""
    roots: list[Any] = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if code.co_name == ENGINE:
            outputs = traceback.tb_frame.f_locals["t_outputs"]
            roots = [output.grad_fn if isinstance(output, torch.Tensor) else output.node for output in outputs]
        elif roots and not is_plumbing(code.co_filename):
            roots = []
        traceback = traceback.tb_next
    return roots


def _nodes(roots: Sequence[Any]) -> Iterator[Any]:
    """Nodes of torch's own operators that can be reached; calling others would run the user's Python, or accumulate."""
    seen: set[Any] = set()
    waiting = [root for root in roots if root is not None]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        waiting += [following for following, _ in node.next_functions if following is not None]
        is_python = isinstance(node, torch.autograd.function.BackwardCFunction)
        if not is_python and node.name() != "torch::autograd::AccumulateGrad":
            yield node


def _number(node: Any) -> int:
    """When the node was made. The engine takes those that were made last first."""
    number: int = node._sequence_nr()
    return number


def _refuses(node: Any, is_refused: Callable[[BaseException], bool]) -> bool:
    gradients = [torch.zeros(tuple(item.shape), dtype=item.dtype, device=item.device) for item in node._input_metadata]
    try:
        node(*gradients)
    except MODEL_FAILURES as error:
        # Others are of nodes that have run, whose saved tensors are gone.
        return is_refused(error)
    return False


def _shared(name: str, operators: Sequence[str]) -> int:
    """How many parts a name has in common with that of an operator, at most."""
    parts = _parts(name)
    return max((len(parts & _parts(operator)) for operator in operators), default=0)


def _parts(name: str) -> set[str]:
    """The words in a name: `FftR2CBackward0`, `fft_rfft` and `_fft_c2r` have "fft" in common."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().rstrip("0123456789")
    return set(re.split(r"[_.:]+", words)) - _GENERIC
