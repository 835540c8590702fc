"""A run of `hf_trainer.Trainer` that is killed while it saves goes on bit for bit."""

from __future__ import annotations

import functools
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

import hf_trainer
from hf_trainer import checkpoints
from tests.crash.storages import Operation, Quick, dying, recording
from tests.hf_trainer.scenarios import Classifier, arguments, vector_samples
from tests.isolation import outcome_of, run_in_child
from xla_adapters.checkpoint import CheckpointStore
from xla_adapters.checkpoint.storage import Storage

STEPS = 8
# What transformers calls while it writes a checkpoint, in this order.
_WRITERS = ("save_model", "_save_optimizer_and_scheduler", "_save_scaler", "_save_rng_state")


class _Journal(TrainerCallback):
    def __init__(self, path: Path) -> None:
        self._path = path

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            with self._path.open("a") as noted:
                noted.write(f"{state.global_step} {logs['loss'].hex()}\n")


def train(folder: Path, journal: Path, storage: Storage, *, dies: tuple[str, int] | None = None) -> None:
    """Trains under dropout, saves after every second step, keeps two.

    Args:
        dies: the process is killed when this writer is called at the save after this step.
    """

    class Killed(hf_trainer.Trainer):
        pass

    def wrap(name: str, step: int) -> None:
        stock = getattr(hf_trainer.Trainer, name)

        def killed(self: Any, *args: Any, **kwargs: Any) -> None:
            if self.state.global_step == step:
                os.kill(os.getpid(), signal.SIGKILL)
            stock(self, *args, **kwargs)

        setattr(Killed, name, killed)

    if dies is not None:
        wrap(*dies)
    vars(checkpoints)["CheckpointStore"] = functools.partial(CheckpointStore, storage=storage)
    args = arguments(str(folder), max_steps=STEPS, save_strategy="steps", save_steps=2, save_total_limit=2)
    trainer = Killed(Classifier(dropout=0.4), args, train_dataset=vector_samples(24), callbacks=[_Journal(journal)])
    trainer.train(resume_from_checkpoint=any(folder.glob("checkpoint-*")))


def losses(journal: Path) -> dict[int, set[str]]:
    """All losses that were ever noted for a step."""
    found: dict[int, set[str]] = {}
    for line in journal.read_text().splitlines():
        number, loss = line.split()
        found.setdefault(int(number), set()).add(loss)
    return found


def whole(folder: Path) -> tuple[dict[int, set[str]], list[Operation]]:
    """The losses of a run that nobody touches, and what it asks of the storage."""

    def child() -> list[Operation]:
        log: list[Operation] = []
        train(folder / "whole", folder / "whole.txt", recording(Quick(), log))
        return log

    log = run_in_child(child)
    found = losses(folder / "whole.txt")
    assert sorted(found) == list(range(1, STEPS + 1))
    assert all(len(noted) == 1 for noted in found.values())
    return found, log


def killed(folder: Path, journal: Path, number: int | None = None, *, dies: tuple[str, int] | None = None) -> None:
    """One life, and what it leaves: nothing half under a name that is resumed from."""

    def child() -> None:
        storage: Storage = Quick()
        train(folder, journal, storage if number is None else dying(storage, number), dies=dies)

    outcome = outcome_of(child)
    assert outcome.error == "the process died with signal 9", f"{number} {dies}: {outcome.error}\n{outcome.output}"
    store = CheckpointStore(folder)
    for path in folder.glob("checkpoint-*"):
        assert store.load(path.name).step == int(path.name.rpartition("-")[2])


def goes_on(folder: Path, journal: Path, expected: dict[int, set[str]]) -> None:
    """The last life, which nobody touches."""
    run_in_child(lambda: train(folder, journal, Quick()))
    assert losses(journal) == expected
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == [
        "checkpoint-6",
        "checkpoint-8",
    ]


def test_killed_while_transformers_writes(tmp_path: Path) -> None:
    expected, _ = whole(tmp_path)
    folder, journal = tmp_path / "run", tmp_path / "killed.txt"
    for step, name in ((2, _WRITERS[0]), (4, _WRITERS[1]), (6, _WRITERS[3])):
        killed(folder, journal, dies=(name, step))
    goes_on(folder, journal, expected)


def test_killed_between_the_operations_of_a_commit(tmp_path: Path) -> None:
    expected, log = whole(tmp_path)
    renames = [number for number, (name, _) in enumerate(log) if name == "rename"]
    folder, journal = tmp_path / "run", tmp_path / "killed.txt"
    # Before the first checkpoint has its name; then, each in a life of its own, between the names and the rotation.
    for number in (renames[0], renames[0] + 1, len(log) // 2):
        killed(folder, journal, number)
    goes_on(folder, journal, expected)


@pytest.mark.slow
def test_killed_before_every_operation(tmp_path: Path) -> None:
    """Of the third save: the first that makes an older checkpoint superfluous."""
    expected, log = whole(tmp_path)
    begins = [number for number, (name, args) in enumerate(log) if name == "make_folder" and "_tmp-" in args[0]]
    # Two folders for each save.
    operations = range(begins[4], begins[6])
    assert [log[number][0] for number in operations].count("rename") == 2
    assert len(operations) > 20
    for number in operations:
        folder, journal = tmp_path / f"run-{number}", tmp_path / f"killed-{number}.txt"
        killed(folder, journal, number)
        goes_on(folder, journal, expected)
