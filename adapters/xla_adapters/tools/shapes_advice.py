"""`advise_shapes`: how many lengths the batches of a script should have, from what compiles and padding cost here.

The script runs in a process of its own, with two lengths, until a few steps of each were timed.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shlex
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import numpy
import torch

from xla_adapters.config import XLAConfig
from xla_adapters.data.batches import sample_count
from xla_adapters.data.shapes import ShapeNotices, ShapePolicy, Shapes
from xla_adapters.errors import ConfigError
from xla_adapters.replay.step_program import StepProgram
from xla_adapters.runtime import get_runtime, prepare, runtime_name
from xla_adapters.tools.user_script import Hand, Stop, put_in, run_command, skipping_saves, warning_only
from xla_adapters.tracing.scope_report import ScopeReport
from xla_adapters.utils.child_process import Asked, ask
from xla_adapters.utils.location import location_of
from xla_adapters.utils.patching import wrapped

_LENGTH = re.compile(r"(\d+) long$")
# Steps of each length that are timed; the first after a compile do more than others.
_TIMED, _SKIPPED = 5, 2
# Steps after which the script is ended in any case; and if nothing is known of lengths.
_MOST_STEPS = 120
_WITHOUT_LENGTHS = 4
_MOST_BUCKETS = 16
_KEPT_OUTPUT = 4000
# Others within this of the least are as good, and the one with the fewest graphs is recommended.
_AS_GOOD = 0.02


@dataclass(kw_only=True)
class Timed:
    """What was seen of a script.

    Attributes:
        shapes: of its training; None if its lengths are not known.
        epochs: how often it reads its data.
        rows: samples in a batch.
        compiles: seconds of the compiles of its training steps, by length.
        steps: seconds of its training steps, by length, without compiles.
        notes: what was said of shapes, and what was replaced, in words.
        error: that ended the script, in words.
    """

    shapes: Shapes | None = None
    epochs: float = 1.0
    rows: int = 0
    compiles: dict[int, float] = field(default_factory=dict)
    steps: dict[int, list[float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    error: str = ""

    @property
    def is_enough(self) -> bool:
        """Whether steps of every length were timed."""
        enough = [length for length, seconds in self.steps.items() if len(seconds) >= _TIMED + _SKIPPED]
        return self.shapes is not None and len(enough) >= self.shapes.used


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What a number of lengths costs a training.

    Attributes:
        bounds: the lengths.
        waste: the share of padding.
        compiling: seconds.
        stepping: seconds.
    """

    bounds: tuple[int, ...]
    waste: float
    compiling: float
    stepping: float

    @property
    def seconds(self) -> float:
        """In all."""
        return self.compiling + self.stepping


