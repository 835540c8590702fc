"""Random numbers per step: the same (seed, step, micro step) always draws the same numbers."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

_MASK = (1 << 64) - 1


def _splitmix64(state: int) -> int:
    """One round of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014)."""
    state = (state + 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


@dataclass(frozen=True, kw_only=True)
class StepSeed:
    """Names the random stream of one (micro) step.

    torch_xla moves its stream on at every sync, so any additional sync changes later dropout masks.
    A step that starts from its own seed does not depend on what ran before it: runs repeat, and a
    resumed run draws what the uninterrupted one would have drawn. The seed is an input of the graph
    and never causes a compile.

    Args:
        seed: the run's seed.
        step: index of the optimizer step, from 0.
        micro_step: index of the micro batch within it, from 0.
        replica: index of the process, so that data-parallel replicas draw different masks.
        stream: tells apart steps of one run that share an index (training, evaluation).
    """

    seed: int
    step: int
    micro_step: int = 0
    replica: int = 0
    stream: int = 0

    def value(self) -> int:
        """The seed as an integer of 63 bits."""
        state = 0
        for part in (self.seed, self.stream, self.replica, self.step, self.micro_step):
            state = _splitmix64(state ^ (part & _MASK))
        return state >> 1


@dataclass(frozen=True)
class HostRandom:
    """The streams of Python, numpy and torch on the host.

    Attributes:
        python, numpy, torch: their states, as they give them.
    """

    python: tuple[Any, ...]
    numpy: tuple[Any, ...]
    torch: torch.Tensor

    @classmethod
    def now(cls) -> HostRandom:
        """As they are; nothing is drawn."""
        return cls(random.getstate(), cast("tuple[Any, ...]", np.random.get_state()), torch.get_rng_state())

    def restore(self) -> None:
        """Sets all three."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)

    def equals(self, other: HostRandom) -> bool:
        """Whether they would draw the same."""
        one, two = self.numpy, other.numpy
        return (
            self.python == other.python
            and torch.equal(self.torch, other.torch)
            and (one[0], *one[2:]) == (two[0], *two[2:])
            and bool((one[1] == two[1]).all())
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
            cast("tuple[Any, ...]", np.random.RandomState(seed).get_state()),
            torch.Generator().manual_seed(seed).get_state(),
        )

    def to_save(self) -> dict[str, Any]:
        """The states as `torch.load` reads them with `weights_only=True`."""
        name, keys, *rest = self.numpy
        numpy = (name, torch.from_numpy(keys.astype(np.int64)), *rest)
        return {"python": self.python, "numpy": numpy, "torch": self.torch}

    @classmethod
    def of_saved(cls, saved: Mapping[str, Any]) -> HostRandom:
        """What `to_save` gave."""
        name, keys, *rest = saved["numpy"]
        return cls(saved["python"], (name, keys.numpy().astype(np.uint32), *rest), saved["torch"])


class ReadingStream:
    """Random numbers for reading an epoch's data, of which training takes none; a context for each read.

    The first batch is read with those that all draw from, for with it the order of the epoch is drawn, and stock draws
    it so. The others are read with a branch of them: batches that are read again are the same, whatever the training
    draws in between.
    """

    def __init__(self) -> None:
        self._number = 0
        self._first: HostRandom | None = None
        self._own: HostRandom | None = None
        self._outside: HostRandom | None = None

    @property
    def has_begun(self) -> bool:
        """Whether a batch was read."""
        return self._own is not None

    @property
    def may_have_drawn(self) -> bool:
        """Whether reading a batch drew; what the first one drew itself, nobody knows."""
        return self._own is None or self._own is self._first or not self._own.equals(cast(HostRandom, self._first))

    def reading(self, epoch: int) -> ReadingStream:
        """The context of the next read.

        Args:
            epoch: its number, from 0, which the branch depends on.
        """
        self._number = epoch
        return self

    def __enter__(self) -> None:
        if self._own is not None:
            self._outside = HostRandom.now()
            self._own.restore()

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        if self._outside is not None:
            self._own = HostRandom.now()
            self._outside.restore()
            self._outside = None
        elif kind is None:
            self._own = self._first = HostRandom.now().branch(self._number)


@contextmanager
def host_random_numbers_kept() -> Iterator[None]:
    """The streams of Python, numpy and torch on the host are at the exit where they were."""
    before = HostRandom.now()
    try:
        yield
    finally:
        before.restore()
