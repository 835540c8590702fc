"""Checkpoints have the plain Trainer's format, resume exactly, and are refused inside a step; `checkpoint=`."""

from __future__ import annotations

import os
import signal
import zipfile
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from torch import nn

import xla_adapters
from lightning_strategy import XLAEagerFabricStrategy, XLAEagerStrategy
from lightning_strategy import checkpoints as run_settings
from lightning_strategy.checkpoints import XLAEagerCheckpointIO
from lightning_strategy.sharding import on_host
from tests.device import DEVICE
from tests.isolation import isolated, run_in_child
from tests.lightning_strategy.scenarios import (
    ANYTHING,
    FEATURES,
    Classifier,
    assert_close,
    fit,
    loader,
    trainer,
    warnings_as_list,
)
from tests.support import flip
from tests.trainers import Moment, train
from xla_adapters.checkpoint import CheckpointStore, CheckpointWarning
from xla_adapters.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointSaveError,
    CheckpointWriteError,
    UnsupportedOptionError,
)
from xla_adapters.sharding import ShardingConfig

pytestmark = pytest.mark.isolated


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


class FailsIn(L.Callback):
    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch:
            raise ValueError("the callback failed")


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


@pytest.mark.parametrize("direction", ["XLA to CPU", "CPU to XLA"])
def test_the_other_device_resumes(direction: str, tmp_path: Path) -> None:
    xla, cpu = (lambda: XLAEagerStrategy()), (lambda: None)
    first, second = (xla, cpu) if direction == "XLA to CPU" else (cpu, xla)
    whole = fit(Classifier, cpu(), max_epochs=3)
    fit(Classifier, first(), max_epochs=1, callbacks=lambda: [saves(tmp_path)])
    rest = resumed(Classifier, second(), tmp_path / "last.ckpt", max_epochs=3)
    assert_close(rest.losses, whole.module.losses[6:])


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


def test_state_that_is_no_tensor_is_saved(tmp_path: Path) -> None:
    ours = fit(WithMoreState, XLAEagerStrategy(), max_epochs=1, callbacks=lambda: [saves(tmp_path)])
    loaded = WithMoreState.load_from_checkpoint(tmp_path / "last.ckpt")
    assert loaded.loaded["name"] == "x"
    assert torch.equal(loaded.loaded["scale"], ours.module.net[0].weight[0, 0])
    kept = on_host({"hyper_parameters": Settings(size=3, names=["a"])})["hyper_parameters"]
    assert kept == Settings(size=3, names=["a"])


def test_after_a_fit_the_module_trains_by_hand_and_a_checkpoint_can_be_put_back(tmp_path: Path) -> None:
    def go_on(strategy: Any, folder: Path) -> list[float]:
        run = fit(Classifier, strategy, max_epochs=1, callbacks=lambda: [saves(folder)])
        module, saved = run.module, run.trainer.strategy.load_checkpoint(folder / "last.ckpt", **ANYTHING)
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


def test_a_save_costs_one_transfer_and_no_execution(tmp_path: Path) -> None:
    class Saves(Classifier):
        cost: Any = None

        def on_train_epoch_end(self) -> None:
            with xla_adapters.count() as cost:
                self.trainer.save_checkpoint(tmp_path / "by_hand.ckpt")
            self.cost = cost

    module = fit(Saves, XLAEagerStrategy(), max_epochs=1).module
    assert (module.cost.transfers_to_host, module.cost.executions, module.cost.eager_ops) == (1, 0, 0)


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


def test_saving_inside_a_step_raises(tmp_path: Path) -> None:
    class Saves(Classifier):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.trainer.save_checkpoint(tmp_path / "half.ckpt")

    with pytest.raises(CheckpointSaveError) as caught:
        fit(Saves, XLAEagerStrategy())
    assert caught.value.lineno == Saves.on_before_optimizer_step.__code__.co_firstlineno + 1
    assert not list(tmp_path.iterdir())


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


def each(folder: Path, **options: Any) -> ModelCheckpoint:
    """Saves after every second step."""
    given = {"every_n_train_steps": 2, "save_top_k": -1, "filename": "{step}", **options}
    return ModelCheckpoint(dirpath=folder, **given)


# ---- exact resume ------------------------------------------------------------------------------------


