"""Hooks of the module, of callbacks and of the data are called in the order, and with the arguments, of the CPU."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.strategies.single_xla import SingleDeviceXLAStrategy

from lightning_strategy import XLAEagerStrategy
from tests.isolation import isolated
from tests.lightning_strategy.scenarios import Classifier, loader, trainer

_NO_HOOKS = {"log", "log_dict", "print", "optimizers", "lr_schedulers", "all_gather", "toggle_optimizer"}
_NO_HOOKS |= {"untoggle_optimizer", "clip_gradients"}
_OF_MODULES = {"zero_grad", "train", "eval"}


def methods(kind: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")}


def described(value: Any) -> Any:
    if isinstance(value, dict):
        return sorted(map(str, value))
    return value if isinstance(value, (int, str, float, bool, type(None))) else type(value).__name__


def record(owner: Any, names: set[str], calls: list[Any], prefix: str) -> None:
    """Notes each call of the methods of an object, as Lightning's own tests do."""

    def noted(name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        calls.append(
            (prefix + name, [described(value) for value in args], {k: described(v) for k, v in kwargs.items()})
        )
        return method(*args, **kwargs)

    for name in names:
        method = getattr(owner, name)
        setattr(owner, name, functools.update_wrapper(functools.partial(noted, name, method), method))


class Hooked(Classifier):
    def __init__(self, calls: list[Any], *, automatic: bool = True) -> None:
        super().__init__(optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1))
        self.automatic_optimization = automatic
        hooks = methods(L.LightningModule) - methods(torch.nn.Module) - _NO_HOOKS
        record(self, hooks | _OF_MODULES, calls, "module: ")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if not self.automatic_optimization:
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
        return {"loss": loss}

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        return {"y": self.loss(batch)}

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0])


def hooked_callback(calls: list[Any]) -> L.Callback:
    callback = L.Callback()
    record(callback, methods(L.Callback), calls, "callback: ")
    return callback


def hooks_of(strategy: Any, function: str, *, automatic: bool = True, **options: Any) -> list[Any]:
    calls: list[Any] = []
    limits = {"limit_train_batches": 3, "limit_val_batches": 1, "limit_test_batches": 1, "limit_predict_batches": 1}
    run = trainer(strategy, callbacks=[hooked_callback(calls)], **{**limits, **options})
    loaders = [loader(), loader()] if function == "fit" else [loader()]
    getattr(run, function)(Hooked(calls, automatic=automatic), *loaders)
    return calls


@isolated
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"automatic": False},
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5},
        {"num_sanity_val_steps": 1, "val_check_interval": 2, "max_epochs": 1},
    ],
    ids=["automatic", "manual", "accumulation", "validation"],
)
def test_hooks_of_a_fit(options: dict[str, Any]) -> None:
    ours, plain = hooks_of(XLAEagerStrategy(), "fit", **options), hooks_of(None, "fit", **options)
    assert ours == plain
    assert len(ours) > 100


@isolated
def test_hooks_of_evaluation() -> None:
    for function in ("validate", "test", "predict"):
        assert hooks_of(XLAEagerStrategy(), function) == hooks_of(None, function)


@isolated
def test_the_users_callbacks_are_all_that_there_are(tmp_path: Path) -> None:
    seen: list[list[Any]] = []

    class Looks(L.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            seen.append(list(trainer.callbacks))

    profiler, given = SimpleProfiler(), [Looks(), ModelCheckpoint(tmp_path)]
    run = trainer(XLAEagerStrategy(), callbacks=given, profiler=profiler, max_epochs=1)
    run.fit(Classifier(), loader())
    assert seen == [given] * 6
    profiled = [name for name in profiler.recorded_durations if name.startswith("[Callback]")]
    assert profiled
    assert all(".Looks." in name or "]ModelCheckpoint{" in name for name in profiled)


@isolated
def test_a_loaded_checkpoint_has_the_entries_of_the_cpu(tmp_path: Path) -> None:
    """And so has what the files list: no lock, no temporary folder."""

    class Loads(Classifier):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.entries = set(checkpoint)

    entries = []
    for name, strategy in (("ours", XLAEagerStrategy), ("plain", lambda: None)):
        saves = ModelCheckpoint(tmp_path / name, save_last=True)
        trainer(strategy(), callbacks=[saves], max_epochs=1).fit(Loads(), loader())
        module = Loads()
        trainer(strategy(), max_epochs=2).fit(module, loader(), ckpt_path=saves.last_model_path)
        entries.append(module.entries)
    assert entries[0] == entries[1]
    assert sorted(path.name for path in (tmp_path / "ours").iterdir()) == ["epoch=0-step=6.ckpt", "last.ckpt"]


@isolated
def test_an_exception_reaches_the_next_class() -> None:
    told: list[BaseException] = []

    class Next(SingleDeviceXLAStrategy):
        def on_exception(self, exception: BaseException) -> None:
            told.append(exception)

    class Strategy(XLAEagerStrategy, Next):
        pass

    class Fails(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise ValueError("the test's own")

    with pytest.raises(ValueError, match="the test's own") as caught:
        trainer(Strategy()).fit(Fails(), loader())
    assert told == [caught.value]
