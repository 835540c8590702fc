"""`checkpoint=`: saves in the background, on a schedule and before the process is ended; and exact resume."""

from __future__ import annotations

import functools
import os
import random
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import numpy
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_strategy import XLAEagerStrategy, checkpoints
from lightning_strategy.checkpoints import NAME
from tests.checkpoint import time_of_hangs
from tests.crash.storages import Quick
from tests.device import DEVICE
from tests.isolation import isolated, outcome_of, run_in_child
from tests.lightning_strategy.scenarios import (
    BATCH,
    CLASSES,
    FEATURES,
    Classifier,
    fit,
    loader,
    trainer,
    warnings_as_list,
)
from tests.lightning_strategy.test_checkpoints import dropping, resumed, saves
from xla_adapters import get_runtime
from xla_adapters.checkpoint import CheckpointConfig, CheckpointStore, CheckpointWarning, SaveSchedule
from xla_adapters.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointWriteError,
    StallError,
    UnsupportedOptionError,
)
from xla_adapters.loop import checkpoints as scheduled
from xla_adapters.sharding import ShardingConfig


def each(folder: Path, **options: Any) -> ModelCheckpoint:
    """Saves after every second step."""
    given = {"every_n_train_steps": 2, "save_top_k": -1, "filename": "{step}", **options}
    return ModelCheckpoint(dirpath=folder, **given)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.ckpt"))


# ---- in the background -------------------------------------------------------------------------------


class _SlowWriter:
    """Replaces the writer by one that waits for `go`."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.write = checkpoints._write
        vars(checkpoints)["_write"] = self

    def __call__(self, checkpoint: dict[str, Any], file: Path) -> None:
        assert self.go.wait(240)
        self.write(checkpoint, file)


@isolated
def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    """The checkpoint that it replaces stays until it is complete."""
    whole = fit(dropping, XLAEagerStrategy(), max_epochs=1)
    slow, seen = _SlowWriter(), []

    class Lets(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx % 2 == 0:
                seen.append((batch_idx + 1, names(tmp_path)))
                slow.go.set()
                trainer.strategy.checkpoint_io._saver and trainer.strategy.checkpoint_io._saver._thread.join()
            else:
                slow.go.clear()

    ours = fit(
        dropping,
        XLAEagerStrategy(checkpoint=CheckpointConfig(asynchronous=True)),
        max_epochs=1,
        callbacks=lambda: [Lets(), each(tmp_path, save_top_k=1), _LetsGo(slow)],
    )
    assert seen == [(1, []), (3, []), (5, ["step=2.ckpt"])]
    assert names(tmp_path) == ["step=6.ckpt"]
    assert ours.module.losses == whole.module.losses
    CheckpointStore(tmp_path).load("step=6.ckpt")
    saved = torch.load(tmp_path / "step=6.ckpt", weights_only=True)
    assert torch.equal(saved["state_dict"]["net.0.weight"], ours.module.state_dict()["net.0.weight"])
    assert saved["state_dict"]._metadata["net.1"]["version"] == 2


class _LetsGo(Callback):
    def __init__(self, slow: _SlowWriter) -> None:
        self.slow = slow

    def on_train_end(self, *args: Any) -> None:
        self.slow.go.set()


class _Full(Quick):
    def write(self, path: str, *args: Any) -> None:
        if "step=4" in path:
            raise OSError(28, "No space left on device")
        super().write(path, *args)


@isolated
@pytest.mark.parametrize("batches", [4, 6], ids=["at the end", "at the next save"])
def test_a_save_that_fails_in_the_background_is_raised(batches: int, tmp_path: Path) -> None:
    vars(checkpoints)["CheckpointStore"] = functools.partial(CheckpointStore, storage=_Full())
    with pytest.raises(CheckpointWriteError, match="No space left on device"):
        fit(
            dropping,
            XLAEagerStrategy(checkpoint={"asynchronous": True}),
            data=lambda: loader(batches),
            max_epochs=1,
            callbacks=lambda: [each(tmp_path, save_top_k=1)],
        )
    # The checkpoint before the failed one stays.
    assert names(tmp_path) == ["step=2.ckpt"]


# ---- exact resume ------------------------------------------------------------------------------------


class _Noisy(Dataset[Any]):
    """Draws from all random generators of the host."""

    def __len__(self) -> int:
        return 6 * BATCH

    def __getitem__(self, index: int) -> Any:
        noise = random.random() + float(numpy.random.rand()) + torch.rand(1)
        inputs = torch.randn(FEATURES, generator=torch.Generator().manual_seed(index))
        return inputs + 0.1 * noise, index % CLASSES


class _Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        for index in range(0 if info is None else info.id, 6 * BATCH, 1 if info is None else info.num_workers):
            yield _Noisy()[index]


class _Draws(Classifier):
    """Draws from the host's random generators in `training_step`."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (1 + 0.1 * random.random() + 0.1 * float(torch.rand(())))


