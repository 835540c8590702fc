"""The random generators of the host, which a replayed step does not draw from."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def host_random() -> tuple[Any, ...]:
    """The state of the generators of torch, Python and numpy."""
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def same_random(before: tuple[Any, ...], after: tuple[Any, ...]) -> bool:
    """Whether nothing was drawn in between."""
    numpy_before, numpy_after = before[2], after[2]
    return (
        torch.equal(before[0], after[0])
        and before[1] == after[1]
        and numpy_before[2:] == numpy_after[2:]
        and bool((numpy_before[1] == numpy_after[1]).all())
    )
