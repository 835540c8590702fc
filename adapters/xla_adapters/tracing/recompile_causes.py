"""`explain_difference`: why a call of a step has another graph than an earlier call."""

from __future__ import annotations

import linecache
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from xla_adapters.runtime import get_runtime
from xla_adapters.tracing.list_updates import LISTED
from xla_adapters.tracing.operation_log import Call, ModuleCall, OperationLog, UpdateCall
from xla_adapters.utils.location import argument_text, place_text

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
class RecompileCause:
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


def name_of(entry: Call | ModuleCall | UpdateCall) -> str:
    """What was called, in words."""
    if isinstance(entry, Call):
        name = getattr(entry.function, "__name__", "a call")
        return {"__get__": "an attribute", "__getitem__": "indexing"}.get(name, name.strip("_"))
    return entry.kind.__name__


def line_of(entry: Call | ModuleCall | UpdateCall) -> str:
    """Where, with the text of the line."""
    text = linecache.getline(entry.file, entry.line).strip()
    return place_text(f"{entry.file}:{entry.line}") + (f": {text}" if text else "")


def autocast_of(call: ModuleCall) -> str:
    """The autocast that a module ran under, in words."""
    return f"under autocast to {dtype_of(call.autocast)}" if call.autocast is not None else "without autocast"


def dtype_of(dtype: Any) -> str:
    """The name of a dtype."""
    return str(dtype).removeprefix("torch.")


# Python numbers with these values are constants of the graph; others are inputs where operators compute with them.
SPECIAL = (0, 1)
# Of single precision.
_LARGEST = 3.4e38
ARITHMETIC = frozenset(
    ("add", "radd", "iadd", "sub", "rsub", "isub", "mul", "rmul", "imul", "div", "truediv", "rtruediv", "itruediv")
)
# Where operators take a tensor in place of a number.
TAKES_TENSORS = ARITHMETIC | {"pow", "rpow", "ipow", "getitem", "where", "lerp", "fill", "clamp", "remainder"}
TAKES_TENSORS |= {"eq", "ne", "lt", "le", "gt", "ge"}
# "indexing" is how `getitem` is shown.
MAY_BE_INPUTS = TAKES_TENSORS - {"getitem"}
# What makes tensors of numbers: their values are inputs.
UPLOADS = frozenset(("tensor", "as_tensor", "scalar_tensor", "new_tensor", "asarray"))


def newly_equal(pairs: Sequence[tuple[Any, Any]]) -> RecompileCause | None:
    """Two numbers that are equal in one of the calls only: equal numbers share one input of the graph.

    They are compared as the device has them. 1 - n is compared, too: operators compute it of a momentum or a decay.
    """
    numbers = [pair for theirs, mine in pairs for pair in _numbers_of(theirs, mine)]
    first_old: dict[float, int] = {}
    first_new: dict[float, int] = {}
    for index, (old, new, shown, entry) in enumerate(numbers):
        was, equal = first_old.setdefault(old, index), first_new.setdefault(new, index)
        if was == equal or (old in SPECIAL) or (new in SPECIAL):
            continue
        _, _, other, there = numbers[equal if equal < index else was]
        text = f"{shown} in {name_of(entry)} and {other} in {name_of(there)} ({line_of(there)})"
        now = "equal now" if equal < index else "not equal any more"
        return RecompileCause(
            cause=f"{text} are {now}: equal Python numbers share one input of the graph",
            where=line_of(entry),
            remedy="nothing, if it happens once; numbers that often meet can be kept apart by making one of "
            "them a tensor (torch.tensor(value, device=x.device))",
            is_harmless=True,
        )
    return None


def _numbers_of(theirs: Any, mine: Any) -> Iterator[tuple[float, float, str, Call | UpdateCall]]:
    """The numbers of an entry that may be inputs of the graph: the old one and the new one in single precision."""
    if not isinstance(mine, (Call, UpdateCall)) or (isinstance(mine, UpdateCall) and mine.kind in LISTED):
        return
    kinds = (int, float) if isinstance(mine, Call) and name_of(mine) in MAY_BE_INPUTS else (float,)
    for old, new in zip(_scalars(theirs.numbers, kinds), _scalars(mine.numbers, kinds), strict=False):
        yield _single(old), _single(new), f"{new!r}", mine
        if old == new or isinstance(mine, UpdateCall):
            yield _single(1 - old), _single(1 - new), f"1 - {new!r}", mine