def huggingface(streaming: bool) -> Any:
    import datasets

    rows = [{"x": [float((row * 7 + i) % 5) for i in range(FEATURES)], "y": row % CLASSES} for row in range(6 * BATCH)]
    data = datasets.Dataset.from_list(rows)
    if streaming:
        data = data.to_iterable_dataset(num_shards=3).shuffle(seed=3, buffer_size=16)

    def collate(samples: list[Any]) -> Any:
        return torch.tensor([s["x"] for s in samples]), torch.tensor([s["y"] for s in samples])

    return DataLoader(data, batch_size=BATCH, collate_fn=collate)  # type: ignore[arg-type]


DATA: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: loader(shuffle=True),
    "generator": lambda: DataLoader(
        _Noisy(), BATCH, shuffle=True, num_workers=2, generator=torch.Generator().manual_seed(3)
    ),
    "drawing": lambda: DataLoader(_Noisy(), BATCH, shuffle=True),
    "workers": lambda: DataLoader(_Noisy(), BATCH, shuffle=True, num_workers=2),
    "lasting workers": lambda: DataLoader(_Noisy(), BATCH, shuffle=True, num_workers=2, persistent_workers=True),
    "stream": lambda: DataLoader(_Stream(), BATCH),
    "stream of workers": lambda: DataLoader(_Stream(), BATCH, num_workers=2),
    "datasets": lambda: huggingface(False),
    "streaming datasets": lambda: huggingface(True),
    "several": lambda: {"a": loader(shuffle=True), "b": loader(2, shuffle=True)},
}


class _Pairs(_Draws):
    def loss(self, batch: Any) -> Any:
        if isinstance(batch, dict):
            return super().loss(batch["a"]) + super().loss(batch["b"])
        return super().loss(batch)


@isolated(timeout=400)
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow) if "workers" in kind else kind for kind in DATA]
)
def test_the_data_goes_on(kind: str, tmp_path: Path) -> None:
    """From a checkpoint in the first epoch, in the second, and at the end of the first."""

    def make() -> Any:
        return _Pairs(dropout=0.3)

    data = DATA[kind]
    whole = fit(make, XLAEagerStrategy(), data=data, max_epochs=2, callbacks=lambda: [each(tmp_path)])
    assert len(whole.module.losses) == 12
    for step in (2, 4, 6, 8, 10):
        L.seed_everything(99, verbose=False)
        module = make()
        run = trainer(XLAEagerStrategy(), max_epochs=2)
        run.fit(module, data(), ckpt_path=tmp_path / f"step={step}.ckpt")
        assert module.losses == whole.module.losses[step:], step


@isolated
def test_accumulation_goes_on_at_an_update(tmp_path: Path) -> None:
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "max_epochs": 2}
    config = CheckpointConfig(every_n_steps=2)
    whole = fit(dropping, XLAEagerStrategy(checkpoint=config), callbacks=lambda: [_last(tmp_path)], **options)
    L.seed_everything(99, verbose=False)
    module = dropping()
    # The first run overwrote its checkpoint until its last update. This one saves the checkpoint to resume from.
    fit(
        dropping,
        XLAEagerStrategy(checkpoint=config),
        callbacks=lambda: [_last(tmp_path / "one")],
        max_steps=2,
        **{**options, "max_epochs": 1},
    )
    run = trainer(XLAEagerStrategy(), **options)
    run.fit(module, loader(), ckpt_path=tmp_path / "one" / NAME)
    assert module.losses == whole.module.losses[4:]


