"""`PreflightReport`: what the steps of a training need on a slice of TPUs, as text, as HTML and as plain values."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from xla_adapters.sharding import UNITS_NOTE, CollectiveCost, human_bytes, human_seconds, table
from xla_adapters.tools.tpu_compiler import DeviceMemory, LiveValue
from xla_adapters.utils.pages import page


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Times that bound a step, in seconds. Nothing was run: figures of the program over figures of the device.

    Attributes:
        compute: operations over the peak of the device's matrix unit.
        memory: bytes that operations access over the bandwidth of the device's memory.
        interconnect: bytes that collectives send over the bandwidth of the links.
    """

    compute: float
    memory: float
    interconnect: float

    @property
    def least(self) -> float:
        """The longest of the three: all else overlaps with it."""
        return max(self.compute, self.memory, self.interconnect)

    @property
    def most(self) -> float:
        """Their sum: nothing overlaps."""
        return self.compute + self.memory + self.interconnect

    @property
    def bound(self) -> str:
        """Which of the three is the longest."""
        times = dataclasses.asdict(self)
        return max(times, key=lambda name: times[name])


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """A variant of a step that does not fit.

    Attributes:
        change: what is different from the step that was asked for.
        fits: whether it does; None if that is not known.
        needed_bytes: of a device's memory; 0 if not known.
        problem: why there is no program, if there is none.
    """

    change: str
    fits: bool | None
    needed_bytes: int = 0
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What the TPU compiler made of a step; sizes and times are per device and step.

    Attributes:
        step: what was compiled, in words.
        topology: for which slice.
        batch: of all devices, in words.
        device: of the slice, by its own name.
        compiler: which libtpu.
        hbm_bytes: memory of a device that programs may use; 0 if not known.
        problem: why there is no program; empty if there is one.
        out_of_memory: whether the reason is the device's memory.
        memory: of the program; None if there is none.
        needed_bytes: of a device's memory, also of a program that does not fit; 0 if not known.
        largest: the largest values in a device's memory.
        flops: operations.
        bytes_accessed: bytes that operations read and write.
        collectives: by kind and axis of the mesh.
        time: None if there is no program.
        trace_seconds, compile_seconds: what the pre-flight itself took.
    """

    step: str
    topology: str
    batch: str = ""
    device: str = ""
    compiler: str = ""
    hbm_bytes: int = 0
    problem: str = ""
    out_of_memory: bool = False
    memory: DeviceMemory | None = None
    needed_bytes: int = 0
    largest: tuple[LiveValue, ...] = ()
    flops: float = 0.0
    bytes_accessed: float = 0.0
    collectives: tuple[CollectiveCost, ...] = ()
    time: StepTime | None = None
    trace_seconds: float = 0.0
    compile_seconds: float = 0.0

    @property
    def fits(self) -> bool | None:
        """Whether it fits the memory of a device; None if that is not known: there is no program."""
        if self.memory is not None:
            return self.needed_bytes <= self.hbm_bytes
        return False if self.out_of_memory else None

    @property
    def wire_bytes(self) -> float:
        """Bytes that each device sends."""
        return sum(item.wire_bytes for item in self.collectives)

    def as_values(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        values = dataclasses.asdict(self)
        values |= {"fits": self.fits, "wire_bytes": self.wire_bytes}
        if self.time is not None:
            values["time"] |= {"least": self.time.least, "most": self.time.most, "bound": self.time.bound}
        return values

    def text(self, *, width: int = 110) -> str:
        """The report for people.

        Args:
            width: the maximal number of characters per line of tables.
        """
        lines = [f"{self.step} on {self.topology}", self._verdict()]
        if self.compiler:
            lines.append(f"Compiled for {self.device} by {self.compiler}; {UNITS_NOTE}")
        if self.batch:
            lines.append(f"Batch of all devices: {self.batch}")
        for part in (self._memory(width), self._largest(width), self._collectives(width), self._time(width)):
            lines += ["", *part] if part else []
        if self.memory is not None:
            lines += [
                "",
                f"Traced in {self.trace_seconds:.1f} s, compiled in {self.compile_seconds:.1f} s. Nothing ran.",
            ]
        return "\n".join(lines)

    def _verdict(self) -> str:
        if self.fits:
            share = self.needed_bytes / self.hbm_bytes
            return (
                f"FITS: {human_bytes(self.needed_bytes)} of {human_bytes(self.hbm_bytes)} on each device ({share:.0%})"
            )
        if self.out_of_memory or self.memory is not None:
            needed = f"about {human_bytes(self.needed_bytes)}" if self.needed_bytes else "more"
            return f"DOES NOT FIT: {needed} of {human_bytes(self.hbm_bytes)} on each device. {self.problem}".rstrip()
        return f"DOES NOT COMPILE: {self.problem}"

    def _memory(self, width: int) -> list[str]:
        if self.memory is None:
            return []
        memory = self.memory
        rows = [
            ("arguments (parameters, optimizer state, batch)", memory.arguments),
            ("results that are not in the place of an argument", memory.outputs - memory.aliased),
            ("temporary values", memory.temporaries),
            ("program", memory.code),
            ("total", memory.needed),
        ]
        cells = [[name, human_bytes(size)] for name, size in rows]
        return ["Memory of each device", *table(["what", "bytes"], cells, width=width, right=[1])]

    def _largest(self, width: int) -> list[str]:
        if not self.largest:
            return []
        rows = [[human_bytes(item.bytes), item.shape, item.name, item.line] for item in self.largest]
        title = "Largest values on each device (temporary ones may take the same place one after the other)"
        return [title, *table(["bytes", "shape", "value", "made at"], rows, width=width, right=[0])]

    def _collectives(self, width: int) -> list[str]:
        rows = [
            [item.kind, item.axis, f"{item.count:,}", human_bytes(item.wire_bytes), human_seconds(item.seconds)]
            for item in self.collectives
        ]
        if not rows:
            return []
        header = ["kind", "over", "count", "sent", "time"]
        return ["Collectives of a step", *table(header, rows, width=width, right=[2, 3, 4])]

    def _time(self, width: int) -> list[str]:
        if self.time is None:
            return []
        time = self.time
        rows = [
            ["compute", f"{self.flops:.3g} operations", human_seconds(time.compute)],
            ["memory", human_bytes(self.bytes_accessed), human_seconds(time.memory)],
            ["interconnect", human_bytes(self.wire_bytes), human_seconds(time.interconnect)],
        ]
        return [
            f"Step time, predicted: {human_seconds(time.least)} if all overlaps with {time.bound}, "
            f"{human_seconds(time.most)} if nothing does",
            *table(["bound", "amount", "time at the published peak"], rows, width=width, right=[1, 2]),
        ]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What is known of a step that was traced and not compiled.

    Attributes:
        step: which one.
        argument_bytes: of parameters, state and batch on one device, without padding.
        flops: of matrix products and convolutions on one device; None if not known.
        seconds: these at the published peak of the device; None if not known.
    """

    step: str
    argument_bytes: int
    flops: float | None
    seconds: float | None