def _scalars(value: Any, kinds: tuple[type, ...]) -> Iterator[float]:
    if isinstance(value, tuple):
        for item in value:
            yield from _scalars(item, kinds)
    elif type(value) in kinds:
        yield value


def _single(number: float) -> float:
    single: float = struct.unpack("f", struct.pack("f", number))[0] if abs(number) < _LARGEST else number
    return single


Entry: TypeAlias = Call | ModuleCall | UpdateCall
# Their results' shapes depend on values.
_BY_VALUES = frozenset(
    (
        "indexing",
        "nonzero",
        "argwhere",
        "masked_select",
        "unique",
        "unique_consecutive",
        "bincount",
        "repeat_interleave",
    )
)


def explain_difference(before: OperationLog, now: OperationLog) -> RecompileCause | None:
    """The first thing that a step does differently; None if the calls of Python are the same.

    Args:
        before: of a call with another graph.
        now: of the call that compiled.
    """
    first = common_length(before, now)
    theirs, mine = _at(before, first), _at(now, first)
    if theirs is None and mine is None:
        # Gradients last: a step that drops them before its backward computes the same with and without.
        return _of_numbers(before.entries, now.entries) or _of_gradients(before.entries, now.entries)
    if isinstance(mine, ModuleCall) and isinstance(theirs, ModuleCall) and mine.kind is theirs.kind:
        return _of_module(theirs, mine)
    if isinstance(mine, UpdateCall) and isinstance(theirs, UpdateCall):
        return _of_update(theirs, mine)
    if isinstance(mine, Call) and isinstance(theirs, Call) and _same_place(theirs, mine):
        other_calls = _of_other_calls(before, now, mine) if theirs.numbers == mine.numbers else None
        return other_calls or _of_call(theirs, mine)
    return _of_total(theirs, mine) or _of_order(before, now, theirs, mine) or _of_path(theirs, mine)


def common_length(before: OperationLog, now: OperationLog) -> int:
    """How many entries at the beginning are the same, but for gradients and numbers that may be inputs of the graph."""
    for index, (theirs, mine) in enumerate(zip(before.entries, now.entries, strict=False)):
        if theirs != mine and not _may_be_equal(theirs, mine):
            return index
    return min(len(before.entries), len(now.entries))


def _may_be_equal(theirs: Any, mine: Any) -> bool:
    """Whether two different entries may give the same graph."""
    if isinstance(theirs, Call) and isinstance(mine, Call):
        same = _same_place(theirs, mine) and (theirs.form, theirs.inputs) == (mine.form, mine.inputs)
        return same and _kinds(theirs.numbers) == _kinds(mine.numbers)
    if isinstance(theirs, ModuleCall) and isinstance(mine, ModuleCall):
        return theirs._replace(present=mine.present) == mine
    # A missing state is made before the step computes, and learning rates are inputs.
    return isinstance(theirs, UpdateCall) and isinstance(mine, UpdateCall) and not _have_other_constants(theirs, mine)


def _kinds(numbers: Any) -> Any:
    """The arguments with a mark in place of each number: another number may be another value of the same input."""
    if isinstance(numbers, tuple):
        return tuple(map(_kinds, numbers))
    return "number" if type(numbers) in (int, float) else numbers


def _at(log: OperationLog, index: int) -> Entry | None:
    return log.entries[index] if index < len(log.entries) else None


def _same_place(theirs: Call, mine: Call) -> bool:
    return theirs[:3] == mine[:3]


def _of_other_calls(before: OperationLog, now: OperationLog, there: Call) -> RecompileCause | None:
    """If a line, say that of a library's update of averaged weights, calls other functions than before."""
    old, new = _functions_at(there, before), _functions_at(there, now)
    changes = [
        f"{' and '.join(sorted(names))} {when}" for names, when in ((new - old, "now"), (old - new, "before")) if names
    ]
    if not changes:
        return None
    cause = f"the step takes another path: the line calls {', and '.join(changes)}"
    return RecompileCause(cause=cause, where=line_of(there), remedy=PATH_REMEDY)


