"""A training that is killed at random moments, again and again, ends as if nobody had touched it."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_adapters
from tests.crash.storages import dying
from tests.isolation import outcome_of, run_in_child
from tests.support import Loop
from xla_adapters.checkpoint import (
    AsyncSaver,
    CheckpointConfig,
    CheckpointStore,
    Preemption,
    SaveReason,
    SaveSchedule,
    TrainingState,
    snapshot,
)
from xla_adapters.checkpoint.storage import LocalStorage, Storage

STEPS = 30
# Seconds from the first step to the last, about.
_LIFETIME = 0.4


def write(state: dict[str, Any], folder: Path) -> None:
    """What a run needs to go on."""
    torch.save({"model": state["model"], "optimizer": state["optimizer"]}, folder / "state.pt")
    state["training"].save(folder)


def resume(loop: Loop, store: CheckpointStore) -> int:
    """Goes on from the newest valid checkpoint; returns how many steps are done."""
    newest = store.newest_valid()
    if newest is None:
        return 0
    saved = torch.load(Path(newest.path) / "state.pt")
    loop.model.load_state_dict(saved["model"])
    loop.optimizer.load_state_dict(saved["optimizer"])
    training = TrainingState.load(Path(newest.path))
    assert training is not None
    training.restore()
    return newest.step


def train(root: Path, journal: Path, *, asynchronous: bool, storage: Storage | None = None) -> None:
    """Trains under dropout, saves after every second step, and notes each loss, bit for bit."""
    loop = Loop()
    xla_adapters.prime(loop.optimizer)
    step = xla_adapters.step()(loop.body)
    store = CheckpointStore(root, keep_last=2, storage=storage)
    done = resume(loop, store)
    with journal.open("a") as noted, AsyncSaver(store) as saver:
        for number in range(done + 1, STEPS + 1):
            loss = step().item()
            noted.write(f"{number} {loss.hex()}\n")
            noted.flush()
            if number % 2 == 0:
                state = {
                    "model": loop.model.state_dict(),
                    "optimizer": loop.optimizer.state_dict(),
                    "training": TrainingState.capture(),
                }
                saver.save(number, state, write)
                if not asynchronous:
                    saver.wait()


def die_after(seconds: float, journal: Path) -> None:
    """Kills this process that long after its first step; compiling takes longer than all the rest."""
    before = journal.stat().st_size if journal.exists() else 0

    def kill() -> None:
        while not journal.exists() or journal.stat().st_size == before:
            time.sleep(0.001)
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()


def losses(journal: Path) -> dict[int, set[str]]:
    """All losses that were ever noted for a step."""
    found: dict[int, set[str]] = {}
    for line in journal.read_text().splitlines():
        number, loss = line.split()
        found.setdefault(int(number), set()).add(loss)
    return found


def expected(folder: Path) -> dict[int, set[str]]:
    run_in_child(lambda: train(folder / "whole", folder / "whole.txt", asynchronous=False))
    return losses(folder / "whole.txt")


def survive(kills: int, seed: int, folder: Path, *, asynchronous: bool) -> None:
    """Kills a training again and again; every loss it ever notes is that of the one that was left alone."""
    whole, chosen, journal = expected(folder), random.Random(seed), folder / "killed.txt"
    assert len(whole) == STEPS
    lives = died = 0
    while died < kills:
        lives += 1
        seconds = chosen.random() * _LIFETIME

        def child(seconds: float = seconds) -> None:
            die_after(seconds, journal)
            train(folder / "run", journal, asynchronous=asynchronous)

        outcome = outcome_of(child)
        if outcome.error is None:
            # It was done before it could die: once more, from the beginning.
            assert losses(journal) == whole
            (folder / "run").rename(folder / f"done-{lives}")
        else:
            assert outcome.error == "the process died with signal 9", outcome.error + outcome.output
            died += 1
    run_in_child(lambda: train(folder / "run", journal, asynchronous=asynchronous))
    assert losses(journal) == whole


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_few_kills(asynchronous: bool, tmp_path: Path) -> None:
    survive(2, 1, tmp_path, asynchronous=asynchronous)


@pytest.mark.long
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_twenty_kills(asynchronous: bool, tmp_path: Path) -> None:
    survive(20, 2, tmp_path, asynchronous=asynchronous)


@pytest.mark.slow
def test_killed_between_the_operations_of_a_save(tmp_path: Path) -> None:
    """The training that goes on meanwhile is done again, with the same losses."""
    whole, journal = expected(tmp_path), tmp_path / "killed.txt"
    # Each life does more operations than this: the first saves of a life are always reached.
    for number in (3, 8, 16, 25):

        def child(number: int = number) -> None:
            train(tmp_path / "run", journal, asynchronous=True, storage=dying(LocalStorage(), number))

        outcome = outcome_of(child)
        assert outcome.error == "the process died with signal 9", outcome.error
    run_in_child(lambda: train(tmp_path / "run", journal, asynchronous=True))
    assert losses(journal) == whole


_PLACES = {5: "loader", 10: "forward", 15: "optimizer", 20: "save"}


def train_until_preempted(root: Path, journal: Path) -> None:
    """Is sent SIGTERM, twice, by what it does in the steps of `_PLACES`; ends the process as it says it does."""
    config = CheckpointConfig(save_on="preemption")
    loop, store = Loop(), CheckpointStore(root)
    xla_adapters.prime(loop.optimizer)

    def maybe(place: str, number: int) -> None:
        if _PLACES.get(number) == place:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)

    with Preemption(config) as preemption, journal.open("a") as noted:
        schedule = SaveSchedule(config, preemption=preemption)
        done = resume(loop, store)
        for number in range(done + 1, STEPS + 1):
            maybe("loader", number)
            hook = loop.model.register_forward_hook(lambda *_, number=number: maybe("forward", number))
            post = loop.optimizer.register_step_post_hook(lambda *_, number=number: maybe("optimizer", number))
            with xla_adapters.step():
                loss = loop.body()
            hook.remove()
            post.remove()
            noted.write(f"{number} {loss.item().hex()}\n")
            noted.flush()
            saving = _PLACES.get(number) == "save"
            if saving or schedule.due(number) is SaveReason.PREEMPTION:
                schedule.saved(number)
                state = snapshot({"model": loop.model.state_dict(), "optimizer": loop.optimizer.state_dict()})
                training = TrainingState.capture()

                def save(folder: Path, state: Any = state, training: Any = training, number: int = number) -> None:
                    maybe("save", number)
                    write({**state, "training": training}, folder)

                store.save(number, save)
            if preemption.requested:
                os._exit(preemption.exit_code)


def test_preempted_wherever_it_is(tmp_path: Path) -> None:
    whole, root, journal = expected(tmp_path), tmp_path / "run", tmp_path / "preempted.txt"
    for number in _PLACES:
        outcome = outcome_of(lambda: train_until_preempted(root, journal))
        assert outcome.error == "the process died with exit code 143", (number, outcome.error)
        newest = CheckpointStore(root).newest_valid()
        assert newest is not None
        assert newest.step == number
    run_in_child(lambda: train_until_preempted(root, journal))
    assert losses(journal) == whole