@dataclass(frozen=True, kw_only=True)
class SavedPrograms:
    """Programs that were compiled ahead, for runs on the slice.

    Attributes:
        folder: where they are.
        saved: how many.
        failed: why others are not there, by the compiler.
        problem: why there is none; empty if there are.
        seconds: what it took.
    """

    folder: str
    saved: int = 0
    failed: tuple[str, ...] = ()
    problem: str = ""
    seconds: float = 0.0

    @property
    def is_complete(self) -> bool:
        """Whether all are there."""
        return not self.problem and not self.failed

    def __str__(self) -> str:
        if self.problem:
            return f"NO PROGRAM SAVED: {self.problem}"
        text = f"SAVED {self.saved} programs in {self.folder}, in {self.seconds:.0f} s: a run loads them by cache_dir="
        return "\n".join([text, *(f"NOT SAVED: {reason}" for reason in self.failed)])


@dataclass(frozen=True, kw_only=True)
class PreflightReport:
    """What a training needs on a slice of TPUs.

    Attributes:
        what: the script, the trainer or the model.
        topology: the slice.
        graphs: of each graph of the run: the training step first, then micro batches without an update, then the
            evaluation step.
        problem: why there is no graph, or not all; empty if there is none.
        notes: what was changed for the pre-flight, in words.
        estimates: of each graph, if nothing was compiled.
        hbm_bytes: memory of a device, for the estimates.
        attempts: what was tried because a step of a model does not fit, in this order.
        programs: what was saved for runs on the slice; None if that was not asked for.
    """

    what: str
    topology: str
    graphs: tuple[StepReport, ...] = ()
    problem: str = ""
    notes: tuple[str, ...] = ()
    estimates: tuple[Estimate, ...] = ()
    hbm_bytes: int = 0
    attempts: tuple[Attempt, ...] = ()
    programs: SavedPrograms | None = None

    @property
    def needed_bytes(self) -> int:
        """Of a device's memory, by the largest of its graphs; 0 if not known.

        What the training step is given (parameters, optimizer state) stays there while other graphs run.
        """
        held = [graph.memory.arguments for graph in self.graphs if graph.memory is not None]
        return max((self._needed(graph, max(held, default=0)) for graph in self.graphs), default=0)

    @property
    def fits(self) -> bool | None:
        """Whether all graphs fit the memory of a device beside the state of the training; None if that is not known."""
        if any(graph.fits is False for graph in self.graphs):
            return False
        if not self.graphs or any(graph.memory is None for graph in self.graphs):
            return None
        if self.needed_bytes > self.graphs[0].hbm_bytes:
            return False
        return None if self.problem else True

    @property
    def status(self) -> int:
        """Exit status: 0 it fits, 1 it does not, 2 it cannot be said, or not all programs were saved."""
        if self.fits:
            return 0 if self.programs is None or self.programs.is_complete else 2
        return 2 if self.fits is None else 1

    def as_values(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "what": self.what,
            "topology": self.topology,
            "fits": self.fits,
            "needed_bytes": self.needed_bytes,
            "problem": self.problem,
            "notes": list(self.notes),
            "graphs": [graph.as_values() for graph in self.graphs],
            "estimates": [dataclasses.asdict(estimate) for estimate in self.estimates],
            "attempts": [dataclasses.asdict(attempt) for attempt in self.attempts],
            "programs": None if self.programs is None else dataclasses.asdict(self.programs),
        }

    def text(self, *, width: int = 110) -> str:
        """The report for people.

        Args:
            width: the maximal number of characters per line of tables.
        """
        lines = [f"{self.what} on {self.topology}", self.verdict]
        lines += [f"  put in for the pre-flight: {note}" for note in self.notes]
        if self.estimates:
            lines += ["", *self.estimate_lines(width)]
        for graph in self.graphs:
            lines += ["", graph.text(width=width)]
        if self.attempts:
            lines += ["", *self.attempt_lines(width)]
        if self.programs is not None:
            lines += ["", str(self.programs)]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()

    def section(self) -> str:
        """Notes, estimates and each graph as HTML, without a title."""
        return page("tools/preflight.html", report=self, alone=False)

    def page(self) -> str:
        """One HTML file, without scripts and without anything from elsewhere."""
        return page("tools/preflight.html", report=self, alone=True)

    @staticmethod
    def _needed(graph: StepReport, held: int) -> int:
        if graph.memory is None:
            return graph.needed_bytes
        return graph.memory.needed - graph.memory.arguments + held

    @property
    def verdict(self) -> str:
        """Whether it fits, in a line."""
        if self.problem:
            return f"{'NOT COMPILED' if not self.graphs else 'NOT ALL COMPILED'}: {self.problem}"
        known = f"{human_bytes(self.needed_bytes)} of {human_bytes(self.graphs[0].hbm_bytes)} on each device"
        if self.fits:
            return f"FITS: {known}, with {len(self.graphs)} {'graph' if len(self.graphs) == 1 else 'graphs'}"
        if all(graph.memory is not None or graph.out_of_memory for graph in self.graphs):
            return f"DOES NOT FIT: {known}"
        return "DOES NOT COMPILE: see the graphs below"

    def estimate_lines(self, width: int) -> list[str]:
        """The estimates as lines of a table."""
        rows = [
            [
                item.step,
                human_bytes(item.argument_bytes),
                "unknown" if item.flops is None else f"{item.flops:.3g}",
                "unknown" if item.seconds is None else human_seconds(item.seconds),
            ]
            for item in self.estimates
        ]
        title = (
            f"Estimated without a compiler, of {human_bytes(self.hbm_bytes)} on each device; temporary values, which "
            "are not known, come on top"
        )
        header = ["step", "arguments", "operations", "time at the peak"]
        return [title, *table(header, rows, width=width, right=[1, 2, 3])]

    def attempt_lines(self, width: int) -> list[str]:
        """The attempts as lines of a table."""
        rows = [
            [
                item.change,
                {True: "fits", False: "does not fit", None: "no program"}[item.fits],
                human_bytes(item.needed_bytes) if item.needed_bytes else "-",
                item.problem.partition("\n")[0][:200] if not item.needed_bytes else "",
            ]
            for item in self.attempts
        ]
        header = ["with", "result", "needs", "problem"]
        title = "What was tried instead, each with the changes before it"
        lines = [title, *table(header, rows, width=width, right=[2])]
        if not any(item.fits for item in self.attempts):
            lines.append("None of these fits: use a larger slice, or --sharding auto or 2d on it")
        return lines