def _functions_at(there: Call, log: OperationLog) -> set[str]:
    place = there.file, there.line
    calls = [entry for entry in log.entries if isinstance(entry, Call) and entry.form is not None]
    return {name_of(call) for call in calls if (call.file, call.line) == place}


def _of_call(theirs: Call, mine: Call) -> RecompileCause:
    name = name_of(mine)
    if theirs.numbers != mine.numbers:
        before, now = _first_different(theirs.numbers, mine.numbers)
        kind = {str: "a string", bool: "a bool", torch.dtype: "a dtype"}.get(type(now), "a Python number")
        return _of_constant(kind, mine, before, now)
    return _of_form(name, theirs, mine) if theirs.form != mine.form else _of_inputs(name, theirs, mine)


def _of_inputs(name: str, theirs: Call, mine: Call) -> RecompileCause:
    changes = [item for item in enumerate(zip(theirs.inputs, mine.inputs, strict=False)) if item[1][0] != item[1][1]]
    index, (before, now) = changes[0] if changes else (0, (None, None))
    if before is None or now is None:
        return RecompileCause(cause=f"{name} gets other arguments", where=line_of(mine), remedy=FORM_REMEDY)
    text = argument_text(mine.file, mine.line, mine.function, index)
    which, place = f"{text}, which {name} gets," if text else f"a tensor that {name} gets", line_of(mine)
    if before[1] == now[1]:
        cause = f"{which} has another shape: {before[0]} -> {now[0]}"
        return RecompileCause(cause=cause, where=place, remedy=SHAPE_REMEDY)
    cause = f"{which} has another dtype: {dtype_of(before[1])} -> {dtype_of(now[1])}"
    return RecompileCause(cause=cause, where=place, remedy=DTYPE_REMEDY)


def _of_form(name: str, theirs: Call, mine: Call) -> RecompileCause:
    before, now = theirs.form, mine.form
    if before and now and len(before) == len(now) == 3 and isinstance(before[0], tuple) and isinstance(now[0], tuple):
        if before[0] != now[0]:
            by_values = name in _BY_VALUES and theirs.inputs == mine.inputs
            return RecompileCause(
                cause=f"the result of {name} has another shape: {before[0]} -> {now[0]}",
                where=line_of(mine),
                remedy=VALUES_REMEDY if by_values else SHAPE_REMEDY,
            )
        if before[1] != now[1]:
            return RecompileCause(
                cause=f"the result of {name} has another dtype: {dtype_of(before[1])} -> {dtype_of(now[1])}",
                where=line_of(mine),
                remedy="use the same dtype in each step: check the batch's, and that autocast is on in all or in none",
            )
        return RecompileCause(
            cause=f"the result of {name} {'needs' if now[2] else 'does not need'} a gradient now",
            where=line_of(mine),
            remedy="freeze parameters and choose between grad and no_grad before the training, or expect a compile",
        )
    return RecompileCause(
        cause=f"the result of {name} has another form: {before} -> {now}", where=line_of(mine), remedy=FORM_REMEDY
    )


def _of_constant(kind: str, call: Call, before: Any, now: Any) -> RecompileCause:
    name = name_of(call)
    if isinstance(before, tuple) and isinstance(now, tuple):
        cause = f"{name} gets {len(now)} values now; it got {len(before)}"
        return RecompileCause(cause=cause, where=line_of(call), remedy=LENGTH_REMEDY)
    may_be_tensor = type(now) in (int, float) and getattr(call.function, "__name__", "").strip("_") in TAKES_TENSORS
    if name == "indexing" and _is_slice(call.numbers):
        remedy = SLICE_REMEDY
    elif isinstance(now, torch.dtype):
        remedy = ONE_DTYPE_REMEDY
    else:
        remedy = TENSOR_REMEDY if may_be_tensor else KEPT_REMEDY.format(name=name)
    return RecompileCause(
        cause=f"{kind} that is a part of the graph changed, in {name}: {before!r} -> {now!r}",
        where=line_of(call),
        remedy=remedy,
    )


