"""`shapes=` of the Lightning strategies: few graphs, and the numbers of the CPU on batches that are not extended."""

from __future__ import annotations

import functools
import logging
import random
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_strategy import XLAEagerFabricStrategy, XLAEagerStrategy
from tests.lightning_strategy.scenarios import trainer
from tests.tiny_models import VOCABULARY, tiny
from xla_adapters.data.shapes import ShapePolicy
from xla_adapters.errors import CheckpointError, ConfigError

pytestmark = pytest.mark.isolated(timeout=400)
ROWS = 4


def _promising(buckets: int) -> dict[str, Any]:
    return {"buckets": buckets, "fill": {"labels": -100}}


def samples(count: int, *, seed: int = 0) -> list[dict[str, Any]]:
    numbers = random.Random(seed)
    lengths = [min(14, max(3, int(numbers.lognormvariate(2, 0.6)))) for _ in range(count)]
    return [{"input_ids": [numbers.randrange(3, VOCABULARY) for _ in range(length)]} for length in lengths]


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)
    ids = [row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows]
    mask = [[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in rows]
    batch = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return batch


def loader(data: list[Any], **options: Any) -> DataLoader[Any]:
    return DataLoader(data, batch_size=ROWS, collate_fn=collate, **options)  # type: ignore[arg-type]


class Language(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = tiny("gpt2")
        self.kept: list[torch.Tensor] = []
        self.sizes: set[int] = set()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(**batch).loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.kept.append(outputs["loss"].detach())
        if isinstance(batch, dict):
            self.sizes.add(batch["input_ids"].shape[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch).loss, batch_size=len(batch["input_ids"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def _expected(data: list[Any], *, seed: int = 7) -> DataLoader[Any]:
    """The batches of ours, as the CPU reads them."""
    lengths = [len(row["input_ids"]) for row in data]
    shapes = ShapePolicy(buckets=2).fit(lengths, rows=ROWS)
    return loader(data, sampler=shapes.sampler(lengths, ROWS, seed=seed))


def _fit(strategy: Any, train: Any, validation: Any, **options: Any) -> tuple[Any, Any]:
    L.seed_everything(7, verbose=False)
    module, runner = Language(), trainer(strategy, **options)
    runner.fit(module, train, validation, ckpt_path=options.pop("ckpt_path", None))
    return module, runner


def _close(module: Any, other: Any, runner: Any, other_runner: Any) -> None:
    torch.testing.assert_close(torch.stack(module.kept).cpu(), torch.stack(other.kept).cpu(), atol=1e-5, rtol=1e-5)
    for one, two in zip(module.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.cpu(), two.cpu(), atol=1e-5, rtol=1e-4)
    assert float(runner.callback_metrics["val_loss"]) == pytest.approx(
        float(other_runner.callback_metrics["val_loss"]), abs=1e-5
    )


def test_as_on_the_cpu_without_padding(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    data, evaluated = samples(24), sorted(samples(8, seed=1), key=lambda sample: len(sample["input_ids"]))
    expected = _fit(None, _expected(data), loader(evaluated))
    strategy = XLAEagerStrategy(shapes=_promising(2), on_recompile="error")
    with caplog.at_level(logging.WARNING, "xla_adapters"):
        actual = _fit(strategy, loader(data, shuffle=True), loader(evaluated))
    _close(actual[0], expected[0], actual[1], expected[1])
    assert sum(event.graphs for event in strategy.xla_report().compiles) == 4
    assert "shapes of the training: 2 lengths" in capsys.readouterr().err
    assert [record.message for record in caplog.records if record.name == "xla_adapters"] == []


def test_another_fit_with_other_data() -> None:
    strategy = XLAEagerStrategy(shapes=_promising(2), on_recompile="error")
    runner = trainer(strategy, max_epochs=1)
    for seed in (0, 1):
        runner.fit_loop.max_epochs = seed + 1
        module = Language()
        runner.fit(module, loader(samples(24, seed=seed), shuffle=True))
        assert len(module.kept) == 6
        lengths = [len(sample["input_ids"]) for sample in samples(24, seed=seed)]
        assert module.sizes == set(ShapePolicy(buckets=2).fit(lengths, rows=ROWS).bounds)


def test_dropping_the_last_batch() -> None:
    strategy = XLAEagerStrategy(
        shapes={"buckets": 2, "last_batch": "drop", "fill": {"labels": -100}}, on_recompile="error"
    )
    module, _ = _fit(strategy, loader(samples(22), shuffle=True), None)
    assert len(module.kept) == 10


def test_resume_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    data = samples(24)

    def run(buckets: int, **options: Any) -> Any:
        saves = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=4, save_top_k=-1, filename="{step}")
        return _fit(
            XLAEagerStrategy(shapes=_promising(buckets)),
            loader(data, shuffle=True),
            None,
            callbacks=[saves],
            default_root_dir=tmp_path,
            **options,
        )

    whole, _ = run(3)
    L.seed_everything(7, verbose=False)
    resumed, runner = (
        Language(),
        trainer(XLAEagerStrategy(shapes=_promising(3)), default_root_dir=tmp_path),
    )
    runner.fit(resumed, loader(data, shuffle=True), ckpt_path=tmp_path / "step=4.ckpt")
    assert torch.equal(torch.stack(whole.kept[4:]), torch.stack(resumed.kept))
    assert all(torch.equal(one, two) for one, two in zip(whole.parameters(), resumed.parameters(), strict=True))
    other = trainer(XLAEagerStrategy(shapes=_promising(2)), default_root_dir=tmp_path)
    with pytest.raises(CheckpointError, match="other lengths"):
        other.fit(Language(), loader(data, shuffle=True), ckpt_path=tmp_path / "step=4.ckpt")


def test_a_list_of_tensors_keeps_its_shapes(caplog: pytest.LogCaptureFixture) -> None:
    class Pairs(Language):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.model(input_ids=batch[0], labels=batch[0]).loss

    data = [(torch.tensor(row["input_ids"][:3]), 0) for row in samples(8)]
    with caplog.at_level(logging.WARNING, "xla_adapters"):
        trainer(XLAEagerStrategy(shapes={"buckets": 2})).fit(Pairs(), DataLoader(data, batch_size=4, shuffle=True))  # type: ignore[arg-type]
    assert len([message for message in caplog.messages if "has no effect on lengths" in message]) == 1


def test_a_loss_of_its_own_keeps_lengths_unless_it_is_promised(caplog: pytest.LogCaptureFixture) -> None:
    class Unmasked(Language):
        """Takes the labels from the tokens, padding included."""

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.model(
                batch["input_ids"], attention_mask=batch["attention_mask"], labels=batch["input_ids"]
            ).loss

    data = [{"input_ids": sample["input_ids"][:3]} for sample in samples(12)]
    L.seed_everything(7, verbose=False)
    expected, actual = Unmasked(), Unmasked()
    trainer().fit(expected, loader(data))
    with caplog.at_level(logging.WARNING, "xla_adapters"):
        trainer(XLAEagerStrategy(shapes={"buckets": 1, "pad_to_multiple_of": 8})).fit(actual, loader(data))
    torch.testing.assert_close(torch.stack(actual.kept).cpu(), torch.stack(expected.kept), atol=1e-5, rtol=1e-5)
    assert len([message for message in caplog.messages if "fill={'labels': -100}" in message]) == 1


def test_a_wrong_option_lists_the_right_ones() -> None:
    for given in ({"bucket": 3}, "fast", {"buckets": 0}, {"last_batch": "no"}):
        with pytest.raises(ConfigError, match="valid"):
            XLAEagerStrategy(shapes=given)


def test_fabric() -> None:
    data = samples(24)

    def run(fabric: Any, batches: Any) -> list[float]:
        fabric.launch()
        L.seed_everything(7, verbose=False)
        model = tiny("gpt2")
        model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.05))
        read, losses = fabric.setup_dataloaders(batches), []
        step = getattr(fabric.strategy, "step", None)
        for _ in range(2):
            for batch in read:
                with step() if step is not None else functools.partial(torch.enable_grad)():
                    loss = model(**batch).loss
                    fabric.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                losses.append(loss.item())
        return losses

    # Making the model sets the seed.
    expected = run(L.Fabric(accelerator="cpu"), _expected(data, seed=0))
    strategy = XLAEagerFabricStrategy(shapes=_promising(2), on_recompile="error")
    fabric = L.Fabric(strategy=strategy)
    try:
        assert run(fabric, loader(data, shuffle=True)) == pytest.approx(expected, abs=1e-5)
    finally:
        strategy.teardown()


def test_packing_is_left_to_the_dataset() -> None:
    with pytest.raises(ConfigError, match="Give your DataLoader a PackedDataset"):
        XLAEagerStrategy(shapes={"packing": 64})
