"""`measure` runs one sample inside a step, forward and backward, and compares it with the CPU.

A `Row` has what the samples of an operator showed; `rows` runs many operators in forked children.
"""

from __future__ import annotations

import functools
import pickle
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch_xla.debug.metrics as xla_metrics
from torch.utils._pytree import tree_leaves, tree_map

import xla_adapters
from benchmarks import report
from benchmarks.operators.cases import Case, Sample, copied, differentiable, placed, sources, without_values
from tests.children import run_in_child

# From the best to the worst.
How = Literal["in the graph", "by decomposition", "on the host", "fails"]
ORDER: tuple[How, ...] = ("in the graph", "by decomposition", "on the host", "fails")
LIMIT = 1e-5
_KERNEL = "xla::"
_LONGEST_REASON = 160


@dataclass
class Found:
    """What a sample showed.

    Attributes:
        source: where it is from.
        forward, backward: how they run; None for what the sample does not have, or what was not reached. For an
            operator of the backward, `backward` is how the operator runs.
        why: what was refused or failed, or what differs, if anything did.
        difference: the largest to the CPU, of values above 1 relative to them; None if there is none to tell.
        kernels: torch_xla's that ran in place of the operator's own.
    """

    source: str
    forward: How | None = None
    backward: How | None = None
    why: str | None = None
    difference: float | None = None
    kernels: tuple[str, ...] = ()


@dataclass
class _Run:
    """A sample that has run: results, arguments after the call, gradients, and the kernels of both directions."""

    results: Any = None
    arguments: Any = None
    gradients: Any = ()
    forward: dict[str, int] | None = None
    backward: dict[str, int] | None = None
    phase: Literal["forward", "backward", "end"] = "forward"


def measure(operator: str, case: Case) -> Found:
    """Runs a sample on the CPU, and inside a step under `on_graph_break="error"`."""
    source = sources()[case.source]
    samples = source.samples()
    sample = next(one for index, one in enumerate(samples) if index == case.sample)
    return measure_sample(operator, case, sample, source.name)


def measure_sample(operator: str, case: Case, sample: Sample, name: str) -> Found:
    """As `measure`, of a sample that is there."""
    found = Found(name)
    plain, ours = _Run(), _Run()
    before = tree_map(copied, (sample.args, sample.kwargs))
    _compute(plain, Sample(sample.call, *tree_map(copied, before)), case, dict)
    inputs = tree_map(functools.partial(placed, device=torch.device("xla")), before)
    on_host: dict[str, int] = {}
    try:
        with xla_adapters.count() as counters:
            start = _counted()
            with xla_adapters.step(on_graph_break="error"):
                _compute(ours, Sample(sample.call, *tree_map(_pending, inputs)), case, _counted)
            on_host = {name: times for name, times in _since(start).items() if name.startswith("aten::")}
        values = without_values(operator) is None
        difference, what = _compare(ours, plain, values=values)
        if what is not None and values:
            difference, what = _compare(ours, plain, _in_doubles(sample, before, case), values=True)
    except xla_adapters.GraphBreakError as error:
        return _ended(found, ours, "on the host", error)
    except Exception as error:  # noqa: BLE001 (whatever it is, the operator fails)
        return _ended(found, ours, "fails", error)
    if on_host or counters.executions > 1:
        found.forward = "on the host"
        found.why = f"{counters.executions} executions, on the host: {', '.join(sorted(on_host)) or 'a read'}"
        return found
    _classify(found, operator, case, ours)
    found.difference, found.why = difference, what
    return found


def _compute(run: _Run, sample: Sample, case: Case, count: Callable[[], dict[str, int]]) -> None:
    start = count()
    run.arguments = (sample.args, sample.kwargs)
    run.results = sample.call(*sample.args, **sample.kwargs)
    run.forward = {name: times for name, times in count().items() if times > start.get(name, 0)}
    if case.differentiates:
        run.phase, middle = "backward", count()
        results, inputs = differentiable(run.results), differentiable(run.arguments)
        weights = [_weights_of(one) for one in results]
        run.gradients = torch.autograd.grad(results, inputs, weights, allow_unused=True)
        run.backward = {name: times for name, times in count().items() if times > middle.get(name, 0)}
    run.phase = "end"