class _SavesEach(Callback):
    """Saves after each batch, also in the middle of an accumulation."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.save_checkpoint(self.folder / f"batch={batch_idx + 1}.ckpt")


class _Manual(_Draws):
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


@isolated
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


def _last(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(dirpath=folder, save_top_k=0)


@isolated
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


@isolated
def test_less_data_than_then(tmp_path: Path) -> None:
    fit(dropping, XLAEagerStrategy(), max_epochs=1, callbacks=lambda: [each(tmp_path)])
    run = trainer(XLAEagerStrategy(), max_epochs=1)
    with pytest.raises(CheckpointError, match="taken after 4 batches of its epoch, and the training data has only 3"):
        run.fit(dropping(), loader(3), ckpt_path=tmp_path / "step=4.ckpt")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@isolated
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
        vars(checkpoints)["DISTRIBUTIONS"] = ("pytest",)
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


# ---- when a signal ends the process ------------------------------------------------------------------


def send() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)


class _Sent(Dataset[Any]):
    """Sends the signal while batch 4 is loaded."""

    def __init__(self, sends: bool) -> None:
        self.data, self.sends = loader().dataset, sends

    def __len__(self) -> int:
        return len(self.data)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        if self.sends and index == 4 * BATCH:
            send()
        return self.data[index]


class _Sends(Classifier):
    place = ""

    def at(self, place: str, batch: int) -> None:
        if self.place == place and batch == 4:
            send()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.at("forward", batch_idx)
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.at("optimizer", self.trainer.fit_loop.batch_idx)

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        self.at("save", self.trainer.fit_loop.batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.at("after the step", batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step == 5:
            self.at("evaluation", 4)
        return super().validation_step(batch, batch_idx)


def _run(folder: Path, place: str = "", *, asynchronous: bool = False, resume: bool = False) -> list[float]:
    class Sends(_Sends):
        pass

    Sends.place = place
    checkpoint = CheckpointConfig(save_on="preemption", asynchronous=asynchronous)
    model_checkpoint = each(folder, every_n_train_steps=5, save_top_k=1) if place == "save" else _last(folder)
    run = trainer(
        XLAEagerStrategy(checkpoint=checkpoint),
        max_epochs=2,
        callbacks=[model_checkpoint],
        val_check_interval=5,
        check_val_every_n_epoch=None,
    )
    L.seed_everything(99 if resume else 7, verbose=False)
    module = Sends(dropout=0.3)
    before = signal.getsignal(signal.SIGTERM)
    data = DataLoader(_Sent(place == "loader"), BATCH)
    try:
        run.fit(module, data, loader(2, seed=5), ckpt_path="last" if resume else None)
    except SystemExit as ended:
        assert signal.getsignal(signal.SIGTERM) is before
        os._exit(int(str(ended.code)))
    return module.losses


@functools.cache
def _left_alone() -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        losses: list[float] = run_in_child(lambda: _run(Path(folder)))
    return losses


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("place", ["loader", "forward", "optimizer", "save", "after the step", "evaluation"])
def test_a_signal_ends_the_training_at_the_end_of_the_step(place: str, asynchronous: bool, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    outcome = outcome_of(lambda: _run(folder, place, asynchronous=asynchronous))
    assert outcome.error == "the process died with exit code 143", f"{outcome.error}\n{outcome.output}"
    assert CheckpointStore(folder).load(NAME).step == 5
    expected = _left_alone()
    assert len(expected) == 12
    assert run_in_child(lambda: _run(folder, resume=True)) == expected[5:]


@isolated
def test_the_sync_point_of_a_tpu_ends_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(get_runtime().device), "preemption_sync_point", lambda self: lambda step: step == 3)
    with pytest.raises(SystemExit) as ended:
        fit(Classifier, XLAEagerStrategy(checkpoint={"save_on": "preemption"}), callbacks=lambda: [_last(tmp_path)])
    assert ended.value.code == 143
    assert CheckpointStore(tmp_path).load(NAME).step == 3


def test_a_kill_after_the_signal_leaves_what_was_there(tmp_path: Path) -> None:
    class Killed(_Sends):
        place = "forward"

        def on_save_checkpoint(self, checkpoint: Any) -> None:
            if self.trainer.global_step == 5:
                os.kill(os.getpid(), signal.SIGKILL)

    def child() -> None:
        fit(
            lambda: Killed(dropout=0.3),
            XLAEagerStrategy(checkpoint={"save_on": "preemption"}),
            callbacks=lambda: [each(tmp_path, save_last=True)],
        )

    outcome = outcome_of(child)
    assert outcome.error == "the process died with signal 9", f"{outcome.error}\n{outcome.output}"
    assert CheckpointStore(tmp_path).load("last.ckpt").step == 4


@isolated
def test_lightnings_own_way_goes_on_working(tmp_path: Path) -> None:
    class Sends(_Sends):
        place = "forward"

    with pytest.raises(SystemExit):
        fit(
            lambda: Sends(dropout=0.3),
            XLAEagerStrategy(checkpoint={"asynchronous": True}),
            callbacks=lambda: [OnExceptionCheckpoint(tmp_path)],
        )
    assert CheckpointStore(tmp_path).load("on_exception.ckpt").step == 5


# ---- schedule and watchdog ---------------------------------------------------------------------------


@isolated
def test_after_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    class Waits(Classifier):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            now[0] += 1.2 if batch_idx == 4 else 0

    monkeypatch.setattr(scheduled, "SaveSchedule", functools.partial(SaveSchedule, clock=lambda: now[0]))
    fit(Waits, XLAEagerStrategy(checkpoint={"every": 1.1}), max_epochs=1, callbacks=lambda: [_last(tmp_path)])
    assert CheckpointStore(tmp_path).load(NAME).step == 5


@isolated
@pytest.mark.parametrize(
    ("place", "what"),
    [
        ("forward", "step 5"),
        ("loader", "loading of the batch"),
        ("save", "save of checkpoint"),
        ("evaluation", "valid"),
    ],
)
def test_a_hang_ends_with_an_error(place: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    time_of_hangs.use_it(monkeypatch)
    vars(__import__(__name__, fromlist=["send"]))["send"] = time_of_hangs.hang
    io = checkpoints.torch.save

    def save(checkpoint: Any, file: Any) -> None:
        if place == "save":
            time_of_hangs.hang()
        io(checkpoint, file)

    vars(checkpoints)["_write"] = save

    class Hangs(_Sends):
        def on_save_checkpoint(self, checkpoint: Any) -> None: ...

    Hangs.place = place
    deadline = timedelta(hours=1)
    with pytest.raises(StallError, match=what):
        fit(
            Hangs,
            XLAEagerStrategy(checkpoint=CheckpointConfig(stall_deadline=deadline, asynchronous=place == "save")),
            data=lambda: DataLoader(_Sent(place == "loader"), BATCH),
            validation=lambda: loader(2, seed=5),
            callbacks=lambda: [each(tmp_path)],
            val_check_interval=5,
            check_val_every_n_epoch=None,
            max_epochs=1,
        )


# ---- options -----------------------------------------------------------------------------------------


@isolated(env={"CPU_NUM_DEVICES": "4"})
def test_what_cannot_take_effect_raises(tmp_path: Path) -> None:
    import xla_adapters

    with pytest.raises(UnsupportedOptionError, match=r"ModelCheckpoint\(save_top_k=3\)"):
        XLAEagerStrategy(checkpoint={"keep_last": 3})
    xla_adapters.initialize(spmd=True)
    parts = ShardingConfig(scheme="fsdp", checkpoints="sharded")
    with pytest.raises(UnsupportedOptionError, match="parts come to the host one at a time"):
        XLAEagerStrategy(checkpoint={"asynchronous": True}, sharding=parts)
    strategy = XLAEagerStrategy(checkpoint={"asynchronous": True}, checkpoint_io=TorchCheckpointIO(), sharding="dp")
    with pytest.raises(UnsupportedOptionError, match="TorchCheckpointIO writes the checkpoints"):
        trainer(strategy).fit(Classifier(), loader())
