"""`largest_values`: which values take most of a device's memory, and the lines of Python that made them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_ALLOCATION = re.compile(r"^allocation \d+: size (\d+),(?: color (\d+),)? page \d+,? ?(.*)$")
_PARAMETER = re.compile(r"parameter (\d+)\b")
_VALUE = re.compile(r"^ value: <\d+ ([\w.\-]+)(?:\{[\d,]*\})? @0> \(size=(\d+),offset=\d+\): (\w+\[[\d,]*\])")
_METADATA = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = .*?\bmetadata=\{([^}]*)\}", re.MULTILINE)
_FIELD = re.compile(r'(\w+)=(?:"([^"]*)"|(\d+))')
# Frames of these say nothing to the user.
_MACHINERY = (
    *("/torch/", "/torch_xla/", "/xla_adapters/", "/hf_trainer/", "/lightning_strategy/", "<frozen"),
    *("/lightning/pytorch/", "/lightning/fabric/", "/accelerate/", "/transformers/trainer"),
)


@dataclass(frozen=True, kw_only=True)
class LiveValue:
    """A value in a device's memory.

    Attributes:
        name: of the parameter, state or batch tensor; for an intermediate value the operation that computes it.
        bytes: on one device, with padding.
        shape: on one device, e.g. `"f32[1024,256]"`.
        kind: `"argument"` or `"temporary"`.
        line: `file:line` of the Python that made it; empty if not known.
    """

    name: str
    bytes: int
    shape: str
    kind: str
    line: str = ""


def largest_values(text: str, buffers: str, names: Mapping[int, str], count: int = 10) -> list[LiveValue]:
    """The largest values in the memory of a device, largest first.

    Temporary values that take the same place one after the other are all listed.

    Args:
        text: the optimised program.
        buffers: XLA's text on buffers (`*-buffer-assignment.txt`).
        names: what each parameter of the program is, by its number.
        count: how many to return.
    """
    found = sorted(_values(buffers, names), key=lambda value: -value.bytes)[:count]
    frames, metadata = _Frames(text), dict(_METADATA.findall(text))
    return [value if value.kind == "argument" else _explained(value, metadata, frames) for value in found]


def memory_of(buffers: str) -> tuple[int, int]:
    """Bytes of arguments and of temporary values, by XLA's text on buffers; of a program that does not fit, too."""
    sizes = {"argument": 0, "temporary": 0}
    for line in buffers.splitlines():
        allocation = _ALLOCATION.match(line)
        if allocation is not None and (allocation.group(2) or "0") == "0":
            kind = _kind(allocation.group(3))
            if kind:
                sizes[kind] += int(allocation.group(1))
    return sizes["argument"], sizes["temporary"]


def _kind(what: str) -> str:
    if _PARAMETER.match(what) is not None:
        return "argument"
    return "temporary" if what.startswith("preallocated-temp") else ""


def _values(buffers: str, names: Mapping[int, str]) -> Iterator[LiveValue]:
    kind = ""
    for line in buffers.splitlines():
        allocation = _ALLOCATION.match(line)
        if allocation is not None:
            size, colour, what = allocation.groups()
            parameter = _PARAMETER.match(what)
            # Other colours are memories on the chip.
            kind = _kind(what) if (colour or "0") == "0" else ""
            if parameter is not None:
                number = int(parameter.group(1))
                shape = what.partition("|")[2].partition("|")[0]
                name = names.get(number, f"parameter {number}")
                yield LiveValue(name=name, bytes=int(size), shape=shape, kind="argument")
        elif kind == "temporary" and (value := _VALUE.match(line)) is not None:
            yield LiveValue(name=value.group(1), bytes=int(value.group(2)), shape=value.group(3), kind=kind)


def _explained(value: LiveValue, metadata: Mapping[str, str], frames: _Frames) -> LiveValue:
    fields = {name: text or number for name, text, number in _FIELD.findall(metadata.get(value.name, ""))}
    operation = fields.get("op_type", "")
    file, line = fields.get("source_file", ""), fields.get("source_line", "")
    where = frames.of_user(fields.get("stack_frame_id", ""), file, line)
    if "/torch/autograd/" in file:
        operation += " in the backward"
    elif "/torch/optim/" in file:
        operation += " in the optimizer's update"
    name = operation.replace("aten__", "").replace("xla__", "").strip() or value.name
    return LiveValue(name=name, bytes=value.bytes, shape=value.shape, kind=value.kind, line=where)


class _Frames:
    """The tables of stack frames at the beginning of HLO text."""

    def __init__(self, text: str) -> None:
        head = text.partition("\n\n%")[0]
        tables = {part.partition("\n")[0]: part.splitlines()[1:] for part in head.split("\n\n")}
        self._files = dict(self._entries(tables.get("FileNames", [])))
        self._locations = dict(self._entries(tables.get("FileLocations", [])))
        self._frames = dict(self._entries(tables.get("StackFrames", [])))

    @staticmethod
    def _entries(lines: list[str]) -> Iterator[tuple[int, str]]:
        for line in lines:
            number, _, rest = line.partition(" ")
            if number.isdigit():
                yield int(number), rest.strip('"')

    def of_user(self, frame: str, file: str, line: str) -> str:
        """`file:line` of the innermost frame that is neither torch's nor ours; empty if there is none."""
        at = int(frame) if frame else 0
        # Some versions count the frames from 0 here.
        if (file, line) != self._place(at)[:2]:
            at -= 1
        seen = 0
        while at in self._frames and seen < len(self._frames):
            found, number, parent = self._place(at)
            if found and not any(part in found for part in _MACHINERY):
                return f"{found}:{number}"
            # The text gives the parent's number plus one.
            at, seen = parent - 1, seen + 1
        return ""

    def _place(self, frame: int) -> tuple[str, str, int]:
        fields = {name: number for name, _, number in _FIELD.findall(self._frames.get(frame, ""))}
        location = self._locations.get(int(fields.get("file_location_id", 0)), "")
        place = {name: number for name, _, number in _FIELD.findall(location)}
        return (
            self._files.get(int(place.get("file_name_id", 0)), ""),
            place.get("line", ""),
            int(fields.get("parent_frame_id", 0)),
        )
