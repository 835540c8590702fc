"""`HostRandom`: saves and restores the random generators of Python, numpy and torch on the host."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

# Generators of numpy with so many numbers or less have some that are no int64.
_FEW = 64


@dataclass(frozen=True)
class HostRandom:
    """The states of the global random generators of Python, numpy and torch on the host.

    Attributes:
        python: as from `random.getstate()`.
        numpy: as from `numpy.random.get_state(legacy=False)`, with lists in place of arrays.
        torch: as from `torch.get_rng_state()`.
    """

    python: tuple[Any, ...]
    numpy: dict[str, Any]
    torch: torch.Tensor

    @classmethod
    def now(cls) -> HostRandom:
        """The current states; nothing is drawn."""
        return cls(random.getstate(), _plain(np.random.get_state(legacy=False)), torch.get_rng_state())

    def restore(self) -> None:
        """Sets the global generators to these states."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)

    def equals(self, other: HostRandom) -> bool:
        """Whether both would draw the same numbers."""
        return self.python == other.python and self.numpy == other.numpy and torch.equal(self.torch, other.torch)

    def seed(self, number: int) -> int:
        """Derives a 32-bit seed from torch's state and a number; nothing is drawn."""
        digest = hashlib.sha256(self.torch.numpy().tobytes() + number.to_bytes(8, "little")).digest()
        return int.from_bytes(digest[:4], "little")

    def branch(self, number: int) -> HostRandom:
        """Derives independent generator states from torch's state and a number; nothing is drawn."""
        seed, generator = self.seed(number), getattr(np.random, self.numpy["bit_generator"])
        return HostRandom(
            random.Random(seed).getstate(),
            _plain(np.random.RandomState(generator(seed)).get_state(legacy=False)),
            torch.Generator().manual_seed(seed).get_state(),
        )

    def to_save(self) -> dict[str, Any]:
        """The states as tensors and plain values, which `torch.load(weights_only=True)` can read."""
        version, numbers, gauss = self.python
        # Pickling tells thousands of numbers one by one.
        python = version, torch.tensor(numbers), gauss
        return {"python": python, "numpy": _with_tensors(self.numpy), "torch": self.torch}

    @classmethod
    def of_saved(cls, saved: Mapping[str, Any]) -> HostRandom:
        """Reads what `to_save` returned; other entries are ignored."""
        numpy = saved["numpy"]
        if not isinstance(numpy, dict):
            # Checkpoints of version 0.1 have numpy's legacy tuple.
            name, keys, position, *second = numpy
            state = {"key": keys.tolist(), "pos": position}
            numpy = {"bit_generator": name, "state": state, **dict(zip(("has_gauss", "gauss"), second, strict=True))}
        version, numbers, gauss = saved["python"]
        numbers = tuple(numbers.tolist() if isinstance(numbers, torch.Tensor) else numbers)
        return cls((version, numbers, gauss), _plain(numpy), saved["torch"])


@contextmanager
def host_random_numbers_kept() -> Iterator[None]:
    """Restores the random generators of Python, numpy and torch on the host at the exit."""
    before = HostRandom.now()
    try:
        yield
    finally:
        before.restore()


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return value.tolist() if isinstance(value, (np.ndarray, torch.Tensor)) else value


def _with_tensors(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_tensors(item) for name, item in value.items()}
    return torch.tensor(value) if isinstance(value, list) and len(value) > _FEW else value
