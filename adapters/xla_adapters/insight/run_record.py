"""`RunRecord` and `RunStats`: note during a training what its time goes to, and make the report of it."""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from xla_adapters.insight.run_report import Preflight, RunReport, StepSummary
from xla_adapters.insight.times import COMPILE, INPUT, KINDS, OTHER, SAVE, STEP, StepTimes, WallClock, stepping
from xla_adapters.insight.transfer_lines import TransferLines
from xla_adapters.replay.step_program import StepProgram
from xla_adapters.runtime import Metrics, get_runtime
from xla_adapters.sharding.planner import Topology
from xla_adapters.tracing.compile_events import CompileEvent, listening


def about(model: torch.nn.Module | None, trainer: str) -> dict[str, str]:
    """What a training is, for its report.

    Args:
        model: what is trained; None if it does not exist yet.
        trainer: the name of what trains it.
    """
    runtime = get_runtime()
    device = runtime.device
    kind = device.kind() or device.hardware()
    return {
        **_about_model(model),
        "trained by": trainer,
        "device": f"{device.count()} x {kind}" + (", SPMD" if device.is_spmd() else ""),
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "versions": ", ".join(f"{name} {version(name)}" for name in ("xla-adapters", "torch", runtime.name)),
    }


def _about_model(model: torch.nn.Module | None) -> dict[str, str]:
    parameters = sum(parameter.numel() for parameter in model.parameters()) if model is not None else 0
    return {"model": type(model).__name__ if model is not None else "a model", "parameters": f"{parameters:,}"}


# What PJRT calls the kinds of TPU, and what the planner calls them.
_TOPOLOGIES = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "tpu7x",
}


def peak_flops() -> float | None:
    """The bf16 FLOPs per second of all devices that work on a step together; None for devices that are not known."""
    device = get_runtime().device
    name = _TOPOLOGIES.get(device.kind())
    return None if name is None else Topology.preset(name).flops * (device.count() if device.is_spmd() else 1)


NAME = "xla-events.jsonl"


class EventFile:
    """A file to which a line is added for each event. It is created with the first event.

    Each line is one write to the end of the file, so that a run that is killed leaves whole lines, and runs that write
    into one folder do not mix theirs. A file that cannot be written is warned of once; the training goes on.

    Args:
        folder: of the run; None writes nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._descriptor: int | None = None

    @property
    def path(self) -> Path | None:
        """The file; None if nothing is written."""
        return None if self._folder is None else self._folder / NAME

    def write(self, event: str, values: dict[str, Any]) -> None:
        """Adds an event.

        Args:
            event: its name.
            values: what is known of it; must be JSON.
        """
        if self._folder is None:
            return
        line = json.dumps({"event": event, "time": time.time(), **values}) + "\n"
        try:
            os.write(self._open(self._folder), line.encode())
        except OSError as error:
            self._folder = None
            warnings.warn(f"{NAME}: no further events are written: {error}", stacklevel=2)

    def _open(self, folder: Path) -> int:
        if self._descriptor is None:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / NAME
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            size = os.fstat(self._descriptor).st_size
            # The machine of an earlier run may have stopped in the middle of a line.
            if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
                os.write(self._descriptor, b"\n")
        return self._descriptor

    def close(self) -> None:
        """Closes the file; a further event opens it again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


