"""Checkpoints have the plain Trainer's format, resume exactly, and are refused inside a step."""

from __future__ import annotations

import zipfile
from collections import UserDict
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import nn

import xla_adapters
from lightning_strategy import XLAEagerFabricStrategy, XLAEagerStrategy
from lightning_strategy.checkpoints import XLAEagerCheckpointIO
from lightning_strategy.sharding import on_host
from tests.isolation import isolated
from tests.lightning_strategy.scenarios import (
    FEATURES,
    Classifier,
    assert_close,
    fit,
    loader,
    trainer,
    warnings_as_list,
)
from xla_adapters.checkpoint import CheckpointStore
from xla_adapters.errors import CheckpointDamagedError, CheckpointSaveError, CheckpointWriteError


def saves(folder: Path, **options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(dirpath=folder, **{"save_last": True, "save_top_k": -1, "every_n_epochs": 1, **options})


def resumed(make: Any, strategy: Any, path: Path, *, max_epochs: int, seed: int = 99) -> Any:
    """Fits from a checkpoint, after another seed was set."""
    L.seed_everything(seed, verbose=False)
    module = make()
    run = trainer(strategy, max_epochs=max_epochs)
    run.fit(module, loader(), ckpt_path=path)
    return module


def dropping() -> Classifier:
    return Classifier(dropout=0.3)


@isolated
def test_resume_is_exact_with_dropout(tmp_path: Path) -> None:
    whole = fit(dropping, XLAEagerStrategy(), max_epochs=3)
    fit(dropping, XLAEagerStrategy(), max_epochs=1, callbacks=lambda: [saves(tmp_path)])
    rest = resumed(dropping, XLAEagerStrategy(), tmp_path / "last.ckpt", max_epochs=3)
    assert rest.losses == whole.module.losses[6:]
    for ours, other in zip(rest.parameters(), whole.module.parameters(), strict=True):
        assert torch.equal(ours, other)


@isolated
def test_what_is_saved_of_a_replayed_run_is_what_the_traced_one_saves(tmp_path: Path) -> None:
    folders = [tmp_path / "traced", tmp_path / "replayed"]

    def run(replay: Any, folder: Path) -> Any:
        strategy = XLAEagerStrategy(step_replay=replay)
        return fit(dropping, strategy, max_epochs=3, callbacks=lambda: [saves(folder)])

    traced, replayed = run(False, folders[0]), run("auto", folders[1])
    assert replayed.module.losses == traced.module.losses
    for path in folders[0].glob("*.ckpt"):
        one, other = (torch.load(folder / path.name, weights_only=False) for folder in folders)
        for before, after in zip(one["optimizer_states"], other["optimizer_states"], strict=True):
            for name, state in before["state"].items():
                assert all(torch.equal(value, after["state"][name][key]) for key, value in state.items())
    (first,) = folders[1].glob("epoch=0-*.ckpt")
    rest = resumed(dropping, XLAEagerStrategy(), first, max_epochs=3)
    assert rest.losses == traced.module.losses[6:]


@isolated
def test_resume_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    every = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=4, save_top_k=-1, filename="{step}")
    whole = fit(dropping, XLAEagerStrategy(), max_epochs=1, callbacks=lambda: [every])
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["step=4.ckpt"]

    rest = resumed(dropping, XLAEagerStrategy(), tmp_path / "step=4.ckpt", max_epochs=1)
    assert rest.losses == whole.module.losses[4:]


class FailsIn(L.Callback):
    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch:
            raise ValueError("the callback failed")


@isolated
def test_lightning_warns_where_the_position_in_the_data_is_not_saved(tmp_path: Path) -> None:
    run = trainer(
        XLAEagerStrategy(),
        callbacks=[saves(tmp_path, filename="{step}", every_n_train_steps=2, every_n_epochs=None), FailsIn(3)],
    )
    with pytest.raises(ValueError, match="the callback failed"):
        run.fit(Classifier(), loader())
    # No fit is under way any more.
    run.save_checkpoint(tmp_path / "later.ckpt")
    for name, is_told in (("step=2", False), ("later", True)):
        with warnings_as_list() as found:
            resumed(Classifier, XLAEagerStrategy(), tmp_path / f"{name}.ckpt", max_epochs=1)
        assert any("ended before the epoch ended" in text for text in found) == is_told, name


@isolated
@pytest.mark.parametrize("direction", ["XLA to CPU", "CPU to XLA"])
def test_the_other_device_resumes(direction: str, tmp_path: Path) -> None:
    xla, cpu = (lambda: XLAEagerStrategy()), (lambda: None)
    first, second = (xla, cpu) if direction == "XLA to CPU" else (cpu, xla)
    whole = fit(Classifier, cpu(), max_epochs=3)
    fit(Classifier, first(), max_epochs=1, callbacks=lambda: [saves(tmp_path)])
    rest = resumed(Classifier, second(), tmp_path / "last.ckpt", max_epochs=3)
    assert_close(rest.losses, whole.module.losses[6:])


