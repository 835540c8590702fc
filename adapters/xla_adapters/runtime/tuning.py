"""`Tuning`: the options of `xla_adapters.initialize` that extensions read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FastCompile = bool | Literal["blocks"]


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Options for extensions; see `xla_adapters.initialize`, which explains them.

    Attributes:
        fast_compile: whether, and how, compile time is shortened.
        keep_memory: whether the process keeps memory that a step frees; None leaves it to the extension.
    """

    fast_compile: FastCompile = False
    keep_memory: bool | None = None

    @property
    def asks_for_something(self) -> bool:
        """Whether an option differs from its default."""
        return self != DEFAULT_TUNING


DEFAULT_TUNING = Tuning()