def _of_module(theirs: ModuleCall, mine: ModuleCall) -> RecompileCause:
    name, where = mine.kind.__name__, line_of(mine)
    if theirs.training != mine.training:
        modes = {True: "train", False: "eval"}
        cause = f"{name} is in {modes[mine.training]} mode now; it was in {modes[theirs.training]} mode"
        remedy = REMEDY_OF_MODES
    elif theirs.needed != mine.needed:
        frozen = sum(theirs.needed) > sum(mine.needed)
        cause = f"parameters of {name} are {'frozen' if frozen else 'trained'} now (requires_grad)"
        remedy = "one compile for each set of trained parameters cannot be avoided; change the set rarely"
    elif theirs.autocast != mine.autocast:
        cause = f"{name} runs {autocast_of(mine)} now; it ran {autocast_of(theirs)}"
        remedy = "use the same dtype in each step: autocast is on in all or in none"
    elif theirs.hooks != mine.hooks:
        cause = f"{name} has {mine.hooks} hooks now; it had {theirs.hooks}"
        remedy = HOOKS_REMEDY
    else:
        return _of_path(theirs, mine)
    return RecompileCause(cause=cause, where=where, remedy=remedy)


def _of_gradients(before: Sequence[Any], now: Sequence[Any]) -> RecompileCause | None:
    for theirs, mine in zip(before, now, strict=False):
        if isinstance(mine, ModuleCall) and theirs.present != mine.present:
            return _of_present(theirs, mine)
    return None


def _of_present(theirs: ModuleCall, mine: ModuleCall) -> RecompileCause:
    kind = "a" if sum(mine.present) > sum(theirs.present) else "no"
    return RecompileCause(
        cause=f"parameters of {name_of(mine)} have {kind} gradient now",
        where=line_of(mine),
        remedy="drop or keep gradients the same way in each step: zero_grad(set_to_none=True) at the same place, and "
        "no callback that sets them",
    )


def _of_update(theirs: UpdateCall, mine: UpdateCall) -> RecompileCause | None:
    name = mine.kind.__name__
    if theirs.kind is not mine.kind:
        cause = f"the optimizer is {name} now; it was {theirs.kind.__name__}"
    elif theirs.updated != mine.updated:
        now, before = len(mine.updated), len(theirs.updated)
        if now == before:
            new, old = min({*mine.updated} - {*theirs.updated}), min({*theirs.updated} - {*mine.updated})
            cause = (
                f"{name} updates other parameters now: number {new} of those it was given (counted from 0) has a "
                f"gradient now, and number {old} has none any more"
            )
        else:
            cause = f"{name} updates {now} parameters now; it updated {before}: the others have no gradient"
        return RecompileCause(cause=cause, where=line_of(mine), remedy=UPDATED_REMEDY)
    elif theirs.hooks != mine.hooks:
        cause = f"the step of {name} has {mine.hooks} hooks now; it had {theirs.hooks}"
        return RecompileCause(cause=cause, where=line_of(mine), remedy=HOOKS_REMEDY)
    elif theirs.options != mine.options:
        changed = (
            next(
                (f"{key}: {dict(old).get(key, 'absent')!r} -> {value!r}")
                for old, new in zip(theirs.options, mine.options, strict=False)
                for key, value in new
                if dict(old).get(key) != value
            )
            if len(theirs.options) == len(mine.options)
            else "another number of parameter groups"
        )
        cause = f"an option of {name} changed: {changed}"
    elif theirs.kind not in LISTED and theirs.rates != mine.rates and _meets_another(theirs) != _meets_another(mine):
        return RecompileCause(
            cause=f"the learning rate of {name} is another, {theirs.rates} -> {mine.rates}: it equals, or equalled, "
            "another number of the update (1 - beta, say), and equal numbers share one input of the graph",
            where=line_of(mine),
            remedy="nothing: a learning rate costs a compile only where it meets such a number",
            is_harmless=True,
        )
    else:
        # A state that is missing is made before the step computes.
        return None
    return RecompileCause(
        cause=cause,
        where=line_of(mine),
        remedy="make the optimizer once, with its options; a scheduler may change the learning rate",
    )


def _meets_another(update: UpdateCall) -> bool:
    """Whether a learning rate equals a constant, or a number that the update makes of another option."""
    rates = {rate for rate in update.rates if type(rate) in (int, float)}
    return not rates.isdisjoint({*SPECIAL, *(1 - number for number in update.numbers)})