@isolated
def test_the_file_needs_no_xla(tmp_path: Path) -> None:
    fit(Classifier, XLAEagerStrategy(), max_epochs=1, callbacks=lambda: [saves(tmp_path)])
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=True)
    found: list[torch.Tensor] = []

    def collect(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, dict):
            for item in value.values():
                collect(item)
        elif isinstance(value, list):
            for item in value:
                collect(item)

    collect(checkpoint)
    assert len(found) > 12
    assert {value.device.type for value in found} == {"cpu"}
    assert checkpoint["state_dict"]._metadata["net.1"]["version"] == 2
    loaded = Classifier.load_from_checkpoint(tmp_path / "last.ckpt")
    assert isinstance(loaded, Classifier)


class WithMoreState(Classifier):
    """Has state that is no tensor, as modules with `get_extra_state` have it."""

    def get_extra_state(self) -> Any:
        return {"scale": self.net[0].weight.detach()[0, 0], "name": "x"}

    def set_extra_state(self, state: Any) -> None:
        self.loaded = state


class Settings(UserDict[str, Any]):
    """A mapping with an attribute of the name that a state dict has, as OmegaConf's."""

    _metadata = "its own"


@isolated
def test_state_that_is_no_tensor_is_saved(tmp_path: Path) -> None:
    ours = fit(WithMoreState, XLAEagerStrategy(), max_epochs=1, callbacks=lambda: [saves(tmp_path)])
    loaded = WithMoreState.load_from_checkpoint(tmp_path / "last.ckpt")
    assert loaded.loaded["name"] == "x"
    assert torch.equal(loaded.loaded["scale"], ours.module.net[0].weight[0, 0])
    kept = on_host({"hyper_parameters": Settings(size=3, names=["a"])})["hyper_parameters"]
    assert kept == Settings(size=3, names=["a"])


@isolated
def test_after_a_fit_the_module_trains_by_hand_and_a_checkpoint_can_be_put_back(tmp_path: Path) -> None:
    def go_on(strategy: Any, folder: Path) -> list[float]:
        run = fit(Classifier, strategy, max_epochs=1, callbacks=lambda: [saves(folder)])
        module, saved = run.module, run.trainer.strategy.load_checkpoint(folder / "last.ckpt", weights_only=False)
        module.automatic_optimization = False
        optimizer = module.optimizers()
        for batch in loader(3):
            optimizer.zero_grad()
            module.manual_backward(module.loss(batch))
            optimizer.step()
        assert {*module.parameters()} == {*run.trainer.optimizers[0].param_groups[0]["params"]}
        trained = float(module.loss(batch))
        run.trainer.strategy.load_model_state_dict(saved)
        run.trainer.strategy.load_optimizer_state_dict(saved)
        steps = [float(value["step"]) for value in optimizer.state.values()]
        return [trained, float(module.loss(batch)), *steps]

    assert_close(go_on(XLAEagerStrategy(), tmp_path / "ours"), go_on(None, tmp_path / "plain"), 1e-5)


@isolated
def test_a_save_costs_one_transfer_and_no_execution(tmp_path: Path) -> None:
    class Saves(Classifier):
        cost: Any = None

        def on_train_epoch_end(self) -> None:
            with xla_adapters.count() as cost:
                self.trainer.save_checkpoint(tmp_path / "by_hand.ckpt")
            self.cost = cost

    module = fit(Saves, XLAEagerStrategy(), max_epochs=1).module
    assert (module.cost.transfers_to_host, module.cost.executions, module.cost.eager_ops) == (1, 0, 0)


@isolated
def test_saving_does_not_change_the_run(tmp_path: Path) -> None:
    plain = fit(dropping, XLAEagerStrategy(), max_epochs=2)
    saved = fit(
        dropping,
        XLAEagerStrategy(),
        max_epochs=2,
        callbacks=lambda: [ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=1, save_top_k=-1)],
    )
    assert len(list(tmp_path.glob("*.ckpt"))) == 12
    assert saved.module.losses == plain.module.losses
    assert saved.counters.executions == 12


@isolated
def test_saving_inside_a_step_raises(tmp_path: Path) -> None:
    class Saves(Classifier):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.trainer.save_checkpoint(tmp_path / "half.ckpt")

    with pytest.raises(CheckpointSaveError) as caught:
        fit(Saves, XLAEagerStrategy())
    assert caught.value.lineno == Saves.on_before_optimizer_step.__code__.co_firstlineno + 1
    assert not list(tmp_path.iterdir())


@isolated
def test_tied_weights_stay_one(tmp_path: Path) -> None:
    class Tied(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES))
            self.net[1].weight = self.net[0].weight

    ours = fit(Tied, XLAEagerStrategy(), max_epochs=1, callbacks=lambda: [saves(tmp_path)])
    plain = fit(Tied, None, max_epochs=1)
    assert_close(ours.module.losses, plain.module.losses)
    assert ours.module.net[0].weight is ours.module.net[1].weight
    state = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    assert state["net.0.weight"].data_ptr() == state["net.1.weight"].data_ptr()


