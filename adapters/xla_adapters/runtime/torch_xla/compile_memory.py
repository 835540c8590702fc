"""What torch_xla writes of each executable that it has compiled: the memory that this needs, by kind.

No call of torch_xla 2.9 returns it. `PT_XLA_DEBUG_LEVEL=1` has it written to `PT_XLA_DEBUG_FILE`, at compiles only.
"""

from __future__ import annotations

import logging
import os
import re

from xla_adapters.runtime.interface import CompiledMemory

logger = logging.getLogger("xla_adapters")

_FILE, _LEVEL = "PT_XLA_DEBUG_FILE", "PT_XLA_DEBUG_LEVEL"
# Inherited from a process that started this one.
_OURS = re.compile(r"/proc/\d+/fd/\d+")
# Its GB are of 1024 each; six digits of them are whole KiB, nearly.
_GIGABYTE = 1 << 30
_NUMBERS = re.compile(
    r"Graph input size: (\S+) GB.*?Graph output size: (\S+) GB.*?Aliased Input size: (\S+) GB.*?"
    r"Intermediate tensor size: (\S+) GB.*?Compiled program size: (\S+) GB",
    re.DOTALL,
)


class CompileMemory:
    """Reads what torch_xla writes. Call `start` before the runtime starts."""

    def __init__(self) -> None:
        self._file: int | None = None
        self._read = 0

    def start(self) -> None:
        """Has it written to memory, unless the user looks at what torch_xla writes.

        It leaves out what torch_xla prints of each execution that a step refuses, too: twelve lines without its cause.
        """
        if self._file is not None:
            return
        inherited = _OURS.fullmatch(os.environ.get(_FILE, "")) is not None
        if not inherited and any(os.environ.get(name) for name in ("PT_XLA_DEBUG", _LEVEL, _FILE)):
            return
        self._file = os.memfd_create("xla-adapters")
        os.environ[_FILE], os.environ[_LEVEL] = f"/proc/{os.getpid()}/fd/{self._file}", "1"
        logger.info(
            "%s and %s are set: what torch_xla says of each compile is kept for the report of the run. Set one of the "
            "variables yourself to see it",
            _FILE,
            _LEVEL,
        )

    def new(self) -> list[CompiledMemory]:
        """Of each executable compiled since the last call; empty where it is not known."""
        if self._file is None:
            return []
        size = os.fstat(self._file).st_size
        if size == self._read:
            return []
        text = os.pread(self._file, size - self._read, self._read).decode(errors="replace")
        self._read = size
        return [
            CompiledMemory(*(round(float(number) * _GIGABYTE) for number in numbers))
            for numbers in _NUMBERS.findall(text)
        ]


COMPILE_MEMORY = CompileMemory()
