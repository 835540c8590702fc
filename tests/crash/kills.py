"""Kills trainings at random moments, and flips bits of their checkpoints; `benchmarks.crash` does so at length."""

from __future__ import annotations

import random
import shutil
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tests.children import run_in_child
from tests.crash.killed_trainings import OURS, RUNS, STEPS, die_after, loads, losses

_TIMEOUT = 120
# A machine that is slow, or has other work to do, is no hang.
_DEADLINE_FACTOR = 6
# By SIGTERM where nobody handles it, as with Fabric.
_KILLED = ("the process died with signal 9", "the process died with signal 15")
_ENDED = "the process left with exit code 143"


@dataclass
class Result:
    """The counts for one kind of training.

    Attributes:
        kills: number of processes killed.
        in_a_save: kills during a save (known only for ours, which leave a temporary folder).
        ended: processes that saved and ended in time after SIGTERM.
        resumed, identical: kills after which the next process resumed, and with identical losses.
        bits, caught: bits flipped, and those that were noticed.
        seconds: median life of a process.
        errors: of processes that did not resume, each kind once.
    """

    run: str
    kills: int = 0
    in_a_save: int | None = None
    ended: int = 0
    resumed: int = 0
    identical: int = 0
    bits: int = 0
    caught: int = 0
    seconds: float = 0.0
    errors: list[str] = field(default_factory=list)


def whole(run: Callable[..., None], where: Path) -> tuple[dict[int, str], float]:
    """The losses of an undisturbed training, and the seconds from its first loss to its end.

    Raises:
        RuntimeError: the training failed.
    """
    journal = where / "whole.txt"

    def child() -> float:
        run(where / "whole", journal)
        return time.monotonic()

    journal.parent.mkdir(parents=True, exist_ok=True)
    seconds = []
    first: dict[int, str] = {}
    for _ in range(2):
        # Twice: the first run warms the disk's caches, and the second shows that the training is repeatable.
        shutil.rmtree(where / "whole", ignore_errors=True)
        journal.unlink(missing_ok=True)
        outcome = run_in_child(partial(_timed, child, journal), timeout=_TIMEOUT, deadline_factor=_DEADLINE_FACTOR)
        found = {noted.step: noted.loss for noted in losses(journal)}
        if not outcome.ok or sorted(found) != list(range(1, STEPS + 1)) or (first and found != first):
            raise RuntimeError(f"a training that nobody killed went wrong: {outcome.error}\n{outcome.output}")
        first = found
        seconds.append(outcome.value)
    return first, min(seconds)


def _timed(child: Callable[[], float], journal: Path) -> float:
    """Seconds from the first loss to the end; the journal file is created with the first loss."""
    born: list[float] = []

    def watch() -> None:
        while not journal.exists():
            time.sleep(0.001)
        born.append(time.monotonic())

    threading.Thread(target=watch, daemon=True).start()
    return child() - born[0]


def kill(name: str, kills: int, seed: int, where: Path, grace: float | None = None) -> Result:
    """Kills one kind of training repeatedly.

    Args:
        name: one of `RUNS`.
        kills: number of kills.
        seed: of the random moments.
        where: an empty folder.
        grace: most seconds between SIGTERM and SIGKILL; None sends only SIGKILL.
    """
    run, result, chosen = RUNS[name], Result(name), random.Random(seed)
    expected, lifetime = whole(run, where)
    life, lives, folder = 0, [], where / "0"
    # Whether the previous process was killed, so that this one shows whether it can resume.
    pending = False
    while result.kills < kills or pending:
        journal = where / f"{folder.name}.txt"
        seconds, last = chosen.random() * lifetime, result.kills >= kills
        start = journal.stat().st_size if journal.exists() else 0
        given = None if grace is None else chosen.random() * grace

        def child(
            folder: Path = folder,
            journal: Path = journal,
            seconds: float = seconds,
            given: float | None = given,
            last: bool = last,
        ) -> None:
            if not last:
                die_after(seconds, journal, grace=given)
            run(folder, journal)

        outcome = run_in_child(child, timeout=_TIMEOUT, deadline_factor=_DEADLINE_FACTOR)
        lives.append(outcome.seconds)
        ended = outcome.short_error == _ENDED
        was_killed = ended or outcome.error in _KILLED
        noted = losses(journal, start)
        identical = all(expected.get(loss.step) == loss.loss for loss in noted)
        resumed = outcome.ok or was_killed
        if pending:
            result.resumed += resumed
            result.identical += resumed and identical
        if not resumed and outcome.short_error not in result.errors:
            result.errors.append(outcome.short_error or "")
        result.kills += was_killed
        result.ended += ended
        if name in OURS:
            result.in_a_save = (result.in_a_save or 0) + (was_killed and any(folder.glob("_tmp-*/*")))
        pending = was_killed
        if outcome.ok or not resumed or not identical:
            life += 1
            folder = where / str(life)
            if was_killed:
                # The last kill is not counted, since no process resumes after it.
                result.kills -= 1
                result.ended -= ended
                pending = False
    result.seconds = statistics.median(lives)
    return result


def flip(name: str, bits: int, seed: int, where: Path) -> tuple[int, list[str]]:
    """Flips single bits of the last checkpoint; returns how many were noticed, and where the others were."""
    run, chosen = RUNS[name], random.Random(seed)
    folder = where / "whole"
    checkpoint = folder / "last.ckpt" if (folder / "last.ckpt").exists() else folder / f"checkpoint-{STEPS}"
    files = [checkpoint] if checkpoint.is_file() else sorted(path for path in checkpoint.rglob("*") if path.is_file())
    # Every file in turn: most bytes are weights.
    places = [(files[number % len(files)], chosen.random(), chosen.randrange(8)) for number in range(bits)]

    def child() -> list[str]:
        silent = []
        for file, part, bit in places:
            data = file.read_bytes()
            at = int(part * len(data))
            damaged = bytearray(data)
            damaged[at] ^= 1 << bit
            file.write_bytes(damaged)
            if loads(run, where / "scratch", checkpoint) is None:
                silent.append(f"byte {at} of {file.name}")
            file.write_bytes(data)
        return silent

    outcome = run_in_child(child, timeout=_TIMEOUT + 10 * bits, deadline_factor=_DEADLINE_FACTOR)
    if not outcome.ok:
        raise RuntimeError(f"{name}: {outcome.error}\n{outcome.output}")
    return bits - len(outcome.value), outcome.value