@dataclass
class RunStats:
    """Counts steps, samples, tokens and device counters between `start()` and `stop()`.

    Args:
        clock: returns monotonic seconds; replaced in tests.
        wall: divides the wall time of the training; None or one that does not run: only compiles are left out of rates.

    Attributes:
        steps, samples, tokens: counted so far.
        seconds: elapsed time; set by `stop()`.
        stepping: the part of it that rates are of.
        before, after: the device counters at `start()` and `stop()`.
    """

    clock: Callable[[], float] = time.perf_counter
    wall: WallClock | None = field(default=None, repr=False)
    steps: int = 0
    samples: int = 0
    tokens: int = 0
    seconds: float = 0.0
    stepping: float = 0.0
    before: Metrics | None = field(default=None, repr=False)
    after: Metrics | None = field(default=None, repr=False)
    _started: float = 0.0
    _last: RunStats | None = field(default=None, repr=False)

    def start(self) -> None:
        """Starts counting from zero."""
        self.steps = self.samples = self.tokens = 0
        self.before, self.after = get_runtime().counters.metrics(), None
        self._started = self.clock()
        self._last = None

    def count_step(self) -> None:
        """Counts one optimizer step."""
        self.steps += 1

    def count_batch(self, *, samples: int = 0, tokens: int = 0) -> None:
        """Adds the samples and tokens of one batch."""
        self.samples += samples
        self.tokens += tokens

    def stop(self) -> None:
        """Stops counting; waits for the device."""
        self.after = get_runtime().counters.metrics()
        self.seconds = self.clock() - self._started
        if self.wall is not None and self.wall.is_running:
            self.stepping = stepping(self.wall.update())
        elif self.before is not None:
            self.stepping = self.seconds - self.after.since(self.before)["compile_seconds"]

    def lap(self) -> dict[str, float]:
        """As `as_dict`, since the last `lap()` or since `start()`; waits for the device."""
        now = replace(self, _last=None)
        now.stop()
        last, self._last = self._last or RunStats(after=self.before), now
        names = ("steps", "samples", "tokens", "seconds", "stepping")
        counted = {name: getattr(now, name) - getattr(last, name) for name in names}
        return RunStats(before=last.after, after=now.after, **counted).as_dict()

    def as_dict(self) -> dict[str, float]:
        """The totals by name. Rates are per second of `stepping`. Empty before `stop()`."""
        if self.before is None or self.after is None:
            return {}
        counts = self.after.since(self.before)
        running = max(self.stepping, 1e-9)
        return {
            "steps": float(self.steps),
            **{
                name: float(counts[name])
                for name in ("compiles", "loads", "executions", "transfers_to_host", "eager_ops")
            },
            "seconds": self.seconds,
            "compile_seconds": counts["compile_seconds"],
            "steps_per_second": self.steps / running,
            "executions_per_step": counts["executions"] / max(self.steps, 1),
            **self.throughput(running),
        }

    def throughput(self, seconds: float) -> dict[str, float]:
        """Samples and tokens per second, if there were any in these seconds."""
        counted = {"samples_per_second": self.samples, "tokens_per_second": self.tokens}
        return {name: count / seconds for name, count in counted.items() if count}

    def summary(self) -> str:
        """The totals as a few lines of text."""
        totals = self.as_dict()
        if not totals:
            return "nothing was run"
        share = 100 * totals["compile_seconds"] / max(totals["seconds"], 1e-9)
        rows = [
            ("steps", f"{self.steps} in {totals['seconds']:.1f} s"),
            (
                "compiles",
                f"{totals['compiles']:.0f}" + (f" ({totals['loads']:.0f} programs loaded)" if totals["loads"] else ""),
            ),
            ("executions", f"{totals['executions']:.0f} ({totals['executions_per_step']:.2f} per step)"),
            ("transfers to host", f"{totals['transfers_to_host']:.0f}"),
            ("eager operations", f"{totals['eager_ops']:.0f}"),
            ("lost to compiling", f"{totals['compile_seconds']:.1f} s ({share:.0f}%)"),
        ]
        if self.tokens:
            rows.append(("throughput", f"{totals['tokens_per_second']:,.0f} tokens/s"))
        elif self.samples:
            rows.append(("throughput", f"{totals['samples_per_second']:,.1f} samples/s"))
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)


PAGE = "xla-report.html"


class _SoFar(NamedTuple):
    """What there was of a training when its loggers were told of it."""

    seconds: list[float]
    steps: int
    samples: int
    tokens: int
    compiles: int
    flops: float


