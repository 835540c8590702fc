"""Random numbers per step: the same (seed, step, micro step) always draws the same numbers."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

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
        python, numpy, torch: their states, as `torch.load` reads them with `weights_only=True`.
    """

    python: tuple[Any, ...]
    numpy: tuple[Any, ...]
    torch: torch.Tensor

    @classmethod
    def now(cls) -> HostRandom:
        """As they are; nothing is drawn."""
        return cls(random.getstate(), _plain(np.random.get_state(legacy=True)), torch.get_rng_state())

    def restore(self) -> None:
        """Sets all three."""
        random.setstate(self.python)
        name, keys, *rest = self.numpy
        np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
        torch.set_rng_state(self.torch)

    def equals(self, other: HostRandom) -> bool:
        """Whether they would draw the same."""
        one, two = self.numpy, other.numpy
        return (
            self.python == other.python
            and torch.equal(self.torch, other.torch)
            and torch.equal(one[1], two[1])
            and (one[0], *one[2:]) == (two[0], *two[2:])
        )

    def branch(self, number: int) -> HostRandom:
        """Streams of their own, which depend on these and on a number; nothing is drawn from these."""
        digest = hashlib.sha256(self.torch.numpy().tobytes() + number.to_bytes(8, "little")).digest()
        seed = int.from_bytes(digest[:4], "little")
        return HostRandom(
            random.Random(seed).getstate(),
            _plain(np.random.RandomState(seed).get_state(legacy=True)),
            torch.Generator().manual_seed(seed).get_state(),
        )


def _plain(state: Any) -> tuple[Any, ...]:
    name, keys, *rest = state
    return (name, torch.from_numpy(keys.astype(np.int64)), *rest)


@contextmanager
def host_random_numbers_kept() -> Iterator[None]:
    """The streams of Python, numpy and torch on the host are at the exit where they were."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
