"""`PreflightReport`: what a step needs on a slice of TPUs, as text and as plain values."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from xla_adapters.preflight.compiler import DeviceMemory
from xla_adapters.preflight.live_values import LiveValue
from xla_adapters.sharding import UNITS_NOTE, CollectiveCost, human_bytes, human_seconds, table


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
        fits: whether it does.
        needed_bytes: of a device's memory; 0 if not known.
        problem: why there is no program, if there is none.
    """

    change: str
    fits: bool
    needed_bytes: int = 0
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class PreflightReport:
    """What the TPU compiler made of a training step; sizes and times are per device and step.

    Attributes:
        step: what was compiled: model, batch, sharding, optimizer, dtype.
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
        attempts: what was tried because it does not fit, in this order.
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
    attempts: tuple[Attempt, ...] = field(default=())

    @property
    def fits(self) -> bool:
        """Whether there is a program, and it fits the memory of a device."""
        return self.memory is not None and self.needed_bytes <= self.hbm_bytes

    @property
    def status(self) -> int:
        """Exit status: 0 it fits, 1 it does not, 2 it cannot be said."""
        if self.fits:
            return 0
        return 1 if self.memory is not None or self.out_of_memory else 2

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
        if self.attempts:
            lines += ["", *self._attempts(width)]
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

    def _attempts(self, width: int) -> list[str]:
        rows = [
            [
                item.change,
                "fits" if item.fits else "does not fit" if item.needed_bytes or not item.problem else "no program",
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
