"""Counters of blocks and of runs, and the events of a run as lines of JSON."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch

import xla_adapters
from tests.isolation import ChildFailed, isolated, run_in_child
from xla_adapters.data.batches import sample_count, token_count
from xla_adapters.insight.run_record import NAME, EventFile, RunRecord, RunStats
from xla_adapters.insight.times import COMPILE, EVALUATION, INPUT, SAVE, STEP, WallClock


@isolated
def test_counts_by_kind() -> None:
    xla_adapters.initialize(eager=False)
    tensor = torch.ones(3).to("xla")
    with xla_adapters.count() as lazy:
        assert (tensor * 2.5).sum().item() == 7.5
    assert (lazy.compiles, lazy.executions, lazy.transfers_to_host, lazy.eager_ops) == (1, 1, 1, 0)
    with xla_adapters.eager(), xla_adapters.count() as eager:
        result = tensor + tensor
    assert (eager.compiles, eager.executions, eager.eager_ops, eager.eager_compiles) == (0, 0, 1, 1)
    assert result.tolist() == [2, 2, 2]
    assert lazy.compile_seconds > 0 < lazy.wall_seconds
    assert set(lazy.as_dict()) >= {"compiles", "executions", "transfers_to_host", "eager_ops", "host_seconds"}


@isolated(env={"XLA_ADAPTERS_CACHE_DIR": "", "CPU_NUM_DEVICES": "2"})
def test_to_count_does_not_start_the_runtime(tmp_path: Path) -> None:
    """It would start without what the training in the block asks for."""
    with xla_adapters.count() as counted:
        xla_adapters.get_runtime().device.wait()
        xla_adapters.initialize(spmd=True, cache_dir=str(tmp_path))
        assert (torch.ones(3).to("xla") * 2.5).sum().item() == 7.5
    assert counted.eager_compiles > 0
    assert len(list(tmp_path.iterdir())) == counted.eager_compiles


@isolated
def test_counts_are_there_when_the_body_raises() -> None:
    xla_adapters.initialize(eager=False)
    tensor = torch.ones(3).to("xla")

    def fails() -> None:
        (tensor * 2.5).sum().item()
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"), xla_adapters.count() as counters:
        fails()
    assert counters.executions == 1


@isolated
def test_run_stats_summary() -> None:
    now = [0.0]
    stats = RunStats(clock=lambda: now[0])
    assert stats.summary() == "nothing was run"
    stats.start()
    tensor = torch.ones(3).to("xla")
    for _ in range(2):
        (tensor * 2.5).sum().item()
        stats.count_batch(samples=4, tokens=40)
        stats.count_step()
    now[0] = 1e6
    stats.stop()
    totals = stats.as_dict()
    assert (totals["steps"], totals["compiles"], totals["executions"]) == (2, 1, 2)
    assert totals["executions_per_step"] == 1
    assert totals["tokens_per_second"] == pytest.approx(80 / 1e6, rel=1e-3)
    summary = stats.summary()
    assert "2 (1.00 per step)" in summary
    assert "tokens/s" in summary


@isolated
def test_run_stats_of_a_lap_are_those_since_the_last_one() -> None:
    now = [0.0]
    stats = RunStats(clock=lambda: now[0])
    stats.start()
    tensor = torch.ones(3).to("xla")
    laps = []
    for steps in (1, 3):
        for _ in range(steps):
            (tensor * 2.5).sum().item()
            stats.count_batch(samples=4)
            stats.count_step()
        now[0] += 1e6 * steps
        laps.append(stats.lap())
    assert [(lap["steps"], lap["compiles"], lap["executions"], lap["seconds"]) for lap in laps] == [
        (1, 1, 1, 1e6),
        (3, 0, 3, 3e6),
    ]
    assert laps[1]["samples_per_second"] == pytest.approx(4e-6, rel=1e-3)
    stats.stop()
    assert stats.as_dict()["executions"] == 4


@isolated
def test_rates_are_of_the_time_that_the_report_has_for_steps() -> None:
    now = [0.0]
    stats = RunStats(clock=lambda: now[0])
    record = RunRecord(stats)
    record.clock = stats.wall = WallClock(lambda: now[0])
    record.clock.start(STEP)
    stats.start()
    for kind, seconds in ((STEP, 8.0), (COMPILE, 16.0), (EVALUATION, 32.0), (SAVE, 64.0), (INPUT, 2.0)):
        with record.clock.during(kind):
            now[0] += seconds
    stats.count_batch(tokens=40)
    stats.count_step()
    assert stats.lap()["tokens_per_second"] == record.report().rates["tokens_per_second"] == 4
    stats.stop()
    assert stats.as_dict()["tokens_per_second"] == 4


@isolated
def test_batches_are_counted_by_their_shapes() -> None:
    ids = torch.zeros(2, 5)
    assert (sample_count({"scale": torch.tensor(1.0), "input_ids": ids}), token_count({"input_ids": ids})) == (2, 10)
    assert (sample_count(["text", (ids[:1],)]), token_count([ids])) == (1, 0)
    assert (sample_count("text"), token_count({"input_ids": [1, 2]})) == (0, 0)


def lines(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / NAME).read_text().splitlines()]


def test_it_is_made_with_the_first_event_and_added_to(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for number in range(2):
        file = EventFile(folder)
        assert folder.exists() == bool(number)
        file.write("compile", {"number": number})
        file.close()
    assert [(line["event"], line["number"]) for line in lines(folder)] == [("compile", 0), ("compile", 1)]


def test_nothing_is_written_without_a_folder() -> None:
    file = EventFile(None)
    file.write("compile", {})
    file.close()
    assert file.path is None


def test_a_killed_run_leaves_whole_lines(tmp_path: Path) -> None:
    def run() -> None:
        file = EventFile(tmp_path)
        for number in range(100):
            file.write("compile", {"number": number, "reason": "x" * 10_000})
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(ChildFailed):
        run_in_child(run)
    assert [line["number"] for line in lines(tmp_path)] == list(range(100))


def test_a_torn_line_of_an_earlier_run_does_not_spoil_the_next(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text('{"event": "comp')
    file = EventFile(tmp_path)
    file.write("end", {"steps": 3})
    file.close()
    assert json.loads((tmp_path / NAME).read_text().splitlines()[1])["steps"] == 3


def test_a_file_that_cannot_be_written_is_a_warning_once(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file where the folder should be")
    file = EventFile(tmp_path / "run")
    with pytest.warns(UserWarning, match="no further events are written"):
        file.write("compile", {})
    file.write("compile", {})
    file.close()
