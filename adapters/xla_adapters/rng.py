"""Random numbers per step: the same (seed, step, micro step) always draws the same numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

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
