"""`run_interleaved`: runs several processes, of which one at a time computes.

Each run compiles once, and is then measured in blocks of steps that alternate with blocks of the other runs. So changes
in the load of the machine affect all runs in the same way.
"""

from __future__ import annotations

import functools
import os
import select
import time
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.children import Child, Outcome

# Called by a run to let the others compute; returns when it may continue.
Pause = Callable[[], None]


def run_interleaved(
    runs: Mapping[str, Callable[[Pause], Any]],
    rounds: int,
    *,
    timeout: float,
    say: Callable[[str], None],
) -> dict[str, Outcome]:
    """Runs functions in child processes, of which one at a time computes.

    Args:
        runs: functions by name; each must call its argument after the warm-up and after each block.
        rounds: number of blocks.
        timeout: seconds per block; a run that takes longer is killed.
        say: called with progress messages.

    Returns:
        The outcome of each run by name.
    """
    players = {name: _Player(function) for name, function in runs.items()}
    outcomes: dict[str, Outcome] = {}
    try:
        for number in range(rounds + 2):
            # Every other round is in reverse order, since the first run finds a machine that has just rested.
            for name in list(runs) if number % 2 else reversed(list(runs)):
                if name in outcomes:
                    continue
                player, started = players[name], time.monotonic()
                player.play(timeout)
                if player.has_ended:
                    outcomes[name] = player.child_outcome()
                what = "warm-up" if number == 0 else "end" if number > rounds else f"round {number}/{rounds}"
                failed = f", {outcomes[name].short_error}" if name in outcomes and not outcomes[name].ok else ""
                say(f"{what}: {name}: {time.monotonic() - started:.1f} s{failed}")
    finally:
        for player in players.values():
            player.kill()
    return {name: outcomes[name] for name in runs}


class _Player:
    """The parent's side of one run; its process starts with its first block."""

    def __init__(self, function: Callable[[Pause], Any]) -> None:
        self._function = function
        self._child: Child | None = None
        self._go = self._done = -1
        self.has_ended = False

    def play(self, timeout: float) -> None:
        """Lets the run compute until it pauses or ends; kills it after `timeout` seconds."""
        if self._child is None:
            child_go, self._go = os.pipe()
            self._done, child_done = os.pipe()
            self._child = Child(functools.partial(_run, self._function, child_go, child_done, os.getpid()))
            os.close(child_go)
            os.close(child_done)
        else:
            os.write(self._go, b".")
        deadline = time.monotonic() + timeout
        # A child's end does not close the pipe if a later child has inherited it, so its status is polled, too.
        while not self._child.ended():
            if select.select([self._done], [], [], 0.01)[0] and os.read(self._done, 1):
                return
            if time.monotonic() > deadline:
                self._child.kill(f"still running after {timeout:.0f} s, killed")
        self.has_ended = True

    def child_outcome(self) -> Outcome:
        """The outcome, after the run has ended."""
        assert self._child is not None
        os.close(self._go)
        os.close(self._done)
        return self._child.outcome()

    def kill(self) -> None:
        """Kills the run if it has not ended."""
        if self._child is not None and not self.has_ended:
            self._child.kill("killed")


def _run(function: Callable[[Pause], Any], go: int, done: int, parent: int) -> Any:
    def pause() -> None:
        os.write(done, b".")
        # Other children keep the pipe open, so the parent's end is noticed by its process id.
        while not select.select([go], [], [], 2.0)[0]:
            if os.getppid() != parent:
                os._exit(1)
        os.read(go, 1)

    return function(pause)
