"""Reads of a known library inside a step: computed from the batch, deferred, or a split that is told once."""

from __future__ import annotations

import copy
import importlib.util
import json
import math
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import xla_adapters
from tests.device import DEVICE, ON_TORCH_TPU
from tests.support import Loop
from xla_adapters import (
    DeviceSyncError,
    DiscardedTensorError,
    GraphBreakError,
    GraphBreakWarning,
    StepProgram,
    TensorReadError,
    XLAConfig,
)
from xla_adapters.replay.call_spec import CallSpec
from xla_adapters.runtime.transfers import note_upload
from xla_adapters.tracing.deferred_numbers import DeferredNumber, make_plain
from xla_adapters.tracing.discarding import Discarding
from xla_adapters.tracing.library_reads import LibraryReads, allowing_reads

pytestmark = pytest.mark.isolated

_LIBRARY = """
import torch

def log(metrics, loss):
    metrics.append(loss.item())
    metrics.append(loss.detach().mul(2).item() / 4)

def log_and_change(metrics, loss):
    value = loss.detach().clone()
    metrics.append(value.item())
    value.add_(100)
    return value

def per_token(loss, labels):
    valid = (labels[:, 1:] != -100).sum()
    return loss / valid.item() if valid > 0 else loss * 0

def count(labels, total):
    return total + int((labels != -100).sum()), torch.nonzero(labels[:, 0] != -100, as_tuple=False).view(-1)

def after_a_write(labels):
    labels[:, 0] = -100
    return bool((labels != -100).any())

def after_a_hidden_write(labels):
    labels.data[:, 0] = 7
    return labels[0, 0].item()

def where_the_largest_is(labels):
    return labels.max(1).indices[0].item()

def decide(loss):
    if loss.item() > 0:
        return loss * 2
    return loss

def selected(values, labels):
    mask = labels != -100
    return values[mask].sum(), values[mask].mean(), values[mask].max()

def above(values, limit):
    chosen = values[values > limit].float()
    return chosen.sum() + values[values > limit].max() + chosen.clamp(max=values[values > limit])[0]

def sync_and_log(metrics, loss, sync):
    sync()
    metrics.append(loss.item())

def without_loops(edges):
    return edges[:, edges[0] != edges[1]]

def spread(values, labels):
    mask = labels != -100
    places = torch.tensor([[0, 1], [2, 3]], device=labels.device)
    found = values[mask, :].cumsum(0)
    values = values.clone()
    for row, of_row in enumerate(mask):
        values[row, of_row] = found[: int(of_row.sum())]
    if labels.max() >= 50 or (labels.amin(-1) // 2 % 3).prod() > 100 or places[-1].tolist() != [2, 3]:
        raise ValueError("labels out of range")
    return values.sum((0, 1))

def beside(values, labels):
    return values[labels[:, :1] != -100]

def measure(metrics, values, labels):
    valid = (labels != -100).sum()
    count = valid.item()
    metrics["mean"] = [values.sum().item() / count if count > 0 else 0.0]
    metrics["count"] = [count // 2]
    if valid > 3:
        metrics["many"] = [count * 1.5]
    rows = torch.nonzero(labels[:, 0] != -100, as_tuple=False).view(-1)
    return values.index_select(0, rows)

def total(metrics, loss, times):
    running = 0
    for _ in range(times):
        running += loss.item()
    metrics.append(running)
"""


