"""A run that resumes with other settings goes on with the sample after those it has seen, or says why it cannot."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler

import hf_trainer
from lightning_strategy import XLAEagerStrategy
from tests.hf_trainer.scenarios import arguments
from tests.isolation import isolated
from tests.lightning_strategy.scenarios import trainer as lightning_trainer
from tests.support import half
from tests.trainers import checkpoint, each_trainer
from xla_adapters.errors import CheckpointError

pytestmark = pytest.mark.isolated

ROWS = 24


class _Rows(Dataset[Any]):
    """Samples that have their numbers."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        if index >= ROWS:
            raise IndexError(index)
        return {"x": torch.tensor([float(index)])}


class _Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        start, step = (0, 1) if info is None else (info.id, info.num_workers)
        yield from ({"x": torch.tensor([float(index)])} for index in range(start, ROWS, step))


class _SizedStream(_Stream):
    def __len__(self) -> int:
        return ROWS


class _Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> Any:
        return {"loss": self.layer(x / ROWS).square().mean()}


class _HFTrainer(hf_trainer.Trainer):
    batches: list[list[int]]

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.batches.append(inputs["x"].flatten().int().tolist())
        return super().training_step(model, inputs, *args, **kwargs)


class _Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = _Net()
        self.batches: list[list[int]] = []

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.batches.append(batch["x"].flatten().int().tolist())
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(**batch)["loss"]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class _Run:
    """A training of either kind.

    Args:
        batch, accumulate, epochs, steps: sizes; the training ends after `epochs` if `steps` is None.
        workers, drop_last, shuffle: of the loader.
        sampler: makes a batch sampler, for Lightning.
        save_every: after how many steps it saves; 0 is never.
        resume: a checkpoint.
        stock: further arguments of transformers.

    Attributes:
        batches: the samples of each batch that was trained on.
        step: of the end.
    """

    def __init__(
        self,
        kind: str,
        folder: Path,
        data: Any,
        *,
        batch: int,
        accumulate: int = 1,
        epochs: int = 1,
        steps: int | None = None,
        workers: int = 0,
        drop_last: bool = False,
        shuffle: bool = False,
        sampler: Any = None,
        save_every: int = 0,
        resume: Path | None = None,
        **stock: Any,
    ) -> None:
        limit = -1 if steps is None else steps
        if kind == "hf":
            args = arguments(
                folder=str(folder),
                per_device_train_batch_size=batch,
                gradient_accumulation_steps=accumulate,
                num_train_epochs=epochs,
                max_steps=limit,
                dataloader_num_workers=workers,
                dataloader_drop_last=drop_last,
                save_strategy="steps" if save_every else "no",
                save_steps=save_every or 500,
                **{"train_sampling_strategy": "random" if shuffle else "sequential", **stock},
            )
            trainer = _HFTrainer(_Net(), args, train_dataset=data)
            trainer.batches = self.batches = []
            trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
            self.step, self.last_step = trainer.state.global_step, trainer.state.max_steps
            return
        module = _Module()
        self.batches = module.batches
        saves = [ModelCheckpoint(folder, filename="{step}", every_n_train_steps=save_every, save_top_k=-1)]
        fit = lightning_trainer(
            XLAEagerStrategy(),
            accumulate_grad_batches=accumulate,
            max_epochs=epochs if steps is None else -1,
            max_steps=limit,
            default_root_dir=folder,
            callbacks=saves if save_every else [],
        )
        L.seed_everything(0, verbose=False)
        options: dict[str, Any] = {"batch_size": batch, "drop_last": drop_last, "shuffle": shuffle}
        if isinstance(data, IterableDataset):
            del options["shuffle"]
        if sampler is not None:
            options = {"batch_sampler": sampler(batch)}
        fit.fit(module, DataLoader(data, num_workers=workers, **options), ckpt_path=resume)
        self.step = fit.global_step

    @property
    def rows(self) -> list[int]:
        """The samples in the order in which they were trained on."""
        return [row for batch in self.batches for row in batch]


# Batch size and accumulation of the first run and of the second, and the step of the checkpoint.
CHANGES = {
    "larger batches": ((2, 2), (4, 1), 2),
    "smaller batches": ((4, 1), (2, 2), 3),
    "larger updates": ((4, 1), (8, 1), 2),
    "smaller updates": ((4, 2), (2, 1), 2),
    "accumulation": ((2, 1), (2, 2), 4),
    "accumulation left in the middle": ((2, 1), (2, 4), 6),
}


@half(change=list(CHANGES), data=[_Rows, _SizedStream, _Stream], kind=["hf", "lightning"])
def test_other_sizes(kind: str, change: str, data: Any, tmp_path: Path) -> None:
    first, second, step = CHANGES[change]
    known = data is not _Stream
    steps = None if known or kind == "lightning" else 30
    shuffle = data is _Rows
    _Run(kind, tmp_path, data(), batch=first[0], accumulate=first[1], steps=steps, save_every=step, shuffle=shuffle)
    whole = _Run(kind, tmp_path / "whole", data(), batch=2, epochs=2, steps=24, shuffle=shuffle)
    rest = _Run(
        kind,
        tmp_path / "rest",
        data(),
        batch=second[0],
        accumulate=second[1],
        epochs=2,
        steps=steps,
        shuffle=shuffle,
        resume=checkpoint(kind, tmp_path, step),
    )
    done = step * first[0] * first[1]
    assert rest.rows[: 2 * ROWS - done] == whole.rows[done:]
    if steps is None:
        assert len(rest.rows) == 2 * ROWS - done
        assert all(len(batch) == second[0] for batch in rest.batches)
        left = math.ceil((ROWS - done) / second[0] / second[1])
        assert rest.step == step + left + ROWS // (second[0] * second[1])