class _SavesEach(Callback):
    """Saves after each batch, also in the middle of an accumulation."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.save_checkpoint(self.folder / f"batch={batch_idx + 1}.ckpt")


class _Manual(Classifier):
    """Updates after every third batch, and sets the gradients to None then."""

    def __init__(self) -> None:
        super().__init__(dropout=0.3)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.manual_backward(loss)
        if batch_idx % 3 == 2:
            self.optimizers().step()  # type: ignore[union-attr]
            self.optimizers().zero_grad()  # type: ignore[union-attr]
        return {"loss": loss.detach()}


@pytest.mark.parametrize("kind", ["per_micro_batch", "unrolled", "manual"])
def test_gradients_go_on_in_the_middle_of_an_accumulation(kind: str, tmp_path: Path) -> None:
    def strategy() -> XLAEagerStrategy:
        return XLAEagerStrategy(
            accumulation="unrolled" if kind == "unrolled" else None, checkpoint={"asynchronous": True}
        )

    make: Any = _Manual if kind == "manual" else dropping
    options: dict[str, Any] = {"max_epochs": 1, **({} if kind == "manual" else {"accumulate_grad_batches": 3})}
    whole = fit(make, strategy(), callbacks=lambda: [_SavesEach(tmp_path)], **options)
    for batch in (1, 3, 5):
        saved = torch.load(tmp_path / f"batch={batch}.ckpt", weights_only=True)["xla_adapters"]
        assert ("gradients" in saved) == (batch != 3)
        L.seed_everything(99, verbose=False)
        module = make()
        run = trainer(strategy(), callbacks=[_SavesEach(tmp_path / "again")], **options)
        run.fit(module, loader(), ckpt_path=tmp_path / f"batch={batch}.ckpt")
        assert module.losses == whole.module.losses[batch:]
        for name, value in module.state_dict().items():
            assert torch.equal(value, whole.module.state_dict()[name]), name


def test_early_stopping_goes_on(tmp_path: Path) -> None:
    def callbacks(folder: Path) -> list[Any]:
        return [EarlyStopping("val_loss", patience=2, mode="min"), saves(folder)]

    options: dict[str, Any] = {"validation": lambda: loader(2, seed=5), "max_epochs": 8}
    whole = fit(dropping, XLAEagerStrategy(), callbacks=lambda: callbacks(tmp_path / "whole"), **options)
    epochs = whole.trainer.current_epoch
    assert 3 <= epochs < 8
    first = {**options, "max_epochs": epochs - 1}
    fit(dropping, XLAEagerStrategy(), callbacks=lambda: callbacks(tmp_path / "part"), **first)
    L.seed_everything(99, verbose=False)
    module = dropping()
    run = trainer(XLAEagerStrategy(), max_epochs=8, callbacks=callbacks(tmp_path / "rest"))
    run.fit(module, loader(), loader(2, seed=5), ckpt_path=tmp_path / "part" / "last.ckpt")
    assert run.current_epoch == epochs
    assert module.losses == whole.module.losses[6 * (epochs - 1) :]


class _Finds(ModelCheckpoint):
    """As Lightning's own tests have it."""

    def _find_last_checkpoints(self, trainer: Any) -> set[Any]:
        return set(map(Path, super()._find_last_checkpoints(trainer)))


def test_the_trainer_keeps_the_path_that_lightning_found(tmp_path: Path) -> None:
    fit(dropping, XLAEagerStrategy(), max_epochs=1, callbacks=lambda: [saves(tmp_path)])
    run = trainer(XLAEagerStrategy(), max_epochs=2, callbacks=[_Finds(tmp_path, save_last=True)])
    run.fit(dropping(), loader(), ckpt_path="last")
    assert isinstance(run.ckpt_path, Path)
    assert run.ckpt_path == tmp_path / "last.ckpt"


def test_less_data_than_then(tmp_path: Path) -> None:
    fit(dropping, XLAEagerStrategy(), max_epochs=1, callbacks=lambda: [each(tmp_path)])
    run = trainer(XLAEagerStrategy(), max_epochs=1)
    with pytest.raises(CheckpointError, match="taken after 4 batches of its epoch, and the training data has only 3"):
        run.fit(dropping(), loader(3), ckpt_path=tmp_path / "step=4.ckpt")