@isolated
def test_a_writer_in_the_background_gets_a_copy(tmp_path: Path) -> None:
    io = AsyncCheckpointIO()
    ours = fit(
        Classifier,
        XLAEagerStrategy(),
        max_epochs=2,
        plugins=[io],
        callbacks=lambda: [saves(tmp_path, filename="{epoch}")],
    )
    first = torch.load(tmp_path / "epoch=0.ckpt", weights_only=True)
    last = torch.load(tmp_path / "epoch=1.ckpt", weights_only=True)
    assert not torch.equal(first["state_dict"]["net.0.weight"], last["state_dict"]["net.0.weight"])
    assert torch.equal(last["state_dict"]["net.0.weight"], ours.module.state_dict()["net.0.weight"])


@isolated
def test_the_innermost_of_nested_plugins_writes(tmp_path: Path) -> None:
    def nested() -> Any:
        return AsyncCheckpointIO(AsyncCheckpointIO(AsyncCheckpointIO()))

    def finish(io: Any) -> None:
        """Lightning's plugins wait for their own thread alone."""
        while isinstance(io, AsyncCheckpointIO):
            assert io._base_checkpoint_io_configured
            io.teardown()
            io = io.checkpoint_io
        assert isinstance(io, XLAEagerCheckpointIO)

    for number, strategy in enumerate((XLAEagerStrategy(checkpoint_io=nested()), XLAEagerStrategy())):
        plugins = [] if not number else [nested()]
        folder = tmp_path / str(number)
        fit(Classifier, strategy, max_epochs=1, plugins=plugins, callbacks=lambda folder=folder: [saves(folder)])  # type: ignore[misc]
        finish(strategy.checkpoint_io)
        module = Classifier.load_from_checkpoint(folder / "last.ckpt", weights_only=False)
        assert module.device.type == "cpu"
    fabric = L.Fabric(strategy=XLAEagerFabricStrategy(checkpoint_io=nested()))
    fabric.launch()
    fabric.save(tmp_path / "fabric.ckpt", {"number": 3})
    finish(fabric.strategy.checkpoint_io)
    assert fabric.load(tmp_path / "fabric.ckpt")["number"] == 3


@isolated
def test_the_best_checkpoint_is_tested(tmp_path: Path) -> None:
    class Tested(Classifier):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test_loss", self.loss(batch))

    results = []
    for strategy in (XLAEagerStrategy(), None):
        best = ModelCheckpoint(dirpath=tmp_path / str(strategy is None), monitor="val_loss", save_top_k=1)
        options: dict[str, Any] = {"validation": lambda: loader(2, seed=5), "callbacks": lambda best=best: [best]}
        ours = fit(Tested, strategy, max_epochs=3, **options)
        results.append(ours.trainer.test(ckpt_path="best", dataloaders=loader(2, seed=6), verbose=False)[0])
    assert_close([results[0]["test_loss"]], [results[1]["test_loss"]])


@isolated
def test_a_file_is_whole_and_verified_when_it_is_loaded(tmp_path: Path) -> None:
    fit(Classifier, XLAEagerStrategy(), max_epochs=2, callbacks=lambda: [saves(tmp_path, save_top_k=1)])
    last, store = tmp_path / "last.ckpt", CheckpointStore(tmp_path)
    # Saved twice under this name.
    assert store.load("last.ckpt").step == 12
    assert all(path.suffix == ".ckpt" for path in tmp_path.iterdir())
    # In the data of a weight, which torch.load does not check.
    (name,) = [item for item in zipfile.ZipFile(last).infolist() if item.filename.endswith("/data/0")]
    data = bytearray(last.read_bytes())
    data[name.header_offset + 200] ^= 1
    last.write_bytes(data)
    with pytest.raises(CheckpointDamagedError, match=r"last\.ckpt is damaged: .*SHA-256 differs"):
        resumed(Classifier, XLAEagerStrategy(), last, max_epochs=3)


@isolated
def test_a_file_of_lightning_is_loaded_and_one_in_the_way_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    torch.save({"global_step": 3}, path)
    io = XLAEagerCheckpointIO()
    assert io.load_checkpoint(path) == {"global_step": 3}
    with pytest.raises(CheckpointWriteError, match="was not saved"):
        io.save_checkpoint({"unwritable": _Unwritable()}, path)
    assert io.load_checkpoint(path) == {"global_step": 3}
    io.save_checkpoint({"global_step": 4}, path)
    assert io.load_checkpoint(path) == {"global_step": 4}
    io.save_checkpoint({"global_step": 5}, tmp_path / "new" / "_own.ckpt")
    assert io.load_checkpoint(tmp_path / "new" / "_own.ckpt") == {"global_step": 5}


class _Unwritable:
    def __reduce__(self) -> Any:
        raise OSError(28, "No space left on device")
