"""Processes that save together, and the watchdog that ends what takes too long."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed

from tests import children
from tests.checkpoint import time_of_hangs
from tests.isolation import isolated, outcome_of, run_in_child
from xla_adapters.checkpoint import CheckpointStore, TorchGroup, Watchdog
from xla_adapters.checkpoint.group import STALLED_EXIT_CODE
from xla_adapters.errors import CheckpointDamagedError, CheckpointError, CheckpointWriteError, ConfigError, StallError


def _rank(rank: int, folder: Path) -> list[str]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    root, said = folder / "run", []
    store = CheckpointStore(root, keep_last=2, group=TorchGroup())

    def write(path: Path) -> None:
        (path / f"rank-{rank}").write_text(str(rank))

    for step in (1, 2, 2, 3):
        said.append(store.save(step, write).name)

    def fail(path: Path) -> None:
        write(path)
        if rank == 1:
            raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointWriteError) as failed:
        store.save(4, fail)
    said.append(str(failed.value))
    if rank == 0:
        (root / "checkpoint-3" / "rank-1").unlink()
    said += [f"{found.name}" if (found := store.newest_valid()) else "none"]
    with pytest.raises(CheckpointError) as missing:
        store.load(3)
    said.append(str(missing.value))
    (root / "checkpoint-2" / "rank-0").write_text("9") if rank == 0 else None
    with pytest.raises((CheckpointDamagedError, CheckpointError)) as damaged:
        store.load(2)
    said.append(str(damaged.value))
    torch.distributed.destroy_process_group()
    return said


def test_two_processes(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda rank: run_in_child(partial(_rank, rank, tmp_path)), range(2))
    for said in (first, second):
        assert said[:4] == ["checkpoint-1", "checkpoint-2", "checkpoint-2", "checkpoint-3"]
        assert "No space left on device" in said[4]
        assert said[5] == "checkpoint-2"
        assert "there is no such checkpoint" in said[6]
        assert "rank-0 is not what was written" in said[7]
    assert "rank 1: [Errno 28]" in first[4]
    root = tmp_path / "run"
    assert sorted(path.name for path in root.iterdir()) == ["_damaged-checkpoint-3", "checkpoint-2"]
    assert {path.name for path in (root / "checkpoint-2").iterdir()} >= {"rank-0", "rank-1"}


def _renaming(rank: int, folder: Path) -> list[str]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)

    def write(path: Path) -> None:
        if rank == 0:
            # The other rank has written its files long ago when this one gives its file the final name.
            (path / ".part").write_text("0")
            time.sleep(1)
            (path / ".part").rename(path / "rank-0")
        else:
            while not (path / ".part").exists():
                time.sleep(0.01)
            (path / "rank-1").write_text("1")

    store = CheckpointStore(folder / "run", group=TorchGroup())
    storage: Any = type(store.storage)
    entries = storage.entries

    def slowly(self: Any, path: str) -> Any:
        found = entries(self, path)
        time.sleep(1.5 * rank)
        return found

    storage.entries = slowly
    saved = sorted(os.listdir(store.save(1, write).path))
    torch.distributed.destroy_process_group()
    return saved


def test_files_that_another_process_still_writes(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda rank: run_in_child(partial(_renaming, rank, tmp_path)), range(2))
    assert first == second
    assert {"rank-0", "rank-1"} <= set(first)


def test_several_processes_and_an_object_store() -> None:
    class Two:
        rank, size = 0, 2

        def gather(self, value: object) -> list[object]:
            return [value, value]

    with pytest.raises(ConfigError, match="file system they share"):
        CheckpointStore("memory://x", group=Two())


SOON = timedelta(seconds=0.2)
# Until the process is ended: all stacks must be printed before, on a busy machine, too.
GRACE = timedelta(seconds=3)
NEVER = timedelta(hours=1)


def hang_in_python() -> None:
    while True:
        time.sleep(0.01)


def run(function: Callable[[], Any], folder: Path) -> tuple[children.Outcome, str]:
    """Runs it in a child; how it ended, and all it printed to stderr."""
    printed = folder / "stderr"

    def child() -> Any:
        os.dup2(os.open(printed, os.O_WRONLY | os.O_CREAT), 2)
        return function()

    return outcome_of(child), printed.read_text()


def test_python_code_gets_an_error(tmp_path: Path) -> None:
    def child() -> str:
        with pytest.raises(StallError) as caught, Watchdog(SOON, grace=NEVER).watch("the save of step 7"):
            hang_in_python()
        # Nothing is left armed, or on its way.
        for _ in range(1000):
            time.sleep(0.0001)
        return str(caught.value)

    outcome, printed = run(child, tmp_path)
    assert outcome.ok, outcome.error
    assert outcome.value.startswith("the save of step 7 did not end within 0.2 s")
    assert "hang_in_python" in printed
    assert "the save of step 7 did not end" in printed


def test_native_code_ends_with_the_process(tmp_path: Path) -> None:
    def child() -> None:
        with Watchdog(SOON, grace=GRACE).watch("a barrier"):
            # One call that does not return: no Python code of this thread runs meanwhile.
            threading.Lock().acquire() and time.sleep(600)

    outcome, printed = run(child, tmp_path)
    assert outcome.error == f"the process died with exit code {STALLED_EXIT_CODE}"
    assert "a barrier did not end within 0.2 s" in printed
    assert "Timeout (" in printed, "what ended the process was not the watchdog"


def watched() -> list[str]:
    """What the watchdogs that run now watch."""
    names = [thread.name for thread in threading.enumerate()]
    return [name.removeprefix("watchdog of ") for name in names if name.startswith("watchdog of ")]


@isolated
def test_what_ends_in_time_is_left_alone() -> None:
    with Watchdog(NEVER).watch("a step"), Watchdog(None).watch("nothing"):
        assert watched() == ["a step"]
    assert watched() == []
    with pytest.raises(ValueError, match="mine"), Watchdog(NEVER).watch("a step"):
        raise ValueError("mine")


def test_the_outer_one_is_still_armed_behind_an_inner_one(tmp_path: Path) -> None:
    def child() -> None:
        with Watchdog(SOON, grace=GRACE).watch("the outer"):
            # On a busy machine the error of the outer one may come in the inner one already.
            with contextlib.suppress(BaseException), Watchdog(NEVER).watch("the inner"):
                pass
            time.sleep(600)

    outcome, printed = run(child, tmp_path)
    assert outcome.error == f"the process died with exit code {STALLED_EXIT_CODE}"
    assert "the outer did not end" in printed


def test_another_thread_is_watched_too() -> None:
    def child() -> list[str]:
        said: list[str] = []

        def save() -> None:
            try:
                with Watchdog(SOON, grace=NEVER).watch("a background save"):
                    hang_in_python()
            except StallError as error:
                said.append(str(error))

        thread = threading.Thread(target=save)
        thread.start()
        thread.join()
        return said

    outcome = outcome_of(child)
    assert len(outcome.value) == 1
    assert outcome.value[0].startswith("a background save")


def test_a_barrier_outside_of_saves(tmp_path: Path) -> None:
    """The other rank never asks."""

    def child(rank: int) -> None:
        torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=rank, world_size=2)
        if rank == 1:
            # Until the first is gone.
            torch.distributed.recv(torch.zeros(1), 0)
        group = TorchGroup(watchdog=Watchdog(SOON, grace=GRACE))
        CheckpointStore(tmp_path / "run", group=group).newest_valid()

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(outcome_of, partial(child, 1))
        outcome, printed = run(partial(child, 0), tmp_path)
        assert other.result().error is not None
    assert outcome.error == f"the process died with exit code {STALLED_EXIT_CODE}"
    assert "the barrier of rank 0 with 1 others did not end within 0.2 s" in printed


def test_a_save_that_hangs_is_discarded(tmp_path: Path) -> None:
    def child() -> list[str]:
        store = CheckpointStore(tmp_path / "run", watchdog=Watchdog(NEVER))
        store.save(1, lambda folder: (folder / "weights").touch())
        with pytest.MonkeyPatch.context() as patch:
            time_of_hangs.use_it(patch)
            with pytest.raises(StallError, match="the save of checkpoint 'checkpoint-2' did not end"):
                store.save(2, lambda folder: time_of_hangs.hang())
        return sorted(os.listdir(tmp_path / "run"))

    outcome, _ = run(child, tmp_path)
    assert outcome.value == ["checkpoint-1"], outcome.error
