"""The same seed gives the batches that the frameworks' own trainers read on the CPU, random ones too."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import IterableDataset

from tests.hf_trainer.scenarios import assert_close
from tests.trainers import Noisy, each_trainer, train

pytestmark = pytest.mark.isolated

ROWS = 24


class _Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        data = Noisy()
        yield from (data[index] for index in range(ROWS))


# The data, and the number of workers.
DATA = {"samples": (Noisy, 0), "stream": (_Stream, 0), "samples of workers": (Noisy, 2)}


@each_trainer
@pytest.mark.parametrize("data", [pytest.param(name, marks=pytest.mark.slow if DATA[name][1] else ()) for name in DATA])
def test_batches_are_those_of_the_cpu(kind: str, data: str) -> None:
    """In two epochs, with evaluations in the middle, whose loaders draw. The rate is 0: losses tell of batches only."""
    make, workers = DATA[data]
    options: dict[str, Any] = {"steps": 11, "rate": 0.0, "evaluate_every": 4}
    if kind == "hf":
        options["stock"] = {"dataloader_num_workers": workers, "train_sampling_strategy": "sequential"}
    else:
        options["own"] = {"num_workers": workers}
    losses = []
    for on_cpu in (False, True):
        for seed in (random.seed, numpy.random.seed, torch.manual_seed):
            seed(0)
        losses.append(train(kind, data=make(), on_cpu=on_cpu, **options).losses)
    assert len(set(losses[0])) == 11
    assert_close(*losses, 1e-5)