@pytest.mark.parametrize("damage", ["flipped", "cut off", "weights"])
def test_the_last_one_is_the_newest_that_is_valid(damage: str, tmp_path: Path) -> None:
    def callbacks() -> list[Any]:
        return [each(tmp_path, save_last=True)]

    whole = fit(dropping, XLAEagerStrategy(), max_epochs=2, callbacks=callbacks)
    for step in (8, 10, 12):
        (tmp_path / f"step={step}.ckpt").unlink()
    last = tmp_path / "last.ckpt"
    if damage == "cut off":
        last.write_bytes(last.read_bytes()[:2000])
    else:
        flip(last)
    if damage == "weights":
        # Newer, but without optimizer states: not to be resumed from.
        CheckpointStore(tmp_path).save(
            9, lambda path: torch.save({"state_dict": {}}, path), name="weights.ckpt", one_file=True
        )
    for _ in range(2):
        L.seed_everything(99, verbose=False)
        module = dropping()
        run = trainer(XLAEagerStrategy(), max_epochs=2, callbacks=callbacks())
        with pytest.warns(CheckpointWarning) as said:
            run.fit(module, loader(), ckpt_path="last")
        told = " ".join(str(warning.message) for warning in said)
        assert "last.ckpt is damaged" in told
        assert "goes on from" in told
        assert module.losses == whole.module.losses[6:]
        # Remove what this run saved, so that the next one resumes from the same checkpoint.
        for step in (8, 10, 12):
            (tmp_path / f"step={step}.ckpt").unlink()
        flip(tmp_path / "last.ckpt")
    with pytest.raises(CheckpointDamagedError, match=r"last\.ckpt is damaged"):
        resumed(dropping, XLAEagerStrategy(), last, max_epochs=3)


def _saved_by(algorithm: Any, path: Path) -> None:
    fit(Classifier, XLAEagerStrategy(rng_algorithm=algorithm), max_epochs=1, callbacks=lambda: [each(path)])


def _told_of(path: Path, strategy: Callable[[], Any], make: Any = Classifier, **options: Any) -> list[str]:
    with warnings_as_list() as told:
        run = trainer(strategy(), max_epochs=1, **options)
        run.fit(make(), loader(), ckpt_path=path / "step=4.ckpt")
    return [text for text in told if "another run" in text or "random numbers" in text]


def test_another_configuration_is_shown(tmp_path: Path) -> None:
    run_in_child(lambda: _saved_by(None, tmp_path))
    assert run_in_child(lambda: _told_of(tmp_path, XLAEagerStrategy)) == []

    def slower() -> Classifier:
        return Classifier(optimizer=lambda p: torch.optim.AdamW(p, lr=2e-2))

    def changed() -> list[str]:
        # As if another version were installed now.
        vars(run_settings)["DISTRIBUTIONS"] = ("pytest",)
        return _told_of(tmp_path, lambda: XLAEagerStrategy(free_grads=False), slower, gradient_clip_val=0.5)

    (text,) = run_in_child(changed)
    lines = [line.strip() for line in text.splitlines()[1:]]
    assert lines[0].startswith("- versions.lightning: '2.")
    assert lines[1].startswith("+ versions.pytest: ")
    assert lines[2:] == [
        "- optimizers.0.lr: 0.01",
        "+ optimizers.0.lr: 0.02",
        "- trainer.gradient_clip_val: None",
        "+ trainer.gradient_clip_val: 0.5",
        "- xla.free_grads: 'auto'",
        "+ xla.free_grads: False",
    ]


def test_other_random_numbers_are_shown(tmp_path: Path) -> None:
    run_in_child(lambda: _saved_by("philox", tmp_path))

    def resumed_by(algorithm: Any) -> list[str]:
        return _told_of(tmp_path, lambda: XLAEagerStrategy(rng_algorithm=algorithm))

    def after_drawing() -> list[str]:
        torch.rand(2, device=DEVICE).cpu()
        return resumed_by("auto")

    assert run_in_child(lambda: resumed_by("philox")) == []
    (text,) = run_in_child(after_drawing)
    assert "drew random numbers on the device by philox, this one draws them by" in text


@isolated(env={"CPU_NUM_DEVICES": "4"})
def test_what_cannot_take_effect_raises(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedOptionError, match=r"ModelCheckpoint\(save_top_k=3\)"):
        XLAEagerStrategy(checkpoint={"keep_last": 3})
    xla_adapters.initialize(spmd=True)
    parts = ShardingConfig(scheme="fsdp", checkpoints="sharded")
    with pytest.raises(UnsupportedOptionError, match="parts come to the host one at a time"):
        XLAEagerStrategy(checkpoint={"asynchronous": True}, sharding=parts)
    strategy = XLAEagerStrategy(checkpoint={"asynchronous": True}, checkpoint_io=TorchCheckpointIO(), sharding="dp")
    with pytest.raises(UnsupportedOptionError, match="TorchCheckpointIO writes the checkpoints"):
        trainer(strategy).fit(Classifier(), loader())


def test_lightnings_own_way_goes_on_working(tmp_path: Path) -> None:
    def send(moment: Moment) -> None:
        if moment.step == 5:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit):
        train(
            "lightning",
            dropout=0.3,
            checkpoint={"asynchronous": True},
            at={"forward": send},
            callbacks=[OnExceptionCheckpoint(tmp_path)],
        )
    assert CheckpointStore(tmp_path).load("on_exception.ckpt").step == 5
