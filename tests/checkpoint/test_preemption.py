"""Signals that announce the end, and the schedule that answers them."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch_xla

from tests.isolation import isolated, outcome_of
from xla_adapters import get_runtime
from xla_adapters.checkpoint import CheckpointConfig, CheckpointStore, Preemption, SaveReason, SaveSchedule


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def send(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


@isolated
def test_a_signal_is_noted_and_a_second_one_changes_nothing() -> None:
    clock = Clock()
    before = signal.getsignal(signal.SIGTERM)
    with Preemption(CheckpointConfig(preemption_deadline=timedelta(seconds=30)), clock=clock) as preemption:
        assert not preemption.requested
        assert not preemption.can_still_save(1)
        send()
        assert preemption.requested
        clock.now += 10
        send()
        assert preemption.remaining == 20
        assert preemption.can_still_save(1)
        clock.now += 25
        assert preemption.remaining == -5
        assert not preemption.can_still_save(1)
        assert preemption.requested
        assert preemption.exit_code == 143
    assert signal.getsignal(signal.SIGTERM) is before


@isolated
def test_handlers_of_others_are_called_and_put_back() -> None:
    calls: list[int] = []

    def theirs(number: int, frame: Any) -> None:
        calls.append(number)

    signal.signal(signal.SIGTERM, theirs)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    config = CheckpointConfig(preemption_signals=("SIGTERM", "SIGUSR1"), preemption_exit_code=75)
    with Preemption(config) as preemption:
        send(signal.SIGUSR1)
        assert preemption.requested
        send()
        assert calls == [signal.SIGTERM]
        assert preemption.exit_code == 75
    assert signal.getsignal(signal.SIGTERM) is theirs
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN


@isolated
def test_a_handler_installed_later_keeps_its_place() -> None:
    def later(number: int, frame: Any) -> None: ...

    with Preemption():
        signal.signal(signal.SIGTERM, later)
    assert signal.getsignal(signal.SIGTERM) is later


def test_the_signal_counts_for_the_exit_code() -> None:
    def child() -> int:
        with Preemption(CheckpointConfig(preemption_signals=("SIGUSR2",))) as preemption:
            send(signal.SIGUSR2)
            return preemption.exit_code

    outcome = outcome_of(child)
    assert outcome.value == 128 + signal.SIGUSR2


@isolated
def test_outside_the_main_thread_nothing_is_installed() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen: list[Any] = []

    def run() -> None:
        with Preemption():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [before]


@isolated
@pytest.mark.parametrize("moment", ["before", "while writing", "twice while writing"])
def test_a_run_that_is_preempted_leaves_its_last_step(moment: str, tmp_path: Path) -> None:
    store, config = CheckpointStore(tmp_path), CheckpointConfig(save_on="preemption")

    def write(folder: Path) -> None:
        if moment != "before":
            send()
        if moment.startswith("twice"):
            send()
        (folder / "weights").write_text("whole")

    saved = []
    with Preemption(config) as preemption:
        schedule = SaveSchedule(config, preemption=preemption)
        for step in range(1, 10):
            if step == 4 and moment == "before":
                send()
            if step == 4 and moment != "before":
                schedule.saved(step)
                store.save(step, write)
                saved.append(step)
            if schedule.due(step) is SaveReason.PREEMPTION:
                schedule.saved(step)
                store.save(step, write)
                saved.append(step)
                assert schedule.due(step) is None
            if preemption.requested:
                break
    assert saved == [4]
    newest = store.newest_valid()
    assert newest is not None
    assert newest.step == 4


def test_steps_and_time() -> None:
    clock = Clock()
    schedule = SaveSchedule(CheckpointConfig(every_n_steps=3, every=timedelta(minutes=5)), clock=clock)
    due = {}
    for step in range(10):
        reason = schedule.due(step)
        if reason is not None:
            due[step] = reason
            schedule.saved(step)
            assert schedule.due(step) is None
        # 0, 3, 6, 9: by their number; 5: five minutes after 3.
        clock.now += 150
    assert due == {
        2: SaveReason.TIME,
        3: SaveReason.STEPS,
        5: SaveReason.TIME,
        6: SaveReason.STEPS,
        8: SaveReason.TIME,
        9: SaveReason.STEPS,
    }


def test_another_source_of_announcements() -> None:
    preemption = Preemption(also=lambda step: step == 3)
    schedule = SaveSchedule(CheckpointConfig(save_on="preemption"), preemption=preemption)
    assert [schedule.due(step) for step in (1, 2, 3)] == [None, None, SaveReason.PREEMPTION]
    assert preemption.requested


@isolated
def test_the_sync_point_of_torch_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no TPU here: what of torch_xla would be called is replaced."""
    runtime, calls = get_runtime(), list[Any]()
    assert runtime.device.preemption_sync_point() is None
    monkeypatch.setattr(type(runtime.device), "hardware", lambda self: "TPU")
    assert runtime.device.preemption_sync_point() is None
    for name, value in {"process_count": 4, "process_index": 1, "get_master_ip": "10.0.0.1"}.items():
        monkeypatch.setattr(torch_xla.runtime, name, lambda value=value: value)
    for name in ("_ensure_xla_coordinator_initialized", "_activate_preemption_sync_manager"):
        assert hasattr(torch_xla._XLAC, name)
        monkeypatch.setattr(torch_xla._XLAC, name, lambda *args, name=name: calls.append((name, args)))
    assert hasattr(torch_xla._XLAC, "_sync_point_reached")
    monkeypatch.setattr(torch_xla._XLAC, "_sync_point_reached", lambda step: step == 3)
    reached = runtime.device.preemption_sync_point()
    assert reached is not None
    assert calls == []
    schedule = SaveSchedule(CheckpointConfig(save_on="preemption"), preemption=Preemption(also=reached))
    assert [schedule.due(step) for step in (1, 2, 3)] == [None, None, SaveReason.PREEMPTION]
    assert calls == [
        ("_ensure_xla_coordinator_initialized", (1, 4, "10.0.0.1")),
        ("_activate_preemption_sync_manager", ()),
    ]


class _Ranks:
    """Ranks that are threads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.values: list[Any] = [None] * size
        self.barrier = threading.Barrier(size)

    def rank(self, rank: int) -> Any:
        ranks = self

        class Rank:
            size = ranks.size

            def __init__(self) -> None:
                self.rank = rank

            def gather(self, value: Any) -> list[Any]:
                ranks.values[rank] = value
                ranks.barrier.wait(240)
                values = list(ranks.values)
                ranks.barrier.wait(240)
                return values

        return Rank()


def test_what_is_due_for_one_rank_is_due_for_all() -> None:
    ranks, clocks = _Ranks(3), [Clock() for _ in range(3)]
    clocks[1].now += 0
    config = CheckpointConfig(every=timedelta(seconds=60), every_n_steps=4)

    def run(rank: int) -> list[SaveReason | None]:
        schedule = SaveSchedule(config, group=ranks.rank(rank), clock=clocks[rank])
        answers = []
        for step in range(1, 5):
            # Only the clock of rank 1 goes on.
            clocks[1].now += 40 if rank == 1 else 0
            answers.append(schedule.due(step))
            if answers[-1]:
                schedule.saved(step)
        return answers

    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(run, range(3)))
    assert answers[0] == answers[1] == answers[2] == [None, SaveReason.TIME, None, SaveReason.STEPS]
