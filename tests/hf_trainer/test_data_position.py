"""A resumed run continues at the same sample, for all kinds of datasets and random transforms."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

import hf_trainer
from hf_trainer import data as loaders
from tests.hf_trainer.scenarios import Classifier, Run, arguments, ours, vector_samples
from tests.isolation import isolated

ROWS = 24


class Noisy(Dataset[Any]):
    """A dataset that draws from every random generator of the host."""

    def __init__(self) -> None:
        self.data = vector_samples(ROWS)
        self.read = 0

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        self.read += 1
        noise = random.random() + float(numpy.random.rand()) + torch.rand(1)
        return {"x": self.data[index]["x"] + 0.1 * noise, "labels": self.data[index]["labels"]}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        info, data = torch.utils.data.get_worker_info(), Noisy()
        for index in range(0 if info is None else info.id, ROWS, 1 if info is None else info.num_workers):
            yield data[index]


def huggingface(streaming: bool) -> Any:
    rows = [{"x": [float((row * 7 + i) % 5) for i in range(4)], "labels": row % 3} for row in range(ROWS)]
    data = datasets.Dataset.from_list(rows)
    return data.to_iterable_dataset(num_shards=3).shuffle(seed=3, buffer_size=8) if streaming else data


def collating(samples: list[Any]) -> dict[str, torch.Tensor]:
    """A collator that draws random numbers, like one that masks tokens."""
    xs = torch.tensor([sample["x"].tolist() for sample in samples])
    return {"x": xs * (torch.rand(xs.shape) < 0.8), "labels": torch.tensor([sample["labels"] for sample in samples])}


class Draws(hf_trainer.Trainer):
    """A trainer that draws from the host's generators while it trains, and scales each batch by the result."""

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        inputs["x"] = inputs["x"] * (1 + 0.1 * random.random() + 0.1 * torch.rand(()))
        return super().training_step(model, inputs, *args, **kwargs)


DATA: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "plain": (lambda: vector_samples(ROWS), {}),
    "drawing": (Noisy, {}),
    "workers": (Noisy, {"dataloader_num_workers": 2}),
    "lasting workers": (Noisy, {"dataloader_num_workers": 2, "dataloader_persistent_workers": True}),
    "accumulated": (Noisy, {"gradient_accumulation_steps": 2}),
    "collator": (lambda: vector_samples(ROWS), {"data_collator": collating}),
    "stream": (Stream, {}),
    "stream of workers": (Stream, {"dataloader_num_workers": 2}),
    "datasets": (lambda: huggingface(False), {}),
    "streaming datasets": (lambda: huggingface(True), {}),
    "sampler of torch": (Noisy, {"accelerator_config": {"use_seedable_sampler": False}}),
}


def run(kind: str, folder: Path, *, step: int | None = None, data: Any = None) -> Run:
    make, options = DATA[kind]
    own = {name: options[name] for name in options if name == "data_collator"}
    given = {name: options[name] for name in options if name not in own}
    args = arguments(str(folder), max_steps=10, save_strategy="steps", save_steps=2, **given)
    return ours(
        Classifier(dropout=0.4, seed=0 if step is None else 1),
        make() if data is None else data,
        args=args,
        trainer_class=Draws,
        train_options={"resume_from_checkpoint": None if step is None else f"{folder}/checkpoint-{step}"},
        **own,
    )


# torch waits five seconds for each worker that is alive when its loader is deleted.
@isolated(timeout=400)
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow) if "workers" in kind else kind for kind in DATA]
)
def test_the_data_goes_on(kind: str, tmp_path: Path) -> None:
    """Resumes inside the first epoch of six steps (three with accumulation), at its end, and in the second epoch."""
    whole = run(kind, tmp_path)
    assert len(whole.losses) == 10
    for step in (2, 4, 6, 8):
        # Random numbers drawn earlier in this process must not matter.
        torch.manual_seed(step)
        random.seed(step)
        assert run(kind, tmp_path, step=step).losses == whole.losses, step


@isolated
def test_what_draws_nothing_is_left_out_by_the_sampler(tmp_path: Path) -> None:
    class Counted(Dataset[Any]):
        read = 0
        data = vector_samples(ROWS)

        def __len__(self) -> int:
            return ROWS

        def __getitem__(self, index: int) -> Any:
            type(self).read += 1
            return self.data[index]

    run("plain", tmp_path, data=Counted())
    Counted.read = 0
    run("plain", tmp_path, step=4, data=Counted())
    # Two batches of the first epoch and four of the second; its loader reads one ahead.
    assert Counted.read <= 4 * (2 + 4 + 1)
    noisy = Noisy()
    run("drawing", tmp_path / "noisy")
    run("drawing", tmp_path / "noisy", step=4, data=noisy)
    assert noisy.read > 4 * (6 + 4)


@isolated
def test_two_epochs_draw_different_numbers() -> None:
    seen = [float(batch[0]) for _ in range(2) for batch in _loader([0] * 3)]
    assert len(set(seen)) == 6


def _loader(rows: list[int]) -> loaders.DeviceLoader:
    made = torch.utils.data.DataLoader(rows, batch_size=1, collate_fn=lambda samples: torch.rand(1))  # type: ignore[arg-type]
    return loaders.DeviceLoader(made, torch.device("cpu"))
