"""`read_memory_report`: reads XLA's own report of the memory that a compiled program needs on each device."""

from __future__ import annotations

import re
from dataclasses import dataclass

from xla_adapters.errors import ConfigError

_ALLOCATION = re.compile(r"\ballocation (\d+): size ([\d.]+)\s*([KMGTP]i)?B?\s*([,:].*)$")
_TOTAL = re.compile(r"^\s*Total bytes used: (\d+)", re.MULTILINE)
_UNITS = {"": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """Bytes on one device by kind, from XLA's buffer assignment.

    Attributes:
        arguments: parameters of the program, including donated ones.
        outputs: results that do not reuse an argument's memory.
        temporaries: intermediate values.
        constants: constants of the program.
        thread_local: scratch memory of inner computations.
        reused: the part of `arguments` whose memory an output reuses (donated).
        total: as stated by XLA; None if the text does not have it.
        exact: False if the text gives sizes rounded to KiB, MiB or GiB.
    """

    arguments: int = 0
    outputs: int = 0
    temporaries: int = 0
    constants: int = 0
    thread_local: int = 0
    reused: int = 0
    total: int | None = None
    exact: bool = True

    @property
    def memory_bytes(self) -> int:
        """Arguments, outputs that do not reuse them, and temporary values."""
        return self.arguments + self.outputs + self.temporaries


def read_memory_report(text: str) -> MemoryReport:
    """Reads `*buffer-assignment.txt` (exact) or `*memory-usage-report.txt` (rounded) of an XLA dump.

    XLA writes both next to the optimised HLO with `XLA_FLAGS=--xla_dump_to=... --xla_dump_hlo_as_text`.

    Raises:
        ConfigError: the text has no allocation.
    """
    sizes: dict[str, int] = {}
    seen: set[int] = set()
    exact = True
    for line in text.splitlines():
        found = _ALLOCATION.search(line)
        # The usage report lists every allocation twice.
        if found is None or int(found.group(1)) in seen:
            continue
        seen.add(int(found.group(1)))
        unit = found.group(3) or ""
        exact = exact and not unit
        size = round(float(found.group(2)) * _UNITS[unit])
        kind = _kind(found.group(4))
        sizes[kind] = sizes.get(kind, 0) + size
        if kind == "arguments" and "maybe-live-out" in found.group(4):
            sizes["reused"] = sizes.get("reused", 0) + size
    if not seen:
        raise ConfigError(
            f"this is no memory report of XLA: it lists no allocation; it begins with {text[:60]!r}. Pass the text of "
            "*buffer-assignment.txt or *memory-usage-report.txt"
        )
    total = _TOTAL.search(text)
    return MemoryReport(**sizes, total=int(total.group(1)) if total else None, exact=exact)


def _kind(description: str) -> str:
    # With the comma, since the shape before it may contain any word.
    if ", parameter " in description:
        return "arguments"
    if ", thread-local" in description:
        return "thread_local"
    if ", constant" in description:
        return "constants"
    if ", maybe-live-out" in description or ", output shape" in description:
        return "outputs"
    return "temporaries"
