"""`HostRandom`: the random streams of the host, put aside and back."""

from __future__ import annotations

import ctypes
import hashlib
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

# Of numpy's Mersenne twister: 624 words, and how many of them were used.
_WORDS, _BYTES = 624, 4 * 625


@dataclass(frozen=True)
class HostRandom:
    """The streams of Python, numpy and torch on the host.

    Attributes:
        python, numpy, torch: their states, as they give them (numpy a dictionary for generators but the usual one).
    """

    python: tuple[Any, ...]
    numpy: Any
    torch: torch.Tensor

    @classmethod
    def now(cls) -> HostRandom:
        """As they are; nothing is drawn."""
        return cls(random.getstate(), _numpy_state(), torch.get_rng_state())

    def restore(self) -> None:
        """Sets all three."""
        random.setstate(self.python)
        _set_numpy_state(self.numpy)
        torch.set_rng_state(self.torch)

    def equals(self, other: HostRandom) -> bool:
        """Whether they would draw the same."""
        one, two = self.numpy, other.numpy
        return (
            self.python == other.python
            and torch.equal(self.torch, other.torch)
            and type(one) is type(two)
            and (str(one) == str(two) if isinstance(one, dict) else _as_words(one) == _as_words(two))
            and (isinstance(one, dict) or (one[0], one[3:]) == (two[0], two[3:]))
        )

    def seed(self, number: int) -> int:
        """A seed of 32 bits that depends on these streams and on a number; nothing is drawn from them."""
        digest = hashlib.sha256(self.torch.numpy().tobytes() + number.to_bytes(8, "little")).digest()
        return int.from_bytes(digest[:4], "little")

    def branch(self, number: int) -> HostRandom:
        """Streams of their own, which depend on these and on a number; nothing is drawn from these."""
        seed = self.seed(number)
        return HostRandom(
            random.Random(seed).getstate(),
            _numpy_branch(self.numpy, seed),
            torch.Generator().manual_seed(seed).get_state(),
        )

    def to_save(self) -> dict[str, Any]:
        """The states as `torch.load` reads them with `weights_only=True`."""
        numpy = self.numpy
        if not isinstance(numpy, dict):
            name, keys, *rest = numpy
            numpy = (name, torch.from_numpy(keys.astype(np.int64)), *rest)
        return {"python": self.python, "numpy": numpy, "torch": self.torch}

    @classmethod
    def of_saved(cls, saved: Mapping[str, Any]) -> HostRandom:
        """What `to_save` gave."""
        numpy = saved["numpy"]
        if not isinstance(numpy, dict):
            name, keys, *rest = numpy
            numpy = (name, keys.numpy().astype(np.uint32), *rest)
        return cls(saved["python"], numpy, saved["torch"])


@contextmanager
def host_random_numbers_kept() -> Iterator[None]:
    """The streams of Python, numpy and torch on the host are at the exit where they were."""
    before = HostRandom.now()
    try:
        yield
    finally:
        before.restore()


# ---- numpy's stream -------------------------------------------------------------------------------
#
# numpy copies a state word by word, as Python numbers: 50 microseconds each way, of which each batch would pay four.
# Every generator tells the address of its state (`BitGenerator.ctypes`), and the bytes there tell whether anything was
# drawn; but for one number: of the normal numbers, which it makes in pairs, `RandomState` keeps the second.

_seen: tuple[bytes, Any] = (b"", ())


def _numpy_branch(state: Any, seed: int) -> Any:
    """A state of the same generator, seeded."""
    if not isinstance(state, dict):
        return np.random.RandomState(seed).get_state()
    generator = getattr(np.random, state["bit_generator"])(seed)
    return {**generator.state, "has_gauss": 0, "gauss": 0.0}


def _numpy_state() -> Any:
    """That of `np.random.get_state`."""
    global _seen
    generator = _twister()
    words = b"" if generator is None else ctypes.string_at(generator.ctypes.state_address, _BYTES)
    if words and words == _seen[0]:
        return _seen[1]
    state = np.random.get_state()
    _seen = (words, state) if words and not state[3] else (b"", ())  # type: ignore[index]
    return state


def _set_numpy_state(state: Any) -> None:
    """As `np.random.set_state`."""
    global _seen
    generator = _twister()
    if generator is None or isinstance(state, dict) or state[3]:
        np.random.set_state(state)
        _seen = (b"", ())
        return
    words = _as_words(state)
    with generator.lock:
        ctypes.memmove(generator.ctypes.state_address, words, _BYTES)
    # Forgets the second normal number, which this state has none of.
    np.random.set_bit_generator(generator)  # type: ignore[attr-defined]
    _seen = (words, state)


def _twister() -> Any:
    """The generator behind `np.random`, if its state lies in memory as expected."""
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    return generator if type(generator) is np.random.MT19937 and _lies_as_expected() else None


@cache
def _lies_as_expected() -> bool:
    generator = np.random.MT19937(1)
    np.random.Generator(generator).random(3)
    inner = generator.state["state"]
    return ctypes.string_at(generator.ctypes.state_address, _BYTES) == _as_words(("", inner["key"], inner["pos"]))


def _as_words(state: tuple[Any, ...]) -> bytes:
    return bytes(np.append(state[1].astype(np.uint32), np.uint32(state[2])).tobytes())
