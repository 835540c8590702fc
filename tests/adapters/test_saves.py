"""`checkpoint=` of both trainers: saves in the background, on a schedule, before the process ends; steps that hang."""

from __future__ import annotations

import functools
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint import time_of_hangs
from tests.crash.storages import Quick
from tests.isolation import isolated, outcome_of, run_in_child
from tests.support import half
from tests.trainers import ON_SCHEDULE, Moment, checkpoint, contents, each_trainer, saved_steps, train
from xla_adapters import get_runtime
from xla_adapters.checkpoint import CheckpointConfig, CheckpointStore, SaveSchedule, store
from xla_adapters.errors import CheckpointWriteError, StallError

in_either_way = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


def use_storage(storage: Quick) -> None:
    """Checkpoints of this process are written to it."""
    real = store.storage_of
    vars(store)["storage_of"] = lambda root: (storage, real(root)[1])


# ---- in the background -------------------------------------------------------------------------------


class _Held(Quick):
    """Gives no checkpoint its name before the training lets it: once for each."""

    def __init__(self) -> None:
        self.go = threading.Semaphore(0)
        self.commits = 0

    def rename(self, source: str, target: str) -> None:
        if "_tmp-" in source and "_tmp-" not in target:
            self.commits += 1
            assert threading.current_thread() is not threading.main_thread()
            assert self.go.acquire(timeout=240)
        super().rename(source, target)


@isolated
# Lightning keeps several by a metric only.
@pytest.mark.parametrize(("kind", "keep"), [("hf", 1), ("hf", 2), ("lightning", 1)])
def test_training_goes_on_while_a_checkpoint_is_written(kind: str, keep: int, tmp_path: Path) -> None:
    """The checkpoint that it replaces stays until it is complete."""
    options: dict[str, Any] = {"dropout": 0.4, "save_every": 2, "keep": keep}
    expected = train(kind, tmp_path / "sync", **options)
    held, folder = _Held(), tmp_path / "async"
    seen: list[tuple[int, list[int]]] = []
    use_storage(held)

    def let_go(moment: Moment) -> None:
        if moment.step % 2 == 1:
            seen.append((moment.step, saved_steps(folder)))
            if moment.step > 1:
                held.go.release()
        if moment.step == 8:
            # For the last save, which the end of the training waits for.
            held.go.release()

    actual = train(kind, folder, checkpoint={"asynchronous": True}, at={"step end": let_go}, **options)
    assert seen == [(1, []), (3, []), (5, [2]), (7, [4] if keep == 1 else [2, 4])]
    assert held.commits == 4
    assert actual.losses == expected.losses
    assert actual.counts.compiles == 0, actual.program.events
    assert saved_steps(folder) == saved_steps(tmp_path / "sync") == [6, 8][-keep:]
    for step in saved_steps(folder):
        one, other = (contents(checkpoint(kind, tmp_path / name, step)) for name in ("sync", "async"))
        assert one == other
    if keep == 2:
        held.go.release()
        again = {**options, "seed": 1, "checkpoint": {"asynchronous": True}}
        assert train(kind, folder, resume=checkpoint(kind, folder, 6), **again).losses == expected.losses[6:]


class _Full(Quick):
    """A disk that is full at the second checkpoint."""

    def write(self, path: str, *args: Any) -> None:
        if "checkpoint-4" in path or "step=4" in path:
            raise OSError(28, "No space left on device")
        super().write(path, *args)


@isolated
@each_trainer
@pytest.mark.parametrize("steps", [8, 5], ids=["at the next save", "at the end"])
def test_a_save_that_fails_in_the_background_is_raised(kind: str, steps: int, tmp_path: Path) -> None:
    use_storage(_Full())
    done: list[int] = []
    with pytest.raises(CheckpointWriteError, match="No space left on device"):
        train(
            kind,
            tmp_path,
            checkpoint={"asynchronous": True},
            steps=steps,
            save_every=2,
            keep=1,
            at={"step end": lambda moment: done.append(moment.step)},
        )
    # Lightning looks at a save that is over before it removes the checkpoint that it replaced.
    assert done[-1] in ((5, 6) if kind == "lightning" else (min(steps, 6),))
    # The checkpoint before the failed one stays.
    assert saved_steps(tmp_path) == [2]
    assert not list(tmp_path.glob("_tmp-*"))