def _of_total(theirs: Entry | None, mine: Entry | None) -> RecompileCause | None:
    """If a tensor was added to a Python number, and is added to a tensor now: the second step of a running total."""
    if not (isinstance(theirs, Call) and isinstance(mine, Call)) or theirs.line != mine.line:
        return None
    if [getattr(call.function, "__name__", "") for call in (theirs, mine)] != ["add", "add_"]:
        return None
    return RecompileCause(
        cause="what is added to is a tensor of an earlier step now; it was a Python number (a running total)",
        where=line_of(mine),
        remedy="let it begin as a tensor on the device, torch.zeros((), device=...); or accept one compile",
        is_harmless=True,
    )


def _of_order(
    before: OperationLog, now: OperationLog, theirs: Entry | None, mine: Entry | None
) -> RecompileCause | None:
    """If the step makes the same calls in another order."""
    if theirs is None or mine is None or len(before.entries) != len(now.entries):
        return None
    calls = [Counter((name_of(entry), entry.file, entry.line) for entry in log.entries) for log in (before, now)]
    if calls[0] != calls[1]:
        return None
    cause = f"the step makes the same calls in another order: it comes to {name_of(mine)}, where it came to "
    return RecompileCause(cause=cause + name_of(theirs), where=line_of(mine), remedy=ORDER_REMEDY)


def _of_path(theirs: Entry | None, mine: Entry | None) -> RecompileCause:
    there = mine or theirs
    assert there is not None
    was = f"{name_of(theirs)} at {line_of(theirs)}" if theirs is not None else "the end of the step"
    now = name_of(mine) if mine is not None else "the end of the step"
    return RecompileCause(
        cause=f"the step takes another path: it comes to {now}, where it came to {was}",
        where=line_of(there),
        remedy=PATH_REMEDY,
    )


def _of_numbers(before: Sequence[Any], now: Sequence[Any]) -> RecompileCause | None:
    """Where only numbers differ, that which is most likely a part of the graph."""
    pairs = list(zip(before, now, strict=False))
    changed = [
        (mine, *_first_different(theirs.numbers, mine.numbers))
        for theirs, mine in pairs
        if isinstance(mine, Call) and theirs.numbers != mine.numbers
    ]
    updates = [(theirs, mine) for theirs, mine in pairs if isinstance(mine, UpdateCall)]
    if get_runtime().has_placeholders:
        # Only the numbers of updates are inputs there, and those that the step copies to the device.
        likely = [item for item in changed if name_of(item[0]) not in UPLOADS]
    else:
        special = [item for item in changed if (item[1] in SPECIAL) != (item[2] in SPECIAL)]
        special += [item for item in changed if name_of(item[0]) not in MAY_BE_INPUTS]
        shared = newly_equal(pairs) if not special else None
        if shared is not None:
            return shared
        likely = special or [item for item in changed if name_of(item[0]) not in ARITHMETIC]
    for mine, old, new in likely:
        return _of_constant("a Python number", mine, old, new)
    found = (_of_update(theirs, mine) for theirs, mine in updates)
    return next((difference for difference in found if difference is not None), None)


def _have_other_constants(theirs: UpdateCall, mine: UpdateCall) -> bool:
    """Whether more than numbers that may be inputs of the graph changed: the optimizer, a switch, a decay that is 0."""
    if theirs.kind is not mine.kind or theirs.updated != mine.updated:
        return True
    values = [tuple(tuple(value for _, value in group) for group in update.options) for update in (theirs, mine)]
    return bool(_constants(values[0]) != _constants(values[1]))


def _constants(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_constants, value))
    return "number" if type(value) is float and value not in SPECIAL else value


def _is_slice(numbers: Any) -> bool:
    return isinstance(numbers, tuple) and (numbers[:1] == ("slice",) or any(map(_is_slice, numbers)))


def _first_different(before: Any, now: Any) -> tuple[Any, Any]:
    if isinstance(before, tuple) and isinstance(now, tuple) and len(before) == len(now):
        for old, new in zip(before, now, strict=True):
            if old != new:
                return _first_different(old, new)
    return before, now
