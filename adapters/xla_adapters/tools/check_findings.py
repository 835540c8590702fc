"""`findings`: what is worth changing in a checked script, from what was seen of its first steps, and what to do."""

from __future__ import annotations

import linecache
import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field

from xla_adapters.tools.check_facts import Compile, Facts, LoaderFacts, Place, Told
from xla_adapters.tracing.remedies import remedy_of

# A smaller share of padding is not worth a change.
_PADDING = 0.25
# Warnings that are about a graph break.
_BREAKS = "GraphBreakWarning"
# In the text of a cause.
_TO_DO = "what to do: "
# Shapes of the batch, before and now.
_FORMS = re.compile(r"\) \w+ -> \(")
_OF_ROWS = re.compile(r".*: \((\d+),([^)]*)\) \w+ -> \((\d+),([^)]*)\) \w+")
_NUMBER = re.compile(r"-?\d[\d.e+-]*")
_LOADER = re.compile(r"(?:[\w.]+ = |return )(?:[\w.]+\.)?DataLoader\((?:(?!DataLoader\().)*\)")

# A name with attributes, indices and calls: `outputs.loss`, `losses[0]`, `loss.mean()`.
_OPERAND = r"[A-Za-z_][\w.]*(?:\[[^][]*\]|\([^()]*\)|\.[A-Za-z_]\w*)*?"
_READS = re.compile(rf"({_OPERAND})(?:\.detach\(\))?(?:\.cpu\(\))?\.(?:item|tolist|numpy)\(\)")
_NUMBERS = re.compile(rf"\b(?:float|int)\(({_OPERAND}(?:\(\))?)\)")
_TO_HOST = re.compile(rf"({_OPERAND})(?:\.detach\(\))?\.(?:cpu\(\)|to\((?:\"cpu\"|'cpu')\))")
_SYNCS = re.compile(r"^[\w.]*(?:mark_step|sync|wait_device_ops)\(.*\)$")
# What is done with a number that a tensor cannot take part in without a read.
_ON_HOST = re.compile(
    r"\b(?:round|math\.\w+|range|str|isinstance|format|np\.\w+)\(|\bf[\"']|\.format\(| [<>]=? | [!=]= "
)
_INDEX = re.compile(r"\[[^]]*(?:\.item\(\)|\bint\()")
_WIDE = ((re.compile(r"\.double\(\)"), ".float()"), (re.compile(r"\bfloat64\b"), "float32"))
_HALF = ((re.compile(r"\.half\(\)"), ".bfloat16()"), (re.compile(r"\bfloat16\b"), "bfloat16"))


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that a check found.

    Attributes:
        kind: in few words, `graph break`, say.
        title: what it is, in one line.
        is_problem: whether it should be changed; others are only told.
        place: the line of the user's code; empty if it has none.
        details: further lines: what it costs, why.
        to_do: what to do.
        patch: lines to remove (`-`) and to add (`+`); empty if no change is known that keeps the meaning.
    """

    kind: str
    title: str
    is_problem: bool = True
    place: Place = field(default_factory=Place)
    details: str = ""
    to_do: str = ""
    patch: str = ""

    @property
    def source(self) -> str:
        """The text of the line."""
        return source_of(self.place)


def findings(facts: Facts) -> list[Finding]:
    """All findings; what should be changed comes first."""
    found = [
        *_error(facts),
        *_told(facts),
        *_host_operators(facts),
        *_recompiles(facts),
        *_batches(facts),
        *_dtypes(facts),
        *_not_replayed(facts),
        *_eager_operations(facts),
    ]
    return sorted(found, key=lambda finding: not finding.is_problem)


def _error(facts: Facts) -> Iterator[Finding]:
    if facts.state == "refused":
        first, _, rest = facts.error.partition("\n")
        yield Finding(
            kind="refused",
            title=first,
            place=facts.error_place,
            details=rest,
            to_do="what the message says; what follows in the script was not checked",
        )


def _told(facts: Facts) -> Iterator[Finding]:
    for told in facts.told:
        if told.category != _BREAKS:
            first, _, rest = told.message.partition("\n")
            yield Finding(kind=told.category, title=first, is_problem=False, place=told.place, details=rest)
        elif told.place.line or not facts.host_operators:
            yield _graph_break(told)


def _graph_break(told: Told) -> Finding:
    first, _, rest = told.message.partition("\n")
    kind, _, what = first.partition(" inside the step ")
    cost = next((line.strip() for line in rest.splitlines() if line.strip().startswith("cost:")), "")
    ways = next((line.strip() for line in rest.splitlines() if line.strip().startswith("remedies:")), "")
    to_do, patch = ways.removeprefix("remedies: ").removeprefix("(1) ").partition("; (2)")[0], ""
    if kind in ("tensor read", "device sync"):
        better, patch = read_remedy(source_of(told.place))
        to_do = better or to_do
    return Finding(
        kind="graph break",
        title=f"{kind}: {what.partition(': ')[2]}" if what else first,
        place=told.place,
        details=cost,
        to_do=to_do,
        patch=patch,
    )


def _host_operators(facts: Facts) -> Iterator[Finding]:
    for item in facts.host_operators:
        names = ", ".join(item.names)
        is_backward = "backward" in source_of(item.place)
        yield Finding(
            kind="host operator",
            title=f"{names} computed on the host, {_times(item.calls)}"
            + (" (in the backward of a call of your forward)" if is_backward else ""),
            place=item.place,
            details="the device has no kernel for it: the step stops there, copies the inputs to the host and the "
            "result back, in each step",
            to_do=remedy_of(item.names)
            or "compute it in the dataset if it needs no weights, or with operators that the device has",
        )


def _recompiles(facts: Facts) -> Iterator[Finding]:
    alike: dict[tuple[str, str], list[Compile]] = {}
    for compiled in facts.compiles:
        if not compiled.is_first and not any(_is_last_batch(compiled, loader, facts) for loader in facts.loaders):
            cause = _NUMBER.sub("#", compiled.reason.partition("\n")[0])
            alike.setdefault((compiled.step, cause), []).append(compiled)
    for (name, _), compiles in alike.items():
        step, last = facts.steps[name], compiles[-1]
        reason, *rest = last.reason.splitlines()
        lines = [line.strip() for line in rest]
        details = [line for line in lines if not line.startswith(("where:", _TO_DO))]
        place = Place.named_in(last.reason)
        # A step that is executed in parts has other graphs in its second call than in its first. What it called does
        # not tell why: then the first difference lies in a library, in an update, or has no line.
        in_library = not place.line or "site-packages" in place.file or ".step(" in source_of(place)
        is_split = step.usual_executions > 1 and last.call <= 3 and in_library and not _FORMS.search(reason)
        if is_split:
            details.append("the graph breaks above split this step: without them it may well be one graph")
        calls = ", ".join(str(compiled.call) for compiled in compiles)
        seconds = sum(compiled.seconds for compiled in compiles)
        yield Finding(
            kind="recompile",
            title=f"call {calls} of {name} compiled another graph, {seconds:.1f} s in all: {reason}",
            is_problem=bool(step.updates) and not is_split,
            place=place,
            details="\n".join(details),
            to_do=next((line.removeprefix(_TO_DO) for line in lines if line.startswith(_TO_DO)), ""),
        )


def _is_last_batch(compiled: Compile, loader: LoaderFacts, facts: Facts) -> bool:
    """Whether a compile is that of the smaller batch at the end of an epoch, which is a finding of its own."""
    if loader.last is None or loader.trains != bool(facts.steps[compiled.step].updates):
        return False
    changes = [_OF_ROWS.fullmatch(part) for part in compiled.reason.partition("\n")[0].split("; ")]
    rows = str(loader.batch), str(loader.last)
    return all(found and found.group(1, 3) == rows and found[2] == found[4] for found in changes)


def _batches(facts: Facts) -> Iterator[Finding]:
    seen: list[tuple[Place, int, int | None, bool]] = []
    for loader in facts.loaders:
        what = "training" if loader.trains else "other"
        key = loader.place, loader.batch, loader.last, loader.trains
        # Trainers make a loader for each evaluation.
        if loader.last is not None and key not in seen:
            seen.append(key)
            compiles = [compiled for compiled in facts.compiles if _is_last_batch(compiled, loader, facts)]
            line = source_of(loader.place)
            patch = ""
            if _LOADER.fullmatch(line):
                patch = f"-{line}\n+{line[:-1]}, drop_last=True)"
            yield Finding(
                kind="last batch",
                title=f"the last batch of an epoch has {loader.last} samples, the others {loader.batch}: it compiles "
                f"a graph of its own ({what} batches)",
                is_problem=loader.trains,
                place=loader.place,
                details="\n".join(
                    f"call {one.call} of {one.step} compiled it, {one.seconds:.1f} s" for one in compiles
                ),
                to_do="drop it: drop_last=True in the DataLoader (TrainingArguments: dataloader_drop_last=True); or "
                "fill it up with samples that the loss ignores",
                patch=patch,
            )
        if loader.padding:
            share = loader.padding / loader.tokens
            yield Finding(
                kind="padding",
                title=f"{share:.0%} of the tokens in {loader.batches} {what} batches are padding "
                f"(by {loader.known_by})",
                is_problem=share > _PADDING and loader.trains,
                place=loader.place,
                details="the device computes them like the others" if share > _PADDING else "",
                to_do="sort or group samples by length and pad to a few lengths (pad_to_multiple_of), or pack several "
                "samples into a row"
                if share > _PADDING
                else "",
            )


def _dtypes(facts: Facts) -> Iterator[Finding]:
    for use in facts.dtypes:
        times = f" and {use.count - 1} results after it" if use.count > 1 and use.place.line else ""
        what = {
            "float64": "a TPU has no float64 units: it is many times as slow",
            "float16": "a TPU computes in bfloat16; float16 overflows at 65504 and needs loss scaling",
        }.get(use.dtype, "a TPU computes few operators of complex numbers")
        to_do, patch = dtype_remedy(use.dtype, source_of(use.place))
        yield Finding(
            kind="on a TPU",
            title=f"{use.dtype} in {use.what}{times}: {what}",
            place=use.place,
            to_do=to_do,
            patch=patch,
        )


def _not_replayed(facts: Facts) -> Iterator[Finding]:
    for name, step in facts.steps.items():
        if not step.updates:
            continue
        if not step.may_replay and step.is_managed:
            yield Finding(
                kind="traced",
                title=f"{name}: traced at each call, as all steps of Fabric and those under step_replay=False",
                is_problem=False,
            )
        elif not step.may_replay:
            yield Finding(
                kind="traced",
                title=f"{name}: traced at each call, as the body of `with step()` must run",
                is_problem=False,
                to_do="make the step a function and decorate it with xla_adapters.CompiledStep: then it is replayed "
                "without its Python",
            )
        elif not step.replays:
            for reason in step.reasons or {"two calls alike were not seen yet": 1}:
                yield Finding(
                    kind="traced",
                    title=f"{name}: traced at each call, not replayed: {reason.splitlines()[0]}",
                    is_problem=False,
                    place=Place.named_in(reason),
                    details="\n".join(reason.splitlines()[1:]),
                )


def _eager_operations(facts: Facts) -> Iterator[Finding]:
    for name, step in facts.steps.items():
        usual = statistics.median(step.eager_operations) if step.eager_operations else 0
        if step.updates and usual >= 1:
            yield Finding(
                kind="eager operations",
                title=f"{usual:.0f} operations between two calls of {name} are executed one by one",
                is_problem=False,
                to_do="if they are part of each step (a metric, a running mean), move them into the step",
            )


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


# ---- a change of the line itself, where one keeps the program's meaning ---------------------------------


def source_of(place: Place) -> str:
    """The text of a line, without its indentation; empty if it cannot be read."""
    return linecache.getline(place.file, place.line).strip() if place.line else ""


def read_remedy(line: str) -> tuple[str, str]:
    """What to do about a line that reads a tensor in a step.

    Args:
        line: of the source, stripped.

    Returns:
        What to do, and a patch; empty where that is not known, or the line cannot be changed by itself.
    """
    if line.startswith("print(") or re.match(r"(?:logg\w+|log)\.\w+\(", line):
        return "move the line behind the step, where the value may be read", f"-{line}"
    if line.startswith("assert "):
        return "leave the check out of the step, or make it behind the step", f"-{line}"
    if re.match(r"(?:if|elif|while)\b", line):
        return (
            "compute both sides and choose with torch.where(condition, a, b), or decide by something that the host "
            "knows without the device",
            "",
        )
    if _SYNCS.match(line):
        return "leave it out: the end of the step executes the graph", f"-{line}"
    if _INDEX.search(line):
        return "keep the shape: choose with torch.where and a mask, or use a bound that the host knows", ""
    if smaller := re.search(r"(?<![\w.])(min|max)\(", line):
        name = f"torch.{smaller[1]}imum"
        return f"keep both on the device, and choose with {name}(a, b.detach()); read the result behind the step", ""
    if _ON_HOST.search(line):
        return "compute it behind the step, where the value may be read", ""
    for pattern in (_READS, _NUMBERS, _TO_HOST):
        changed = pattern.sub(r"\1.detach()", line).replace(".detach().detach()", ".detach()")
        if changed != line:
            changed = changed.replace(".cpu()", "")
            return "keep it as a tensor on the device, and read it behind the step", f"-{line}\n+{changed}"
    return "", ""


def dtype_remedy(dtype: str, line: str) -> tuple[str, str]:
    """What to do about a line that makes a tensor of a dtype that other devices compute slowly, or not at all."""
    if dtype.startswith("complex"):
        return "compute with real and imaginary parts as two real tensors", ""
    changes, instead = (_WIDE, "float32") if dtype == "float64" else (_HALF, "bfloat16")
    changed = line
    for pattern, replacement in changes:
        changed = pattern.sub(replacement, changed)
    return f"use {instead}", f"-{line}\n+{changed}" if changed != line else ""