# ---- when it is due ----------------------------------------------------------------------------------


def saved_on_schedule(kind: str, folder: Path) -> list[int]:
    """The steps of what the schedule, or a signal, saved. Lightning has one name for it."""
    if kind == "hf":
        return saved_steps(folder)
    return [CheckpointStore(folder).load(ON_SCHEDULE).step] if (folder / ON_SCHEDULE).exists() else []


@isolated
@each_trainer
def test_after_steps_and_after_time(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(kind, tmp_path / "steps", checkpoint=CheckpointConfig(every_n_steps=3))
    assert saved_on_schedule(kind, tmp_path / "steps") == ([3, 6] if kind == "hf" else [6])
    now = [0.0]

    def wait(moment: Moment) -> None:
        now[0] += 1.5 if moment.step == 5 else 0

    init: Any = SaveSchedule.__init__
    monkeypatch.setitem(init.__kwdefaults__, "clock", lambda: now[0])
    cases: list[tuple[float, list[int]]] = [(1.6, []), (1.4, [5])]
    for seconds, expected in cases:
        folder = tmp_path / str(seconds)
        train(kind, folder, checkpoint=CheckpointConfig(every=timedelta(seconds=seconds)), at={"step begin": wait})
        assert saved_on_schedule(kind, folder) == expected


# ---- before the end ----------------------------------------------------------------------------------


def _send(moment: Moment) -> None:
    """Twice, for the third step."""
    if moment.step == 3:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)


