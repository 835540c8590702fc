"""`HostRandom`: the random streams of the host, put aside and back."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class HostRandom:
    """The streams of Python, numpy and torch on the host.

    Attributes:
        python, torch: their states, as they give them.
        numpy: its state, of whatever generator it uses, as numbers, lists and dictionaries.
    """

    python: tuple[Any, ...]
    numpy: dict[str, Any]
    torch: torch.Tensor

    @classmethod
    def now(cls) -> HostRandom:
        """As they are; nothing is drawn."""
        return cls(random.getstate(), _plain(np.random.get_state(legacy=False)), torch.get_rng_state())

    def restore(self) -> None:
        """Sets all three."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)

    def equals(self, other: HostRandom) -> bool:
        """Whether they would draw the same."""
        return self.python == other.python and self.numpy == other.numpy and torch.equal(self.torch, other.torch)

    def seed(self, number: int) -> int:
        """A seed of 32 bits that depends on these streams and on a number; nothing is drawn from them."""
        digest = hashlib.sha256(self.torch.numpy().tobytes() + number.to_bytes(8, "little")).digest()
        return int.from_bytes(digest[:4], "little")

    def branch(self, number: int) -> HostRandom:
        """Streams of their own, which depend on these and on a number; nothing is drawn from these."""
        seed, generator = self.seed(number), getattr(np.random, self.numpy["bit_generator"])
        return HostRandom(
            random.Random(seed).getstate(),
            _plain(np.random.RandomState(generator(seed)).get_state(legacy=False)),
            torch.Generator().manual_seed(seed).get_state(),
        )

    def to_save(self) -> dict[str, Any]:
        """The states as `torch.load` reads them with `weights_only=True`."""
        return {"python": self.python, "numpy": self.numpy, "torch": self.torch}

    @classmethod
    def of_saved(cls, saved: Mapping[str, Any]) -> HostRandom:
        """What `to_save` gave."""
        numpy = saved["numpy"]
        if not isinstance(numpy, dict):
            # As it was written once.
            name, keys, position, *second = numpy
            state = {"key": keys.tolist(), "pos": position}
            numpy = {"bit_generator": name, "state": state, **dict(zip(("has_gauss", "gauss"), second, strict=True))}
        return cls(saved["python"], numpy, saved["torch"])


@contextmanager
def host_random_numbers_kept() -> Iterator[None]:
    """The streams of Python, numpy and torch on the host are at the exit where they were."""
    before = HostRandom.now()
    try:
        yield
    finally:
        before.restore()


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return value.tolist() if isinstance(value, np.ndarray) else value
