"""Reseeds persistent DataLoader workers at each epoch, so that a resumed run gets the same random augmentations.

torch seeds a worker only when it starts. With `persistent_workers=True` its random streams continue in the next epoch,
whereas a process that resumes in that epoch starts new workers.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader, get_worker_info

from xla_adapters.utils.host_random import HostRandom, host_random_numbers_kept


def renew_workers(loader: Any, epoch: int) -> None:
    """Seeds the workers for an epoch that starts; nothing is drawn from the random generators of this process.

    Args:
        loader: the loader of the epoch; nothing is done without persistent workers.
        epoch: its number, from 0.
    """
    if not isinstance(loader, DataLoader) or not loader.persistent_workers or not loader.num_workers:
        return
    if epoch == 0:
        # Starts new workers, as a new process does.
        loader._iterator = None
        return
    iterator: Any = loader._iterator
    if iterator is None:
        # A resumed run: start the workers here, without drawing, since the first epoch has drawn for it.
        with ExitStack() as stack:
            stack.enter_context(host_random_numbers_kept())
            for generator in generators_of(loader):
                stack.callback(generator.set_state, generator.get_state())
            iterator = loader._iterator = loader._get_iterator()
    # torch sends this to each worker when the loader is iterated again, and itself uses it for data pipes only.
    iterator._shared_seed = _Reseeds(HostRandom.now().seed(epoch))


def generators_of(loader: Any) -> list[torch.Generator]:
    """The generators of a loader and of its samplers, each once."""
    found: dict[int, torch.Generator] = {}
    seen: set[int] = set()
    queue = [loader]
    while queue:
        holder = queue.pop(0)
        if holder is None or id(holder) in seen:
            continue
        seen.add(id(holder))
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator):
            found[id(generator)] = generator
        queue += [getattr(holder, name, None) for name in ("base_dataloader", "batch_sampler", "sampler")]
    return list(found.values())


class _Reseeds:
    """Seeds the worker process in which it is unpickled."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __reduce__(self) -> tuple[Callable[[int], None], tuple[int]]:
        return _seed_worker, (self._seed,)


def _seed_worker(seed: int) -> None:
    worker = get_worker_info()
    if worker is not None:
        seed = (seed + worker.id) % 2**32
        random.seed(seed)
        numpy.random.seed(seed)
        torch.manual_seed(seed)