@dataclass(frozen=True, kw_only=True)
class ShapesAdvice:
    """What lengths are recommended, and why.

    Attributes:
        command: the script.
        device: that it was timed on, in words.
        epochs: how often the data is read.
        compile_seconds: of one length.
        seconds_per_step: of the shortest and of the longest of two lengths, with these.
        costs: of 1, 2, 3 ... lengths.
        notes: what was said of shapes, and what was replaced, in words.
    """

    command: str
    device: str
    epochs: float
    compile_seconds: float
    seconds_per_step: dict[int, float]
    costs: Sequence[Costs]
    notes: Sequence[str] = ()

    @property
    def best(self) -> Costs:
        """The fewest lengths that cost as little as any."""
        least = min(cost.seconds for cost in self.costs)
        return next(cost for cost in self.costs if cost.seconds <= (1 + _AS_GOOD) * least)

    def text(self) -> str:
        """All of it, in lines."""
        timed = ", ".join(f"{1000 * seconds:.1f} ms at {length}" for length, seconds in self.seconds_per_step.items())
        lines = [
            f"{self.command}: {self.epochs:.3g} epochs on {self.device}",
            f"a length costs {self.compile_seconds:.1f} s of compiles; a step takes {timed}",
            "",
            f"{'lengths':>7}  {'padding':>7}  {'compiles':>10}  {'steps':>10}  {'together':>10}",
        ]
        for cost in self.costs:
            mark = "  <- recommended" if cost is self.best else ""
            lines.append(
                f"{len(cost.bounds):7}  {cost.waste:7.0%}  {cost.compiling:8.1f} s  {cost.stepping:8.1f} s  "
                f"{cost.seconds:8.1f} s{mark}"
            )
        lines += [
            "",
            f"shapes={{'buckets': {len(self.best.bounds)}}}  (lengths {', '.join(map(str, self.best.bounds))})",
        ]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def as_values(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        listed = [
            {"bounds": cost.bounds, "waste": cost.waste, "compiling": cost.compiling, "stepping": cost.stepping}
            for cost in self.costs
        ]
        return {
            **{"command": self.command, "device": self.device, "epochs": self.epochs},
            **{"compile_seconds": self.compile_seconds, "seconds_per_step": self.seconds_per_step},
            **{"costs": listed, "recommended": len(self.best.bounds), "notes": list(self.notes)},
        }


def advise_shapes(
    command: Sequence[str],
    *,
    epochs: float | None = None,
    compile_seconds: float | None = None,
    timeout: float = 900,
    shows_output: bool = False,
) -> ShapesAdvice:
    """Runs the first steps of a script, and says how many lengths its batches should have.

    Args:
        command: the script and its arguments; or `-m`, a module and its arguments.
        epochs: how often the data is read; None for as often as the script does.
        compile_seconds: of one length, on another machine; None for what was measured.
        timeout: seconds after which the script is ended.
        shows_output: whether what it prints is shown.

    Raises:
        ConfigError: no runtime is installed, or the script failed, or has no lengths that can be chosen.
    """
    runtime_name()
    # What the folder of compiled programs has would cost nothing.
    environment = {**os.environ, "XLA_ADAPTERS_CACHE_DIR": "off", "WANDB_MODE": "disabled"}
    ended = ask(
        shapes_requested,
        json.dumps(list(command)).encode(),
        environment=environment,
        timeout=timeout,
        shows_output=shows_output,
    )
    shown = shlex.join(command)
    if not ended.answers:
        raise ConfigError(f"shapes: {shown} {ended.how}\n{ended.printed[-_KEPT_OUTPUT:]}")
    timed, device = pickle.loads(ended.answers[-1])
    if timed.error:
        raise ConfigError(f"shapes: {shown} failed: {timed.error}")
    if timed.shapes is None:
        why = "; ".join(timed.notes) or (
            "no trainer of hf_trainer or lightning_strategy has chosen lengths in it. A strategy needs shapes=; packed "
            "documents have one length"
        )
        raise ConfigError(f"shapes: nothing is known of the lengths that {shown} trains with: {why}")
    return _advice(timed, shown, device, epochs, compile_seconds)


def _advice(
    timed: Timed, command: str, device: str, epochs: float | None, compile_seconds: float | None
) -> ShapesAdvice:
    assert timed.shapes is not None
    times = {
        length: _usual(seconds[_SKIPPED:]) for length, seconds in sorted(timed.steps.items()) if len(seconds) > _SKIPPED
    }
    if len(times) < timed.shapes.used or not timed.compiles:
        raise ConfigError(
            f"shapes: {command} had too few steps of each of the lengths {', '.join(map(str, timed.shapes.bounds))} to "
            f"time them (timed: {', '.join(map(str, times)) or 'none'}): let it train longer"
        )
    each = sum(timed.compiles.values()) / len(timed.compiles) if compile_seconds is None else compile_seconds
    often = timed.epochs if epochs is None else epochs
    costs = costs_of(timed.shapes, max(1, timed.rows), often, each, _line_through(times))
    return ShapesAdvice(
        command=command,
        device=device,
        epochs=often,
        compile_seconds=each,
        seconds_per_step=times,
        costs=costs,
        notes=timed.notes,
    )


def _usual(seconds: Sequence[float]) -> float:
    """The mean without those in which something else was done, a save, say. Steps that accumulate are shorter."""
    most = 3 * statistics.median(seconds)
    return statistics.fmean(value for value in seconds if value <= most)


def _line_through(times: dict[int, float]) -> Callable[[int], float]:
    """Seconds of a step by its length: a line through the shortest and the longest that were timed.

    Below the shortest a step takes at least the share of its length.
    """
    (short, least), (long, most) = min(times.items()), max(times.items())
    slope = max(0.0, most - least) / (long - short) if long > short else 0.0
    return lambda length: max(least + slope * (length - short), least * min(1.0, length / short))


def costs_of(
    shapes: Shapes, rows: int, epochs: float, compile_seconds: float, seconds_of: Callable[[int], float]
) -> list[Costs]:
    """What 1, 2, 3 ... lengths cost, until more of them change nothing.

    Args:
        shapes: of the data, for any number of lengths.
        rows: samples in a batch.
        epochs: how often it is read.
        compile_seconds: of one length.
        seconds_of: a step of a length.
    """
    found: list[Costs] = []
    for number in range(1, _MOST_BUCKETS + 1):
        policy = ShapePolicy(buckets=number, pad_to_multiple_of=shapes.policy.pad_to_multiple_of)
        fitted = policy.fit(shapes.lengths, rows=rows)
        if len(fitted.bounds) < number:
            break
        batches = epochs * numpy.asarray(fitted.padded_samples) / numpy.asarray(fitted.rows_of)
        times = numpy.asarray([seconds_of(bound) for bound in fitted.bounds])
        found.append(
            Costs(
                bounds=fitted.bounds,
                waste=fitted.waste,
                compiling=compile_seconds * fitted.used,
                stepping=float(batches @ times),
            )
        )
    return found


# ---- the process of the script ----------------------------------------------------------------------


def shapes_requested(asked: Asked) -> None:
    """What the process of the script does: runs it, and answers with what was timed and the device."""
    command: list[str] = json.loads(asked.request)
    timed = Timed()
    watch = _Watch(timed)
    prepare()
    hand = Hand(
        folder=asked.folder,
        change=timed.notes.append,
        skip=lambda what: None,
        shapes={"buckets": 2},
        told_epochs=watch.told_epochs,
    )
    with ExitStack() as stack:
        stack.enter_context(watch.watching())
        stack.enter_context(skipping_saves(asked.folder, lambda what: None))
        stack.enter_context(put_in(hand))
        try:
            run_command(command)
        except Stop:
            pass
        except SystemExit as error:
            timed.error = "" if error.code in (None, 0) else f"it ended with the exit status {error.code}"
        except BaseException as error:  # noqa: BLE001 (it is reported)
            traceback.print_exception(error)
            where = location_of(error.__traceback__)
            timed.error = f"{type(error).__name__}: {error}" + (f" ({where})" if where else "")
    device = get_runtime().device
    asked.answer(pickle.dumps((timed, f"{device.count()} x {device.kind() or device.hardware()}")))


class _Watch:
    """Times the training steps of a script. What it replaces in this package is put back at the exit of `watching`."""

    def __init__(self, timed: Timed) -> None:
        self._timed = timed
        self._phase = ""
        self._steps = 0
        self._ended: float | None = None

    def told_epochs(self, epochs: float) -> None:
        self._timed.epochs = epochs

    def watching(self) -> Any:
        """A context in which steps are timed, and graph breaks are warnings."""
        return wrapped(
            (XLAConfig, "__post_init__", warning_only(self._timed.notes.append)),
            (ShapePolicy, "fit", self._fit),
            (ShapeNotices, "announce", self._announce),
            (ShapeNotices, "warn", self._warn),
            (StepProgram, "open", self._open),
            (StepProgram, "close", self._close),
        )

    def _fit(self, fit: Callable[..., Shapes]) -> Callable[..., Shapes]:
        def fitted(policy: ShapePolicy, *args: Any, **options: Any) -> Shapes:
            if policy.tokens_per_batch is not None:
                raise ConfigError("shapes: batches of as many tokens cannot be weighed: leave tokens_per_batch out")
            # Of what the script promises and asks for all stays but the lengths.
            return fit(replace(policy, buckets=2, max_waste=ShapePolicy.max_waste), *args, **options)

        return fitted

    def _announce(self, announce: Callable[..., None]) -> Callable[..., None]:
        def announced(notices: ShapeNotices, shapes: Shapes, of: str) -> None:
            # Not of evaluations, "loaders whose order stays".
            if self._timed.shapes is None and of.startswith(("training", "loader,")):
                self._timed.shapes = shapes
                if "stream" in of:
                    self._timed.notes.append(
                        f"of a stream {len(shapes.lengths)} samples were looked at, which are taken for an epoch"
                    )
                elif max(shapes.rows_of) == 1:
                    self._timed.notes.append(
                        "batches are not formed within buckets in this script (its order is not random, or its batches "
                        "have one sample): what is said is of batches that are"
                    )
            announce(notices, shapes, of)

        return announced

    def _warn(self, warn: Callable[..., None]) -> Callable[..., None]:
        def warned(notices: ShapeNotices, text: str) -> None:
            if text not in self._timed.notes:
                self._timed.notes.append(text)
            warn(notices, text)

        return warned

    def _open(self, opened: Callable[..., None]) -> Callable[..., None]:
        def open_program(program: StepProgram, **options: Any) -> None:
            self._phase = str(options.get("phase") or "")
            if torch.is_grad_enabled():
                self._timed.rows = max(self._timed.rows, sample_count(options.get("inputs")))
            opened(program, **options)

        return open_program

    def _close(self, closed: Callable[[StepProgram], ScopeReport]) -> Callable[[StepProgram], ScopeReport]:
        def close_program(program: StepProgram) -> ScopeReport:
            report = closed(program)
            if not torch.is_grad_enabled():
                # An evaluation: what it takes is no time of a training step.
                self._ended = None
                return report
            # A step has ended when its values are there.
            get_runtime().device.wait()
            now = time.perf_counter()
            began, self._ended = self._ended, now
            shapes = self._timed.shapes
            self._steps += 1
            if shapes is None and self._steps > _WITHOUT_LENGTHS:
                raise Stop
            if shapes is not None:
                self._note(shapes, report, None if began is None else now - began)
            return report

        return close_program

    def _note(self, shapes: Shapes, report: ScopeReport, seconds: float | None) -> None:
        found = _LENGTH.search(self._phase)
        if found is None and len(shapes.bounds) > 1:
            # A batch that keeps its length, of which nothing is to be learned.
            if self._steps >= _MOST_STEPS:
                raise Stop
            return
        length = int(found[1]) if found else shapes.bounds[-1]
        if report.compiles:
            known = self._timed.compiles
            known[length] = known.get(length, 0.0) + report.compile_seconds
        elif seconds is not None:
            self._timed.steps.setdefault(length, []).append(seconds)
        if self._timed.is_enough or self._steps >= _MOST_STEPS:
            raise Stop
