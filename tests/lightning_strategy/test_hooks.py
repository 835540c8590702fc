"""Hooks and methods of modules that the user overrides, replaces or nests."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.strategies.single_xla import SingleDeviceXLAStrategy

import xla_adapters
from lightning_strategy import XLAEagerStrategy
from tests.lightning_strategy.scenarios import Classifier, assert_close, fit, loader, trainer, warnings_as_list
from xla_adapters.checkpoint import CheckpointConfig
from xla_adapters.errors import GraphBreakError, LossError

pytestmark = pytest.mark.isolated


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


def test_hooks_of_evaluation() -> None:
    for function in ("validate", "test", "predict"):
        assert hooks_of(XLAEagerStrategy(), function) == hooks_of(None, function)


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


# ---- recursion --------------------------------------------------------------------------------------


class InForward(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        def endless(value: torch.Tensor) -> torch.Tensor:
            return endless(torch.relu(value))

        return endless(self.net(batch[0])).mean()


class InBackward(Classifier):
    """Calls itself through the strategy."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.manual_backward(self.loss(batch))

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        self.manual_backward(loss)


class InAutomaticBackward(Classifier):
    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        self.trainer.strategy.backward(loss, None)


class InUpdate(Classifier):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.trainer.strategy.optimizer_step(self.trainer.optimizers[0], lambda: self.optimizer_step(*args, **kwargs))


class InValidation(Classifier):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.trainer.strategy.validation_step(batch, batch_idx)


def modes() -> tuple[object, ...]:
    """What a step changes in the process."""
    runtime = xla_adapters.get_runtime()
    return (
        xla_adapters.in_step(),
        runtime.tracing.execution_allowed(),
        runtime.tracing.eager(),
        torch.is_grad_enabled(),
        torch._C._is_multithreading_enabled(),
        torch.compiler._is_compiling_flag,
        torch.is_inference_mode_enabled(),
        torch.overrides._get_current_function_mode_stack(),
        sys.getrecursionlimit(),
    )


@pytest.mark.parametrize("kind", [InForward, InBackward, InAutomaticBackward, InUpdate, InValidation])
def test_a_recursion_without_end_leaves_the_process_usable(kind: type[Classifier]) -> None:
    before = fit(Classifier, XLAEagerStrategy(), max_epochs=1)
    usual = modes()
    for _ in range(2):
        with pytest.raises(RecursionError):
            trainer(XLAEagerStrategy(), max_epochs=1).fit(kind(), loader(), loader())
        assert modes() == usual
        assert xla_adapters.get_runtime().tracing.pending_count() == 0
    after = fit(Classifier, XLAEagerStrategy(), max_epochs=1)
    assert after.module.losses == before.module.losses
    assert (after.counters.compiles, after.counters.executions) == (0, before.counters.executions)


def test_an_exception_that_training_step_catches_does_not_end_the_step() -> None:
    class Catches(InBackward):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            with pytest.raises(ZeroDivisionError):
                self.manual_backward(loss)
            self.optimizers().zero_grad()
            loss.backward()
            self.optimizers().step()
            return loss

        def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            raise ZeroDivisionError

    ours, plain = fit(Catches, XLAEagerStrategy(), max_epochs=1), fit(Catches, max_epochs=1)
    torch.testing.assert_close(ours.module.net[0].weight, plain.module.net[0].weight, atol=2e-6, rtol=0)
    assert ours.counters.executions == 6


def deep(frames: int, function: Callable[[], Any]) -> Any:
    return function() if frames == 0 else deep(frames - 1, function)


def test_a_fit_near_the_recursion_limit_leaves_the_process_usable() -> None:
    """Lightning's own handling of the exception may fail, too, so that no teardown is called."""
    before = fit(Classifier, XLAEagerStrategy(), max_epochs=1)
    usual, failed, run = modes(), 0, trainer(XLAEagerStrategy(), max_epochs=1)
    for room in range(12, 60, 9):
        frames = sys.getrecursionlimit() - len(inspect.stack()) - room
        try:
            deep(frames, lambda: trainer(XLAEagerStrategy(), max_epochs=1).fit(Classifier(), loader(2), loader(1)))
        except BaseException:  # noqa: BLE001 (of any kind: what meets the limit decides)
            failed += 1
        try:
            deep(frames, lambda: run.fit(Classifier(), loader(2), loader(1)))
        except BaseException:  # noqa: BLE001
            failed += 1
        after = fit(Classifier, XLAEagerStrategy(), max_epochs=1)
        assert after.module.losses == before.module.losses, room
        assert modes() == usual, room
    assert failed >= 6
    run.fit(Classifier(), loader(2))


# ---- replaced parts ---------------------------------------------------------------------------------


class Manual(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        optimizer.step()
        return loss


@pytest.mark.parametrize("make", [Classifier, Manual])
def test_a_spy_in_place_of_the_backward_of_all_strategies(make: type[Classifier]) -> None:
    module, run = make(), trainer(XLAEagerStrategy(step_replay=False), max_epochs=1)
    with mock.patch.object(Strategy, "backward", wraps=run.strategy.backward) as spy:
        run.fit(module, loader())
        # A spy on the class is seen through the object, too.
        assert run.strategy.backward.call_count == spy.call_count == 6


class ReadsInBackward(Classifier):
    def loss(self, batch: Any) -> torch.Tensor:
        loss = super().loss(batch)
        loss.register_hook(lambda grad: float(grad) * grad)
        return loss


class NoNumber(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0])


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_errors_in_the_backward_discard_the_step(micro_batches: int) -> None:
    for make, kind in ((ReadsInBackward, GraphBreakError), (NoNumber, LossError)):
        module, run = make(), trainer(XLAEagerStrategy(), max_epochs=1, accumulate_grad_batches=micro_batches)
        before = [parameter.clone() for parameter in module.parameters()]
        with pytest.raises(kind):
            run.fit(module, loader())
        assert all(map(torch.equal, before, module.parameters()))
    later = fit(Classifier, XLAEagerStrategy(), max_epochs=1)
    assert_close(later.module.losses, fit(Classifier, max_epochs=1).module.losses)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_mock_in_place_of_torch_save_saves_nothing(asynchronous: bool, tmp_path: Path) -> None:
    strategy = XLAEagerStrategy(checkpoint=CheckpointConfig(asynchronous=asynchronous))
    callbacks = [ModelCheckpoint(tmp_path, save_top_k=-1, save_last=True)]
    run = trainer(strategy, max_epochs=3, callbacks=callbacks)
    with mock.patch("torch.save") as save, warnings_as_list() as found:
        run.fit(Classifier(), loader())
    assert save.call_count == 6
    assert list(tmp_path.iterdir()) == []
    assert sum("torch.save was replaced, and wrote no file" in text for text in found) == 6
    run.save_checkpoint(tmp_path / "now.ckpt")
    run.strategy.checkpoint_io.teardown()
    assert "state_dict" in torch.load(tmp_path / "now.ckpt", weights_only=True)


def test_storage_options_reach_the_parent_by_name(tmp_path: Path) -> None:
    run = trainer(XLAEagerStrategy(), max_epochs=1)
    run.fit(Classifier(), loader())
    with mock.patch.object(TorchCheckpointIO, "save_checkpoint") as save:
        run.save_checkpoint(tmp_path / "now.ckpt", storage_options="of the user")
    save.assert_called_with(mock.ANY, tmp_path / "now.ckpt", storage_options="of the user")
