"""`Difference`: why two graphs of a step differ, in words; and the words for its remedies and places."""

from __future__ import annotations

import linecache
from dataclasses import dataclass
from typing import Any

from xla_adapters.tracing.operation_log import Call, ModuleCall, Update

TENSOR_REMEDY = (
    "make it a tensor in the step (torch.tensor(value, device=x.device)): its value is then an input of the graph"
)
SLICE_REMEDY = (
    "for a slice of fixed length n that moves, make its start a tensor: "
    "x[torch.tensor(start, device=x.device) + torch.arange(n, device=x.device)]"
)
KEPT_REMEDY = (
    "keep it the same in each step, or choose among a few values (one compile for each): {name} takes no tensor there"
)
REMEDY_OF_MODES = (
    "call model.train() before the training steps and model.eval() before the others, each in its own step"
)
PATH_REMEDY = (
    "a branch of Python that depends on the step makes a graph for each path: compute both and choose with "
    "torch.where, move it behind the step, or accept one compile for each"
)
SHAPE_REMEDY = (
    "give it the same shape in each step: pad batches to a fixed length or to a few lengths, and drop the partial last "
    "batch (drop_last)"
)
DTYPE_REMEDY = (
    "convert the data to one dtype in the dataset, before it is copied to the device: each dtype is a graph of its own"
)
FORM_REMEDY = "give it the same form in each step, or expect one compile for each"
VALUES_REMEDY = (
    "its length depends on values, and each length is a graph: compute all elements and leave some out by weights "
    "(torch.where(mask, losses, 0).sum() / mask.sum()), or by the ignore_index of a loss"
)
LENGTH_REMEDY = (
    "give it the same number in each step: a list that grows makes a graph for each length; keep a tensor of fixed "
    "size and write into it (memory[torch.tensor([place], device=x.device)] = value), or clear the list between steps"
)
HOOKS_REMEDY = "register hooks before the training, and keep them"
ORDER_REMEDY = "go through them in one order: a list, or sorted(...), and not a set"
ONE_DTYPE_REMEDY = "use one dtype: convert the model and the data before the training; each dtype is a graph of its own"
UPDATED_REMEDY = (
    "let the same parameters have gradients in each step; if the model was moved (model.to(...)) after the optimizer "
    "was made, its parameters are others now: make the optimizer again"
)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Why two graphs differ.

    Attributes:
        cause: what changed, with the values before and now.
        where: the line that does it now, with its text; empty if no single line does.
        remedy: what to do.
        is_harmless: whether nothing need be done, since it happens once or rarely.
    """

    cause: str
    where: str
    remedy: str
    is_harmless: bool = False

    def __str__(self) -> str:
        place = f"\n  where: {self.where}" if self.where else ""
        return f"{self.cause}{place}\n  what to do: {self.remedy}"


def name_of(entry: Call | ModuleCall | Update) -> str:
    """What was called, in words."""
    if isinstance(entry, Call):
        name = getattr(entry.function, "__name__", "a call")
        return {"__get__": "an attribute", "__getitem__": "indexing"}.get(name, name.strip("_"))
    return entry.kind.__name__


def line_of(entry: Call | ModuleCall | Update) -> str:
    """Where, with the text of the line."""
    text = linecache.getline(entry.file, entry.line).strip()
    return f"{entry.file}:{entry.line}" + (f": {text}" if text else "")


def autocast_of(call: ModuleCall) -> str:
    """The autocast that a module ran under, in words."""
    return f"under autocast to {dtype_of(call.autocast)}" if call.autocast is not None else "without autocast"


def dtype_of(dtype: Any) -> str:
    """The name of a dtype."""
    return str(dtype).removeprefix("torch.")