def _kill(moment: Moment) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _preempted(kind: str, folder: Path, at: dict[str, Any], config: dict[str, Any], **options: Any) -> None:
    """Trains, and ends this process as the training wants to end it."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        train(kind, folder, checkpoint=CheckpointConfig(save_on="preemption", **config), at=at, dropout=0.4, **options)
    except SystemExit as ended:
        assert signal.getsignal(signal.SIGTERM) is before
        sys.stdout.flush()
        os._exit(int(str(ended.code)))


@functools.cache
def _left_alone(kind: str) -> tuple[list[float], list[float]]:
    """The losses, and those of the evaluations."""

    def child() -> Any:
        with tempfile.TemporaryDirectory() as folder:
            alone = train(kind, Path(folder), dropout=0.4, evaluate_every=3)
        return alone.losses, alone.evaluations

    losses, evaluations = run_in_child(child)
    assert (len(losses), len(evaluations)) == (8, 3 if kind == "hf" else 2)
    return losses, evaluations


@half(
    place=["load", "forward", "update", "save", "step end", "evaluation"],
    kind=["hf", "lightning"],
    asynchronous=[False, True],
)
def test_a_signal_ends_the_training_at_the_end_of_the_step(
    kind: str, place: str, asynchronous: bool, tmp_path: Path
) -> None:
    evaluating = {"evaluate_every": 3} if place == "evaluation" else {}
    saving = {"save_every": 3} if place == "save" else {}

    def child() -> None:
        _preempted(kind, tmp_path, {place: _send}, {"asynchronous": asynchronous}, **evaluating, **saving)

    def rest() -> Any:
        again = train(kind, tmp_path, checkpoint={}, dropout=0.4, seed=1, resume=True, **evaluating)
        return again.losses, again.evaluations, len(again.counted)

    outcome = outcome_of(child)
    assert outcome.error == "the process died with exit code 143", f"{outcome.error}\n{outcome.output}"
    assert saved_on_schedule(kind, tmp_path) == [3]
    losses, evaluations, steps = run_in_child(rest)
    assert steps == 5
    assert losses == _left_alone(kind)[0][3:]
    assert evaluations == (_left_alone(kind)[1][1:] if evaluating else [])


@isolated
@each_trainer
def test_the_sync_point_of_a_tpu_ends_the_training(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(get_runtime().device), "preemption_sync_point", lambda self: lambda step: step == 3)
    with pytest.raises(SystemExit) as ended:
        train(kind, tmp_path, checkpoint={"save_on": "preemption"})
    assert ended.value.code == 143
    assert saved_on_schedule(kind, tmp_path) == [3]


def test_a_signal_before_an_evaluation_saves_before_it(tmp_path: Path) -> None:
    """And again after it. If the process is killed during the evaluation, the first checkpoint is there."""
    outcome = outcome_of(
        lambda: _preempted("hf", tmp_path, {"forward": _send, "evaluation": _kill}, {}, evaluate_every=3)
    )
    assert outcome.error == "the process died with signal 9", f"{outcome.error}\n{outcome.output}"
    assert saved_on_schedule("hf", tmp_path) == [3]


@each_trainer
def test_a_kill_after_the_signal_leaves_what_was_there(kind: str, tmp_path: Path) -> None:
    """The process is killed while it saves, as after the grace period of a preemption."""

    def kill(moment: Moment) -> None:
        if moment.step == 3:
            _kill(moment)

    outcome = outcome_of(lambda: _preempted(kind, tmp_path, {"forward": _send, "save": kill}, {}, save_every=2))
    assert outcome.error == "the process died with signal 9", f"{outcome.error}\n{outcome.output}"
    assert saved_steps(tmp_path) == [2]
    path = checkpoint(kind, tmp_path, 2)
    rest = run_in_child(lambda: train(kind, tmp_path / "rest", dropout=0.4, seed=1, resume=path).losses)
    assert rest == _left_alone(kind)[0][2:]


@each_trainer
def test_after_the_deadline_no_save_is_begun(kind: str, tmp_path: Path) -> None:
    def late(moment: Moment) -> None:
        _send(moment)
        time.sleep(0.3 if moment.step == 3 else 0)

    config = {"preemption_deadline": timedelta(seconds=0.2), "preemption_exit_code": 75}
    outcome = outcome_of(lambda: _preempted(kind, tmp_path, {"forward": late}, config, save_every=2))
    assert outcome.error == "the process died with exit code 75", f"{outcome.error}\n{outcome.output}"
    assert saved_steps(tmp_path) == [2]
    assert not (tmp_path / ON_SCHEDULE).exists()


# ---- what hangs --------------------------------------------------------------------------------------


@isolated
@each_trainer
@pytest.mark.parametrize(
    ("place", "what"),
    [
        ("load", {"hf": "step [34]", "lightning": "loading of the batch"}),
        ("forward", {"hf": "step 3", "lightning": "step 3"}),
        ("save", {"hf": "the save of checkpoint 'checkpoint-2'", "lightning": "save of checkpoint"}),
        ("evaluation", {"hf": "a step of the evaluation", "lightning": "valid"}),
    ],
)
def test_a_hang_ends_with_an_error(
    kind: str, place: str, what: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    time_of_hangs.use_it(monkeypatch)
    at: dict[str, Callable[[Moment], object]] = {
        place: lambda moment: (
            time_of_hangs.hang() if moment.step >= (2 if place in ("save", "evaluation") else 3) else None
        )
    }
    options: dict[str, Any] = {"stall_deadline": timedelta(hours=1)}
    if kind == "lightning" and place == "save":
        # Lightning calls its hook before anything is written: here the file does not come to an end.
        at, options["asynchronous"] = {}, True
        use_storage(_Hangs())
    with pytest.raises(StallError, match=what[kind]):
        train(kind, tmp_path, checkpoint=CheckpointConfig(**options), at=at, save_every=2, evaluate_every=2)


class _Hangs(Quick):
    def fsync(self, path: str) -> None:
        time_of_hangs.hang()
