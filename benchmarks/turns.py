"""Runs that take turns: all live at once, each in a process of its own, and one of them computes at a time.

What compiles for minutes is compiled once, and yet the runs are measured in blocks of steps that are
interleaved: a machine that is busy now and idle later is so for all of them.
"""

from __future__ import annotations

import functools
import os
import select
import time
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.children import Child, Outcome

# Gives the turn away, and returns when it is one's turn again.
PassOn = Callable[[], None]


def take_turns(
    runs: Mapping[str, Callable[[PassOn], Any]],
    rounds: int,
    *,
    timeout: float,
    say: Callable[[str], None],
) -> dict[str, Outcome]:
    """Runs functions side by side.

    Args:
        runs: by name; each calls what it is given once it is warmed up, and after each block.
        rounds: blocks of each.
        timeout: seconds that one turn may last; a run that takes longer is killed.
        say: told what has been done.

    Returns:
        How each ended.
    """
    players = {name: _Player(function) for name, function in runs.items()}
    outcomes: dict[str, Outcome] = {}
    try:
        for number in range(rounds + 2):
            # Every other round backwards: whoever comes first finds a machine that has just rested.
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
    """The parent's side of one run; it begins at its first turn."""

    def __init__(self, function: Callable[[PassOn], Any]) -> None:
        self._function = function
        self._child: Child | None = None
        self._go = self._done = -1
        self.has_ended = False

    def play(self, timeout: float) -> None:
        """Lets it run until it gives the turn back or ends."""
        if self._child is None:
            child_go, self._go = os.pipe()
            self._done, child_done = os.pipe()
            self._child = Child(functools.partial(_run, self._function, child_go, child_done, os.getpid()))
            os.close(child_go)
            os.close(child_done)
        else:
            os.write(self._go, b".")
        deadline = time.monotonic() + timeout
        # The end of a child closes its pipe only if no later child has inherited it: it is asked for, too.
        while not self._child.ended():
            if select.select([self._done], [], [], 0.01)[0] and os.read(self._done, 1):
                return
            if time.monotonic() > deadline:
                self._child.kill(f"still running after {timeout:.0f} s, killed")
        self.has_ended = True

    def child_outcome(self) -> Outcome:
        """How it ended."""
        assert self._child is not None
        os.close(self._go)
        os.close(self._done)
        return self._child.outcome()

    def kill(self) -> None:
        """Ends it if it runs still."""
        if self._child is not None and not self.has_ended:
            self._child.kill("killed")


def _run(function: Callable[[PassOn], Any], go: int, done: int, parent: int) -> Any:
    def pass_on() -> None:
        os.write(done, b".")
        # Other children hold the pipe open: that the parent is gone must be seen otherwise.
        while not select.select([go], [], [], 2.0)[0]:
            if os.getppid() != parent:
                os._exit(1)
        os.read(go, 1)

    return function(pass_on)