@each_trainer
def test_an_epoch_that_has_ended_has_ended_by_other_sizes(kind: str, tmp_path: Path) -> None:
    """The last batch was left out by the first run, and is none of the second epoch's."""
    _Run(kind, tmp_path, _Rows(), batch=5, drop_last=True, save_every=4)
    for batch, drop_last in ((5, False), (2, False), (12, True)):
        options: dict[str, Any] = {"batch": batch, "drop_last": drop_last, "epochs": 2}
        rest = _Run(kind, tmp_path / f"{batch}", _Rows(), resume=checkpoint(kind, tmp_path, 4), **options)
        assert rest.rows == list(range(ROWS))


@each_trainer
def test_epochs_and_steps(kind: str, tmp_path: Path) -> None:
    _Run(kind, tmp_path, _Rows(), batch=8, save_every=2, epochs=1)
    path = checkpoint(kind, tmp_path, 2)
    rest = _Run(kind, tmp_path / "steps", _Rows(), batch=2, steps=12, resume=path)
    assert rest.rows == [*range(16, ROWS), *range(12)]
    assert rest.step == 12
    _Run(kind, tmp_path / "more", _Rows(), batch=8, save_every=7, steps=7)
    more = _Run(kind, tmp_path, _Rows(), batch=2, epochs=3, resume=checkpoint(kind, tmp_path / "more", 7))
    assert more.rows == [*range(8, ROWS)]


@each_trainer
@pytest.mark.parametrize("data", [_Rows, _SizedStream, _Stream])
def test_a_batch_that_would_begin_elsewhere(kind: str, data: Any, tmp_path: Path) -> None:
    _Run(kind, tmp_path, data(), batch=4, steps=3, save_every=3)
    with pytest.raises(
        CheckpointError, match=r"3 batches .* of 4 samples .*, of 8, .* batches of 4 samples .* 2 times"
    ):
        _Run(kind, tmp_path / "rest", data(), batch=8, steps=6, resume=checkpoint(kind, tmp_path, 3))


@isolated(timeout=400)
@each_trainer
def test_workers_of_a_stream(kind: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"steps": 6, "workers": 2}
    whole = _Run(kind, tmp_path, _Stream(), batch=2, save_every=2, **options)
    path = checkpoint(kind, tmp_path, 2)
    with pytest.raises(CheckpointError, match=r"each of 1 processes"):
        _Run(kind, tmp_path / "one", _Stream(), batch=2, steps=6, resume=path)
    with pytest.raises(CheckpointError, match=r"of 2 samples each, .* of 4"):
        _Run(kind, tmp_path / "more", _Stream(), batch=4, resume=path, **options)
    rest = _Run(kind, tmp_path / "rest", _Stream(), batch=1, resume=path, **options)
    assert sorted(rest.rows) == sorted(whole.rows[4:8])


def test_samples_that_were_grouped_by_size(tmp_path: Path) -> None:
    options: dict[str, Any] = {"train_sampling_strategy": "group_by_length"}

    class Lengths(_Rows):
        def __getitem__(self, index: int) -> Any:
            return {**super().__getitem__(index), "input_ids": [0] * (1 + index % 5)}

    _Run("hf", tmp_path, Lengths(), batch=2, save_every=2, steps=3, **options)
    path = checkpoint("hf", tmp_path, 2)
    with pytest.raises(CheckpointError, match="arranged by another batch size"):
        _Run("hf", tmp_path / "other", Lengths(), batch=4, resume=path, steps=3, **options)


def test_a_batch_sampler_of_ones_own(tmp_path: Path) -> None:
    class Own(BatchSampler):
        pass

    def sampler(batch: int) -> BatchSampler:
        return Own(RandomSampler(range(ROWS)), batch, drop_last=False)

    _Run("lightning", tmp_path, _Rows(), batch=2, save_every=2, sampler=sampler)
    path = checkpoint("lightning", tmp_path, 2)
    with pytest.raises(CheckpointError, match="arranged by another batch size"):
        _Run("lightning", tmp_path / "other", _Rows(), batch=4, sampler=sampler, resume=path)
    assert len(_Run("lightning", tmp_path / "same", _Rows(), batch=2, sampler=sampler, resume=path).rows) == ROWS - 4


def test_gradients_of_an_update_of_another_size(tmp_path: Path) -> None:
    class Saves(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0:
                trainer.save_checkpoint(tmp_path / "inside.ckpt")

    loader = DataLoader(_Rows(), 2)
    options: dict[str, Any] = {"max_epochs": 1, "default_root_dir": tmp_path}
    lightning_trainer(XLAEagerStrategy(), accumulate_grad_batches=2, callbacks=[Saves()], **options).fit(
        _Module(), loader
    )
    other = lightning_trainer(XLAEagerStrategy(), accumulate_grad_batches=3, **options)
    with pytest.raises(CheckpointError, match="resume with accumulate_grad_batches=2"):
        other.fit(_Module(), loader, ckpt_path=tmp_path / "inside.ckpt")


def test_skipping_no_data_begins_the_epoch_anew(tmp_path: Path) -> None:
    """It ends with the step with which it would have ended."""
    _Run("hf", tmp_path, _Rows(), batch=4, save_every=2)
    path = checkpoint("hf", tmp_path, 2)
    rest = _Run("hf", tmp_path / "rest", _Rows(), batch=8, resume=path, ignore_data_skip=True)
    assert rest.rows == list(range(16))