def _in_doubles(sample: Sample, before: Any, case: Case) -> _Run | None:
    """The sample on the CPU with numbers of twice the precision; None where the operator does not take them."""
    run = _Run()
    try:
        _compute(run, Sample(sample.call, *tree_map(_doubled, before)), case, dict)
    except (RuntimeError, TypeError):
        return None
    return run


def _doubled(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.dtype is not torch.float32:
        return copied(value)
    return value.detach().double().requires_grad_(value.requires_grad)


def _weights_of(result: torch.Tensor) -> torch.Tensor:
    """The gradient that arrives: some numbers, the same on each device."""
    generator = torch.Generator().manual_seed(1)
    narrow = torch.complex64 if result.is_complex() else torch.float32
    return torch.randn(result.shape, generator=generator, dtype=narrow).to(result.device, result.dtype)


def _pending(value: Any) -> Any:
    """A tensor that is yet to be computed, as the inputs of an operator in a step are."""
    if not isinstance(value, torch.Tensor):
        return value
    with torch.no_grad():
        computed = torch.logical_or(value, value) if value.dtype is torch.bool else value * 1
    return computed.requires_grad_(value.requires_grad)


def _counted() -> dict[str, int]:
    names = (name for name in xla_metrics.counter_names() if name.startswith((_KERNEL, "aten::")))
    return {name: int(xla_metrics.counter_value(name) or 0) for name in names}


def _since(start: dict[str, int]) -> dict[str, int]:
    return {name: times for name, times in _counted().items() if times > start.get(name, 0)}


def _ended(found: Found, run: _Run, how: How, error: Exception) -> Found:
    """The sample came to an end in one of its phases."""
    if run.phase == "backward":
        found.forward, found.backward = "in the graph", how
    else:
        found.forward = how
    lines = str(error).strip().splitlines() or [""]
    line = re.sub(r"/\S*/(site-packages/|(?=benchmarks/))", "", lines[0].rstrip(".:"))
    line = line.removeprefix("step: ")
    found.why = f"{type(error).__name__}: {line}"[:_LONGEST_REASON]
    return found


def _classify(found: Found, operator: str, case: Case, run: _Run) -> None:
    """Tells torch_xla's kernel for an operator from others that stand for it."""
    there = run.backward if case.in_backward else run.forward
    kernels = {name.removeprefix(_KERNEL) for name in there or ()}
    # In place, of a view under functionalization, for any backend, or into a result; each also with symbolic sizes.
    own = {operator + suffix for suffix in ("", "_", "_copy", "_overrideable", "_out")}
    own |= {f"{name}_symint" for name in own}
    how: How = "in the graph" if kernels & own else "by decomposition"
    if how == "by decomposition":
        found.kernels = tuple(sorted(kernels))
    found.forward = "in the graph" if case.in_backward else how
    if case.differentiates:
        found.backward = how if case.in_backward else "in the graph"


def _compare(ours: _Run, plain: _Run, exact: _Run | None = None, *, values: bool) -> tuple[float | None, str | None]:
    """The largest difference, and what differs if that is too much.

    Args:
        ours: in a step.
        plain: on the CPU.
        exact: on the CPU in float64. Numbers may be as far from these as the CPU's in float32 are.
        values: whether to compare them.
    """
    parts = (
        ("result", ours.results, plain.results, exact and exact.results),
        ("argument", ours.arguments, plain.arguments, exact and exact.arguments),
        ("gradient", ours.gradients, plain.gradients, exact and exact.gradients),
    )
    largest, what = 0.0, None
    for name, here, there, precisely in parts:
        one, other = tree_leaves(here), tree_leaves(there)
        third = [None] * len(other) if precisely is None else tree_leaves(precisely)
        if len(one) != len(other):
            return float("inf"), f"{len(one)} {name}s in place of {len(other)}"
        for number, (mine, wanted, precise) in enumerate(zip(one, other, third, strict=True)):
            difference, about = _difference(mine, wanted, precise, values=values)
            if not difference <= largest:
                largest = difference
                what = f"{name} {number}: {about}" if difference > LIMIT else None
    return (largest if values or largest else None), what


def _difference(mine: Any, wanted: Any, precise: Any, *, values: bool) -> tuple[float, str]:
    wrong = float("inf")
    if not isinstance(wanted, torch.Tensor):
        comparable = isinstance(wanted, (bool, int, float)) and values
        return (wrong, f"{mine} in place of {wanted}") if comparable and mine != wanted else (0.0, "")
    if not isinstance(mine, torch.Tensor):
        return wrong, f"{type(mine).__name__} in place of a tensor"
    if (mine.dtype, mine.shape) != (wanted.dtype, wanted.shape):
        return wrong, f"{mine.dtype} {list(mine.shape)} in place of {wanted.dtype} {list(wanted.shape)}"
    if not values or not wanted.numel():
        return 0.0, ""
    mine, wanted = map(_numbers, (mine, wanted))
    distance = _distance(mine, wanted)
    if precise is not None:
        precise = _numbers(precise)
        rounding = _distance(wanted, precise)
        rounding = rounding.masked_fill(rounding.isinf(), 0).max()
        distance = torch.minimum(distance, (_distance(mine, precise) - rounding).clamp_min(0))
    at = int(distance.argmax())
    return float(distance.flatten()[at]), f"{mine.flatten()[at]:.9g} in place of {wanted.flatten()[at]:.9g}"


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg().cpu()
    return (torch.view_as_real(plain) if plain.is_complex() else plain).double()


def _distance(mine: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Of values above 1 relative to them; infinite where only one is a number."""
    same = (mine == wanted) | (mine.isnan() & wanted.isnan())
    distance = (mine - wanted).abs() / wanted.abs().clamp_min(1)
    return distance.masked_fill(same, 0).nan_to_num(nan=float("inf"), posinf=float("inf"))


@dataclass
class Row:
    """A line of the table. The worst sample decides.

    Attributes:
        operator: its name.
        samples: how many it was tried with.
        sources: where they are from.
        forward, backward: how the operator runs; None for an operator of the backward only, and without a backward.
        difference: the largest to the CPU, of values above 1 relative to them; None if there is none to tell.
        without_values: why only shapes and dtypes are compared, if so.
        kernels: torch_xla's that ran in place of the operator's own.
        notes: why samples are not in the graph, or differ.
    """

    operator: str
    samples: int = 0
    sources: list[str] = field(default_factory=list)
    forward: How | None = None
    backward: How | None = None
    difference: float | None = None
    without_values: str | None = None
    kernels: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def tried(self) -> bool:
        """Whether there is a sample."""
        return self.samples > 0

    @property
    def how(self) -> How | None:
        """How it runs, forward and backward; None if it was not tried."""
        return _worst([self.forward, self.backward])

    @property
    def in_graph(self) -> bool:
        """Whether every sample is part of the step's graph, forward and backward."""
        return self.how in ("in the graph", "by decomposition")

    @property
    def differs(self) -> bool:
        """Whether a sample's values (or shapes) are not those of the CPU."""
        return self.difference is not None and not self.difference <= LIMIT


def _worst(hows: Sequence[How | None]) -> How | None:
    return max((how for how in hows if how is not None), key=ORDER.index, default=None)


def row_of(operator: str, found: Sequence[Found]) -> Row:
    """The row of an operator that was tried with these samples, none if there are none."""
    row = Row(operator, len(found), without_values=without_values(operator))
    row.sources = list(dict.fromkeys(one.source for one in found))
    row.forward = _worst([one.forward for one in found])
    row.backward = _worst([one.backward for one in found])
    # Not a number is reported as infinite.
    row.difference = max((one.difference for one in found if one.difference is not None), default=None)
    row.kernels = sorted({name for one in found for name in one.kernels})
    reasons = [one.why for one in found if one.why is not None]
    row.notes = [_times(reason, reasons.count(reason), len(found)) for reason in dict.fromkeys(reasons)]
    if not found:
        row.notes = ["not tried: neither torch's list of sample inputs nor a direct call reaches it"]
    return row


def failed(operator: str, why: str, samples: int) -> Row:
    """The row of an operator that ended the process it was tried in."""
    return Row(operator, samples, forward="fails", notes=[why])


def _times(reason: str, times: int, samples: int) -> str:
    return f"{reason} ({times} of {samples} samples)"


_HEADERS = ("operator", "samples", "forward", "backward", "difference", "")


def table_of(rows: Sequence[Row]) -> str:
    """The rows, then what is missed and why."""
    text = report.table(_HEADERS, [_values(row) for row in rows])
    notes = [f"  {row.operator}: {note}" for row in rows for note in row.notes]
    return f"{text}\n\nnot in the graph, or not equal, and why:\n" + "\n".join(notes) if notes else text


def markdown(rows: Sequence[Row]) -> str:
    """The same for the documents."""
    text = report.markdown(_HEADERS, [_values(row) for row in rows])
    notes = [f"- `{row.operator}`: `{note}`" for row in rows for note in row.notes]
    return f"{text}\n\n## Not in the graph, or not equal\n\n" + "\n".join(notes)


def summary(rows: Sequence[Row]) -> str:
    """The figures in a sentence each."""
    own = sum(row.how == "in the graph" for row in rows)
    other = sum(row.how == "by decomposition" for row in rows)
    host = sum(row.how == "on the host" for row in rows)
    fails = sum(row.how == "fails" for row in rows)
    untried = sum(not row.tried for row in rows)
    differs = sum(row.in_graph and row.differs for row in rows)
    return (
        f"{own + other} of {len(rows)} core operators are part of a step's graph ({own} by a kernel of their own,\n"
        f"{other} by a decomposition), {host} are on the host, {fails} fail, {untried} were not tried. {differs} of\n"
        f"those in the graph are not within {LIMIT:g} of the CPU."
    )


def _values(row: Row) -> tuple[object, ...]:
    difference = None if row.difference is None else f"{row.difference:.0e}"
    if row.without_values is not None and not row.differs:
        difference = f"shapes alone ({row.without_values})"
    mark = "not tried" if not row.tried else "" if row.in_graph and not row.differs else "MISSED"
    return (row.operator, row.samples, row.forward, row.backward, difference, mark)


# Of operators in a child: each starts the runtime anew, which takes a second.
GROUP = 32


def rows(cases: Mapping[str, Sequence[Case]], timeout: float) -> Iterator[Row]:
    """The row of each operator.

    Args:
        cases: of each operator.
        timeout: seconds for a child; the operator that it is at then fails.
    """
    left = list(cases)
    while left:
        group = {name: cases[name] for name in left[:GROUP]}
        done, error = _in_child(group, timeout)
        yield from done
        left = left[len(done) :]
        if error is not None:
            # The first that is not done is what the child was at.
            yield failed(left[0], error, len(cases[left[0]]))
            left = left[1:]


def _in_child(group: Mapping[str, Sequence[Case]], timeout: float) -> tuple[list[Row], str | None]:
    """The rows up to the end of the child, and why that came early, if it did."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows")
        path.touch()
        outcome = run_in_child(functools.partial(_measure_all, group, path), timeout=timeout)
        done = list(_read(path))
    if outcome.ok or len(done) == len(group):
        return done, None
    print(f"{outcome.error}\n{outcome.output}", file=sys.stderr, flush=True)
    return done, str(outcome.short_error)


def _read(path: Path) -> Iterator[Any]:
    with path.open("rb") as stream:
        while True:
            try:
                yield pickle.load(stream)
            except (EOFError, pickle.UnpicklingError):
                return


def _measure_all(group: Mapping[str, Sequence[Case]], path: Path) -> None:
    warnings.simplefilter("ignore")
    xla_adapters.initialize()
    with path.open("ab", buffering=0) as stream:
        for name, cases in group.items():
            row = row_of(name, [measure(name, case) for case in cases])
            stream.write(pickle.dumps(row))