def _library(folder: Path) -> tuple[Any, LibraryReads]:
    """A module that is a known library, and its reads."""
    folder = folder / "library"
    folder.mkdir(exist_ok=True)
    path = folder / "metrics.py"
    path.write_text(_LIBRARY, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("metrics_of_a_library", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, LibraryReads([str(folder)])


def _loop() -> Loop:
    loop = Loop()
    # Else the first step executes what made it.
    xla_adapters.get_runtime().tracing.flush()
    return loop


def _labels(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows)


def test_numbers_that_are_logged_are_known_after_the_step(tmp_path: Path) -> None:
    library, reads = _library(tmp_path)
    loop = _loop()
    metrics: list[Any] = []
    losses = []
    with allowing_reads(reads), xla_adapters.count() as counts:
        for _ in range(4):
            with xla_adapters.step():
                loss = loop.body()
                library.log(metrics, loss)
            losses.append(loss)
    assert (counts.compiles, counts.executions, counts.transfers_to_host) == (1, 4, 0)
    assert all(isinstance(number, DeferredNumber) for number in metrics)
    with xla_adapters.count() as counts:
        expected = xla_adapters.get_runtime().transfers.to_host(losses)
        values = [float(number) for number in metrics]
    # One transfer for the losses and for the numbers of all steps.
    assert counts.transfers_to_host == 1
    assert values == [number for loss in expected for number in (loss.item(), loss.item() * 2 / 4)]


def test_a_deferred_number_behaves_as_the_number(tmp_path: Path) -> None:
    library, reads = _library(tmp_path)
    metrics: list[Any] = []
    with allowing_reads(reads), xla_adapters.step():
        library.log(metrics, torch.full((), 2.5, device=DEVICE) * 3)
        changed = library.log_and_change(metrics, torch.full((), 1.5, device=DEVICE))
    number, half, before = metrics
    assert (sum(metrics[:2]) / 2, type(sum(metrics[:2]))) == (5.625, float)
    assert (number == 7.5, half < number, number >= 8, number != 7.5, hash(number)) == (
        True,
        True,
        False,
        False,
        hash(7.5),
    )
    assert (f"{number:.2f}", str(number), repr(number), round(number, 0), int(number)) == ("7.50", "7.5", "7.5", 8.0, 7)
    assert (
        number + 1,
        1 - number,
        -number,
        abs(-number),
        number * 2,
        15 / number,
        number // 2,
        number % 2,
        number**2,
    ) == ((8.5, -6.5, -7.5, 7.5, 15.0, 2.0, 3.0, 1.5, 56.25))
    assert (math.sqrt(number * number), max(half, number), number.is_integer(), bool(number)) == (7.5, 7.5, False, True)
    assert np.mean([number, half]) == 5.625
    assert torch.equal(torch.ones(2) * number, torch.full((2,), 7.5))
    assert type(copy.deepcopy(number)) is type(pickle.loads(pickle.dumps(number))) is float
    with pytest.raises(TypeError, match="not JSON serializable"):
        json.dumps(number)
    # As it was when it was read.
    assert (before, changed.item()) == (1.5, 101.5)


def test_what_the_batch_determines_is_known_on_the_host(tmp_path: Path) -> None:
    library, reads = _library(tmp_path)
    loop = _loop()
    batches = [
        _labels([1, 2, -100], [3, -100, -100]),
        _labels([-100, -100, -100], [5, 6, 7]),
        _labels([-100] * 3, [-100] * 3),
    ]
    found, losses = [], []
    total = 0
    with allowing_reads(reads), xla_adapters.count() as counts:
        for batch in batches:
            with xla_adapters.step():
                labels = batch.to(DEVICE)
                loss = loop.body()
                losses.append((loss, library.per_token(loss.detach(), labels)))
                total, rows = library.count(labels, total)
            found.append((total, rows.tolist()))
    assert found == [(3, [0, 1]), (6, [1]), (6, [])]
    # Of batches that are gone nothing stays.
    del labels, rows
    assert not reads.host_values._computed
    assert counts.executions == 3
    assert [round((per_token / loss).item(), 5) for loss, per_token in losses] == [1.0, 0.5, 0.0]


def test_layers_look_at_integers_of_the_batch_and_at_nothing_else(tmp_path: Path) -> None:
    library, _ = _library(tmp_path)
    reads = LibraryReads([], layers=[str(tmp_path / "library")])
    loop = _loop()
    edges = _labels([0, 1, 1, 2], [1, 1, 2, 0])
    with allowing_reads(reads), xla_adapters.count() as counts:
        with xla_adapters.step():
            loss = loop.body()
            found = library.without_loops(edges.to(DEVICE))
            (chosen,) = library.selected(loss.detach().expand(4), edges.to(DEVICE)[0])[:1]
    assert (counts.compiles, counts.executions) == (1, 1)
    assert found.tolist() == [[0, 1, 2], [1, 2, 0]]
    assert chosen.item() == pytest.approx(4 * loss.item())
    # What is no integer of the batch is read as by other code.
    for read in (library.decide, lambda loss: library.log([], loss)):
        with allowing_reads(reads), pytest.raises(TensorReadError, match="item"), xla_adapters.step():
            read(loop.body())


@pytest.mark.skipif(ON_TORCH_TPU, reason="steps with reads are traced there")
def test_what_layers_read_is_read_in_replays(tmp_path: Path) -> None:
    """Positions are those of each batch; batches with as many of them are one graph. What is checked is checked."""
    library, _ = _library(tmp_path)
    program = StepProgram("layers", XLAConfig())
    weight = torch.nn.Parameter(torch.ones(2, 2, 3).to(DEVICE))
    batches = [_labels([1, -100], [-100, 2]), _labels([1, 2], [3, 4]), _labels([-100, 1], [2, -100]), _labels([1, 90])]
    replayed, compiles = [], []
    with allowing_reads(LibraryReads([], layers=[str(tmp_path / "library")])):
        for step in range(15):
            labels = (batches[step % 3] + 0).to(DEVICE)
            note_upload(batches[step % 3], labels)
            with torch.no_grad():
                factor = torch.arange(12.0).reshape(2, 2, 3).add(step).to(DEVICE)
            with xla_adapters.count() as counts:
                program.open(inputs=labels, replay=CallSpec(batch=[labels, factor], constants=[weight]))
                replayed.append(program.is_replaying)
                if program.is_replaying:
                    found = program.promise("found")
                else:
                    found = library.spread((weight * factor).detach(), labels)
                    program.keep("found", found)
                program.close()
            compiles.append(counts.compiles)
            expected = library.spread(torch.arange(12.0).reshape(2, 2, 3).add(step), batches[step % 3])
            torch.testing.assert_close(found.cpu(), expected)
    assert compiles[1:] == [1] + [0] * 13
    assert replayed[5:] == [True] * 10
    bad = batches[3].repeat(2, 1)
    labels = bad.to(DEVICE)
    note_upload(bad, labels)
    with (
        allowing_reads(LibraryReads([], layers=[str(tmp_path / "library")])),
        pytest.raises(ValueError, match="out of range"),
        Discarding(program),
    ):
        program.open(inputs=labels, replay=CallSpec(batch=[labels, factor], constants=[weight]))
        assert not program.is_replaying
        library.spread((weight * factor).detach(), labels)


def test_a_mask_of_another_shape_is_refused(tmp_path: Path) -> None:
    library, _ = _library(tmp_path)
    values, labels = torch.ones(2, 2, 3).to(DEVICE), _labels([1, 2], [3, 4])
    with allowing_reads(LibraryReads([], layers=[str(tmp_path / "library")])), xla_adapters.step():
        assert library.beside(values[:, :1], labels.to(DEVICE)).shape == (2, 3)
    with (
        allowing_reads(LibraryReads([], layers=[str(tmp_path / "library")])),
        pytest.raises((IndexError, GraphBreakError)),
        xla_adapters.step(),
    ):
        library.beside(values, labels.to(DEVICE))


def test_a_changed_batch_is_not_taken_for_the_hosts_copy(tmp_path: Path) -> None:
    library, reads = _library(tmp_path)
    with allowing_reads(reads), xla_adapters.count() as counts, xla_adapters.step():
        found = library.after_a_write(_labels([1, -100]).to(DEVICE))
    assert found is False
    assert counts.transfers_to_host == 0
    # The host's own batch may be written over once it is uploaded.
    with allowing_reads(reads), xla_adapters.step():
        batch = _labels([1, 2])
        labels = batch.to(DEVICE)
        batch.fill_(-100)
        total, _ = library.count(labels, 0)
    assert total == 2


def test_a_decision_splits_the_step_and_is_told_once(tmp_path: Path) -> None:
    library, reads = _library(tmp_path)
    loop = _loop()
    with allowing_reads(reads), warnings.catch_warnings(record=True) as told, xla_adapters.count() as counts:
        warnings.simplefilter("always")
        for _ in range(2):
            with xla_adapters.step():
                loss = loop.forward()
                decided = library.decide(loss)
            assert decided.item() == 2 * loss.item()
    line = _LIBRARY.splitlines().index("    if loss.item() > 0:") + 1
    (message,) = [str(warning.message) for warning in told if warning.category is GraphBreakWarning]
    assert f"metrics.py:{line} in decide" in message
    assert "executed in two parts" in message
    assert "\n" not in message
    assert counts.executions == 4


def test_selections_by_mask_are_summed_without_a_shape_that_depends_on_values(tmp_path: Path) -> None:
    library, reads = _library(tmp_path)
    batch = _labels([1, 2, -100], [3, -100, -100])
    values = torch.tensor([[1.0, 2.0, float("nan")], [4.0, 5.0, 6.0]])
    on_host = values.clone().requires_grad_()
    expected = library.selected(on_host, batch)
    (expected[0] + expected[1]).backward()
    with allowing_reads(reads), xla_adapters.count() as counts:
        with xla_adapters.step():
            leaf = values.to(DEVICE).requires_grad_()
            found = library.selected(leaf, batch.to(DEVICE))
            (found[0] + found[1]).backward()
    assert [one.item() for one in found] == pytest.approx([one.item() for one in expected])
    assert leaf.grad is not None
    assert on_host.grad is not None
    assert torch.allclose(leaf.grad.cpu(), on_host.grad)
    assert counts.executions == 1


def test_other_code_reads_as_before(tmp_path: Path) -> None:
    library, reads = _library(tmp_path)
    loop = _loop()
    with allowing_reads(reads):
        with pytest.raises(TensorReadError), xla_adapters.step():
            loop.forward().item()
        with pytest.raises(TensorReadError), xla_adapters.step():
            bool((_labels([1]).to(DEVICE) > 0).all())
        metrics: list[Any] = []
        with pytest.raises(TensorReadError, match="not computed yet"), xla_adapters.step():
            library.log(metrics, loop.forward())
            float(metrics[0])
    with pytest.raises(TensorReadError), xla_adapters.step():
        library.log(metrics, loop.forward())


def test_numbers_of_a_discarded_step_have_no_value(tmp_path: Path) -> None:
    library, reads = _library(tmp_path)
    loop = _loop()
    metrics: list[Any] = []
    with allowing_reads(reads), pytest.raises(KeyError), xla_adapters.step():
        library.log(metrics, loop.body())
        raise KeyError
    for use in (float, repr, lambda number: number + 1, lambda number: number > 0, json.dumps):
        with pytest.raises((DiscardedTensorError, TypeError)):
            use(metrics[0])
    with pytest.raises(DiscardedTensorError, match="discarded"):
        sum(metrics)


def test_a_running_total_may_be_long(tmp_path: Path) -> None:
    library, reads = _library(tmp_path)
    metrics: list[Any] = []
    with allowing_reads(reads), xla_adapters.step():
        library.total(metrics, torch.full((), 0.5, device=DEVICE) * 2, 3000)
    assert metrics[0] == 3000


def test_what_the_host_may_not_know_is_read_from_the_device(tmp_path: Path) -> None:
    """A write through `.data`, and where the largest of equal values stands."""
    library, reads = _library(tmp_path)
    on_host = _labels([1, 5, 5], [2, 3, 1])
    with allowing_reads(reads):
        for function in (library.after_a_hidden_write, library.where_the_largest_is):
            labels = on_host.to(DEVICE)
            note_upload(on_host, labels)
            with xla_adapters.step():
                number = function(labels)
            assert isinstance(number, DeferredNumber)
            if function is library.after_a_hidden_write:
                assert number == 7


def test_a_selection_by_computed_values_splits_the_step(tmp_path: Path) -> None:
    library, reads = _library(tmp_path)
    values = torch.tensor([1.0, -2.0, 3.0, 0.5])
    expected = library.above(values, 0.75)
    on_device = values.to(DEVICE)
    with allowing_reads(reads), pytest.warns(GraphBreakWarning, match="in above"), xla_adapters.step():
        found = library.above(on_device * 1, 0.75)
    assert float(found) == float(expected)


def test_a_sync_of_a_library_is_left_out(tmp_path: Path) -> None:
    torch_xla = pytest.importorskip("torch_xla")
    library, reads = _library(tmp_path)
    loop = _loop()
    metrics: list[Any] = []
    with allowing_reads(reads), xla_adapters.count() as counts, xla_adapters.step():
        library.sync_and_log(metrics, loop.body(), torch_xla.sync)
    assert counts.executions == 1
    with allowing_reads(reads), pytest.raises(DeviceSyncError), xla_adapters.step():
        loop.body()
        torch_xla.sync()
    assert float(metrics[0]) > 0


def test_numbers_are_made_plain_once_they_are_known(tmp_path: Path) -> None:
    library, reads = _library(tmp_path)
    loop = _loop()
    metrics: list[Any] = []
    with allowing_reads(reads), xla_adapters.step():
        library.log(metrics, loop.body())
        kept = {"train": {"loss": metrics, "other": ["text", 1]}}
        assert make_plain(kept) is kept
        # The step is open: it is not split for them.
        assert isinstance(metrics[0], DeferredNumber)
    make_plain(kept)
    assert [type(number) for number in metrics] == [float, float]
    assert torch.tensor(metrics).mean().item() == pytest.approx(sum(metrics) / 2)
    assert kept["train"]["other"] == ["text", 1]


@pytest.mark.skipif(ON_TORCH_TPU, reason="steps with reads are traced there")
@pytest.mark.parametrize("keeps", [True, False])
def test_replays_read_of_their_own_batch(tmp_path: Path, keeps: bool) -> None:
    """What the values of a batch decide is decided for each. If nobody keeps the numbers, none is replayed."""
    library, reads = _library(tmp_path)
    program = StepProgram("measure", XLAConfig())
    weight = torch.nn.Parameter(torch.ones(2).to(DEVICE))
    results: list[Any] = []
    batches = [
        _labels([1, -100], [-100, 2]),
        _labels([1, 2], [3, 4]),
        _labels([-100, -100], [-100, -100]),
        _labels([-100, 1], [2, -100]),
        _labels([-100, 1], [-100, 2]),
    ]
    replayed = []
    with allowing_reads(reads):
        for step in range(4 * len(batches)):
            on_host = batches[step % len(batches)] + 0
            labels = on_host.to(DEVICE)
            note_upload(on_host, labels)
            with torch.no_grad():
                factor = torch.tensor([1.0 + step, 2.0]).to(DEVICE)
            spec = CallSpec(batch=[labels, factor], constants=[weight], keeps_numbers=keeps)
            program.open(inputs=labels, replay=spec)
            replayed.append(program.is_replaying)
            if program.is_replaying:
                selected, metrics = program.promise("selected"), program.promise("metrics")
                (mean,) = metrics["mean"]
                if isinstance(mean, DeferredNumber):
                    with pytest.raises(TensorReadError, match="before the step has ended"):
                        float(mean + 1)
            else:
                metrics = {}
                selected = library.measure(metrics, (weight * factor).detach(), labels)
                program.keep("selected", selected)
                program.keep("metrics", metrics)
            program.close()
            results.append((selected, metrics))
    # The first and the fourth batch go the same way: each is traced once.
    expected_replays = [3, 2, 2, 3, 2] if keeps else [0] * 5
    assert [sum(replayed[index :: len(batches)]) for index in range(len(batches))] == expected_replays
    for step, (selected, metrics) in enumerate(results):
        expected: dict[str, list[float]] = {}
        values = torch.tensor([1.0 + step, 2.0])
        rows = library.measure(expected, values, batches[step % len(batches)])
        assert make_plain(metrics) == expected, step
        torch.testing.assert_close(selected.cpu(), rows, rtol=0, atol=0)