class RunRecord:
    """Notes what one training does. It reads nothing from the device.

    An adapter switches `clock` where the loop begins something else, and calls the methods below.

    Args:
        stats: the adapter counts steps, samples and tokens there. Its rates are of the time of `clock`.
        enabled: False notes compiles only.

    Attributes:
        clock: divides the wall time.
        times: of the steps.
        stats: as given.
        events: the compiles of this process during the training.
        checkpoints: those that were saved: step, path and seconds.
        transfers: the lines that copied between host and device.
        is_running: whether a training is under way.
        preflight: the pre-flight that was made for it, if there was one.
    """

    def __init__(self, stats: RunStats, *, enabled: bool = True) -> None:
        self.enabled = enabled
        self.clock = WallClock()
        self.times = StepTimes(self.clock)
        self.stats = stats
        stats.wall = self.clock
        self.events: list[CompileEvent] = []
        self.checkpoints: list[dict[str, Any]] = []
        self.transfers = TransferLines()
        self.is_running = False
        self.preflight: Preflight | None = None
        self._about: dict[str, Any] = {}
        self._programs: Callable[[], Sequence[StepProgram]] = tuple
        self._training: Callable[[], Sequence[StepProgram]] = tuple
        self._plan: Callable[[], str] = str
        self._shapes: Callable[[], Sequence[dict[str, Any]]] = tuple
        self._before: Metrics | None = None
        self._after: Metrics | None = None
        self._cpu = self._flops_before = 0.0
        self._file = EventFile(None)
        self._final: RunReport | None = None
        self._logged: _SoFar | None = None

    # ---- a training ----------------------------------------------------------------------------

    @contextmanager
    def running(
        self,
        about: dict[str, Any],
        *,
        programs: Callable[[], Sequence[StepProgram]],
        training: Callable[[], Sequence[StepProgram]],
        folder: Path | None,
        plan: Callable[[], str] = str,
        shapes: Callable[[], Sequence[dict[str, Any]]] = tuple,
    ) -> Iterator[None]:
        """Around a training. At the exit, also by an exception, the report is written.

        Args:
            about: what is trained, for the report; must be JSON.
            programs: all steps of the training.
            training: those that compute updates.
            folder: for the files; None writes none.
            plan: how the model is sharded, in words; empty if it is not.
            shapes: of batches, as `Shapes.as_values` of the room `data`.
        """
        self._about, self._programs, self._training = about, programs, training
        self._plan, self._shapes = plan, shapes
        self.events, self.checkpoints, self._logged = [], [], None
        self._file = EventFile(folder if self.enabled else None)
        with ExitStack() as stack:
            stack.enter_context(listening(self._compiled))
            if self.enabled:
                stack.enter_context(self.transfers.noting())
            stack.callback(self._file.close)
            self._begin()
            try:
                yield
            except BaseException as error:
                self.failed(error)
                raise
            finally:
                self._end()

    def model_is_made(self, model: torch.nn.Module) -> None:
        """The training has made its model, which did not exist or was another one when the training began."""
        self._about = {**self._about, **_about_model(model)}

    def failed(self, error: BaseException) -> None:
        """An exception ends the training."""
        self._about = {**self._about, "ended by": f"{type(error).__name__}: {error}"}

    def _begin(self) -> None:
        self.is_running = True
        self._final = None
        self._before, self._after = get_runtime().counters.metrics(), None
        self._flops_before = self._flops()
        self._cpu = time.thread_time()
        self.stats.steps = self.stats.samples = self.stats.tokens = 0
        if self.enabled:
            self.clock.start()
        self.times.start()

    def _end(self) -> None:
        self._about = {**self._about, "ended by": self._about.get("ended by", "its last step")}
        with self.clock.during(STEP):
            # Waits for the steps under way.
            self._after = get_runtime().counters.metrics()
        self.clock.stop()
        report = self._final = self.report()
        self.is_running = False
        # They hold the state of the training.
        self._programs = self._training = tuple
        self._plan, self._shapes = str, tuple
        if self.enabled:
            self._file.write("end", report.as_dict())
        if self._file.path is not None:
            report.write_page(self._file.path.with_name(PAGE))

    def setup_ended(self) -> None:
        """The first step is about to begin."""
        self.clock.switch(OTHER)
        self.times.begin()

    def step_ended(self) -> None:
        """An optimizer step has ended."""
        if self.enabled:
            self.times.step_ended()
            self.transfers.step_ended(len(self.times.seconds))

    @contextmanager
    def saving(self, step: int, path: str) -> Iterator[None]:
        """Around the save of a checkpoint.

        Args:
            step: optimizer steps so far.
            path: where to.
        """
        began = time.perf_counter()
        with self.clock.during(SAVE):
            yield
        if self.is_running:
            saved = {"step": step, "path": path, "seconds": time.perf_counter() - began}
            self.checkpoints.append(saved)
            self._file.write("save", saved)

    def _compiled(self, event: CompileEvent) -> None:
        self.events.append(event)
        self.clock.move(event.seconds, COMPILE)
        self._file.write("compile", event.as_dict())

    # ---- what is known -------------------------------------------------------------------------

    def _flops(self) -> float:
        """Of all training steps so far."""
        return float(sum(program.flops for program in self._training()))

    def scalars(self) -> dict[str, float]:
        """What the time since the last call went to, for loggers; empty if nothing is recorded.

        `goodput` and `input_wait` are shares of the wall time. Rates leave out compiles, evaluations and saves.
        """
        if not self.clock.is_running:
            return {}
        stats = self.stats
        now = _SoFar(self.clock.update()[:], stats.steps, stats.samples, stats.tokens, len(self.events), self._flops())
        last = self._logged or _SoFar([0.0] * len(KINDS), 0, 0, 0, 0, self._flops_before)
        self._logged = now
        seconds = [after - before for after, before in zip(now.seconds, last.seconds, strict=True)]
        wall = sum(seconds)
        running = stepping(seconds)
        steps, samples, tokens = now.steps - last.steps, now.samples - last.samples, now.tokens - last.tokens
        if wall <= 0 or running <= 0 or not steps:
            return {}
        found = {
            "goodput": seconds[STEP] / wall,
            "input_wait": seconds[INPUT] / wall,
            "compiles": float(now.compiles - last.compiles),
            "compile_seconds": seconds[COMPILE],
            "seconds_per_step": running / steps,
        }
        if tokens:
            found["tokens_per_second"] = tokens / running
        elif samples:
            found["samples_per_second"] = samples / running
        peak = peak_flops()
        if peak is not None:
            found["mfu"] = (now.flops - last.flops) / running / peak
        return found

    def report(self) -> RunReport:
        """What the training has done so far, or did."""
        if self._final is not None:
            return self._final
        wall = dict(zip(KINDS, self.clock.update(), strict=True))
        device = get_runtime().device
        steps = [
            StepSummary(name=program.name, calls=program.calls, replays=program.replays, reasons=program.replay_reasons)
            for program in self._programs()
            if program.calls
        ]
        return RunReport(
            about=self._about,
            wall=wall,
            host_cpu_seconds=time.thread_time() - self._cpu,
            steps=self.times.as_dict(),
            curve=self.times.curve(),
            rates=self._rates(wall),
            counts=self._counts(),
            compiles=list(self.events),
            programs=steps,
            checkpoints=list(self.checkpoints),
            transfers=self.transfers.lines(),
            transfers_looked_at=self.transfers.looked_at,
            memory=device.memory_info() if device.started() else {},
            plan=self._plan(),
            shapes=list(self._shapes()),
            preflight=self.preflight,
        )

    def _counts(self) -> dict[str, int]:
        if self._before is None or self._after is None:
            return {}
        found = self._after.since(self._before)
        return {name: found[name] for name in found if name not in ("compile_seconds", "eager_compiles")}

    def _rates(self, wall: dict[str, float]) -> dict[str, float | None]:
        running = stepping(list(wall.values()))
        total = sum(wall.values())
        if not self.stats.steps or running <= 0:
            return {}
        flops = (self._flops() - self._flops_before) / running
        known = not any(program.without_flops for program in self._training())
        peak = peak_flops()
        rates: dict[str, float | None] = {
            "goodput": wall["steps"] / total,
            "steps_per_second": self.stats.steps / running,
            "flops_per_second": flops if known else None,
            "mfu": flops / peak if known and peak is not None else None,
        }
        return {**rates, **self.stats.throughput(running)}
