"""Fabric loops: the step is one graph, and the losses are those of Fabric on the plain CPU."""

from __future__ import annotations

import logging
import signal
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torchmetrics
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision, TorchCheckpointIO
from torch import nn

import xla_adapters
from lightning_strategy import XLAEagerFabricStrategy
from tests.lightning_strategy.scenarios import BATCH, CLASSES, FEATURES, assert_close, loader
from xla_adapters.errors import (
    CheckpointSaveError,
    ConfigError,
    DiscardedTensorError,
    GraphLimitError,
    RuntimeOrderError,
    TensorReadError,
    UnsupportedOptionError,
)

pytestmark = pytest.mark.isolated

BATCHES = 6


@dataclass
class Loop:
    """A Fabric, its model, and the counters of its steps.

    Args:
        strategy: `None` is the plain CPU.
        dropout: of the model.
        optimizer: makes the optimizer.
        options: of Fabric.
    """

    strategy: Any = None
    dropout: float = 0.0
    optimizer: Callable[[Any], Any] = lambda p: torch.optim.AdamW(p, lr=1e-2)
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        xla_adapters.initialize(eager=False)
        where = {"accelerator": "cpu"} if self.strategy is None else {"strategy": self.strategy}
        self.fabric: Any = Fabric(**where, **self.options)
        self.fabric.launch()
        self.fabric.seed_everything(7, verbose=False)
        # Not `Dropout(0)`, on which dynamo's openxla backend fails.
        drop = [nn.Dropout(self.dropout)] if self.dropout else []
        model = nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), *drop, nn.Linear(16, CLASSES))
        self.model, self.opt = self.fabric.setup(model, self.optimizer(model.parameters()))
        self.losses: list[float] = []

    @property
    def weights(self) -> list[torch.Tensor]:
        return [value.cpu().clone() for value in self.model.state_dict().values()]

    def step(self, **options: Any) -> AbstractContextManager[Any]:
        return nullcontext() if self.strategy is None else self.fabric.strategy.step(**options)

    def loss(self, batch: Any) -> torch.Tensor:
        inputs, classes = batch
        return nn.functional.cross_entropy(self.model(inputs), classes)

    def update(self, batch: Any) -> torch.Tensor:
        loss = self.loss(batch)
        self.fabric.backward(loss)
        self.opt.step()
        self.opt.zero_grad()
        return loss.detach()

    def train(self, batches: int = BATCHES, *, seed: int = 0, **options: Any) -> xla_adapters.StepCounters:
        """One step per batch; counts their cost without that of reading the losses."""
        kept = []
        with xla_adapters.count() as counters:
            for batch in self.fabric.setup_dataloaders(loader(batches, seed=seed, **options)):
                with self.step():
                    kept.append(self.update(batch))
        self.losses += [float(loss) for loss in kept]
        return counters


def xla_loop(**options: Any) -> Loop:
    names = ("dropout", "optimizer")
    loop = {name: options.pop(name) for name in names if name in options}
    return Loop(XLAEagerFabricStrategy(**options), **loop)


class Announced(logging.Handler):
    """The log's announcements of compiles inside the context."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "compiled graph" in record.getMessage():
            self.lines.append(record.getMessage())

    def __enter__(self) -> list[str]:
        log = logging.getLogger("xla_adapters")
        log.setLevel(logging.INFO)
        log.addHandler(self)
        return self.lines

    def __exit__(self, *_: object) -> None:
        logging.getLogger("xla_adapters").removeHandler(self)


# ---- counts and parity -----------------------------------------------------------------------------


def test_one_compile_one_execution_a_step_and_the_losses_of_plain_fabric() -> None:
    ours, plain = xla_loop(), Loop()
    counters = ours.train()
    plain.train()
    assert (counters.compiles, counters.executions) == (1, BATCHES)
    assert (counters.transfers_to_host, counters.eager_ops) == (0, 0)
    assert_close(ours.losses, plain.losses)
    assert ours.fabric.strategy.step_count == BATCHES


def test_by_name() -> None:
    ours = Loop("xla_eager")
    assert ours.fabric.device.type == "xla"
    assert ours.fabric.to_device(nn.Linear(2, 2)).weight.device.type == "xla"
    counters = ours.train()
    assert (counters.compiles, counters.executions) == (1, BATCHES)


def test_as_a_decorator() -> None:
    ours, plain = xla_loop(), Loop()
    bare = ours.fabric.strategy.step(ours.update)
    named = ours.fabric.strategy.step(name="named")(ours.update)
    batches = list(ours.fabric.setup_dataloaders(loader(4)))
    with xla_adapters.count() as counters, Announced() as announced:
        kept = [bare(batches[0]), bare(batches[1]), named(batches[2]), named(batches[3])]
    plain.train(4)
    # The same graph under two names is compiled once.
    assert (counters.compiles, counters.executions) == (1, 4)
    assert [line.split(":")[0] for line in announced] == ["update"]
    assert_close([float(loss) for loss in kept], plain.losses)


def test_loss_backward_without_fabric_and_an_update_with_a_closure() -> None:
    def closure(loop: Loop, batch: Any) -> torch.Tensor:
        loop.opt.zero_grad()
        loss = loop.loss(batch)
        loss.backward()
        return loss

    def run(loop: Loop) -> xla_adapters.StepCounters:
        kept = []
        with xla_adapters.count() as counters:
            for batch in loop.fabric.setup_dataloaders(loader()):
                with loop.step():
                    kept.append(loop.opt.step(partial(closure, loop, batch)).detach())
        loop.losses = [float(loss) for loss in kept]
        return counters

    ours, plain = xla_loop(), Loop()
    counters = run(ours)
    run(plain)
    assert (counters.compiles, counters.executions, counters.eager_ops) == (1, BATCHES, 0)
    assert_close(ours.losses, plain.losses)
    ours.fabric.strategy.teardown()
    dynamo = xla_loop(xla_mode="eager+dynamo")
    assert run(dynamo).executions == BATCHES
    assert_close(dynamo.losses, plain.losses)


@pytest.mark.parametrize("one_step", [False, True], ids=["a step each", "one step for all"])
def test_accumulated_gradients(one_step: bool) -> None:
    def run(loop: Loop) -> xla_adapters.StepCounters:
        kept = []
        with xla_adapters.count() as counters:
            batches = list(loop.fabric.setup_dataloaders(loader()))
            for first in range(0, BATCHES, 2):
                with loop.step() if one_step else nullcontext():
                    for index in (first, first + 1):
                        with loop.step(), loop.fabric.no_backward_sync(loop.model, enabled=index == first):
                            loss = loop.loss(batches[index]) / 2
                            loop.fabric.backward(loss)
                            kept.append(loss.detach())
                            if index != first:
                                loop.opt.step()
                                loop.opt.zero_grad()
        loop.losses = [float(loss) for loss in kept]
        return counters

    ours, plain = xla_loop(), Loop()
    counters = run(ours)
    run(plain)
    assert (counters.compiles, counters.executions) == ((1, 3) if one_step else (2, 6))
    assert counters.eager_ops == 0
    assert_close(ours.losses, plain.losses)


@pytest.mark.parametrize("how", [{"max_norm": 0.1, "error_if_nonfinite": False}, {"clip_val": 0.01}], ids=str)
def test_clipped_gradients(how: dict[str, Any]) -> None:
    def run(loop: Loop) -> xla_adapters.StepCounters:
        kept = []
        with xla_adapters.count() as counters:
            for batch in loop.fabric.setup_dataloaders(loader()):
                with loop.step():
                    loss = loop.loss(batch)
                    loop.fabric.backward(loss)
                    norm = loop.fabric.clip_gradients(loop.model, loop.opt, **how)
                    loop.opt.step()
                    loop.opt.zero_grad()
                    kept += [loss.detach()] if norm is None else [loss.detach(), norm.detach()]
        loop.losses = [float(loss) for loss in kept]
        return counters

    sgd = {"optimizer": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9)}
    ours, plain = xla_loop(**sgd), Loop(**sgd)
    counters = run(ours)
    run(plain)
    assert (counters.compiles, counters.executions, counters.eager_ops) == (1, BATCHES, 0)
    assert_close(ours.losses, plain.losses)


def test_clipping_says_once_that_a_step_cannot_raise_on_a_norm_that_is_not_finite() -> None:
    ours = xla_loop()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for batch in ours.fabric.setup_dataloaders(loader(2)):
            with ours.step():
                ours.fabric.backward(ours.loss(batch))
                norm = ours.fabric.clip_gradients(ours.model, ours.opt, max_norm=1.0)
    # Once, with the user's line.
    assert [told.filename for told in said if "error_if_nonfinite=False" in str(told.message)] == [__file__]
    assert norm.item() > 0
    ours.opt.param_groups[0]["params"][0].grad.fill_(float("nan"))
    with pytest.raises(RuntimeError, match="non-finite"):
        ours.fabric.clip_gradients(ours.model, ours.opt, max_norm=1.0)


def test_one_optimizer_after_the_other_with_steps_of_their_own() -> None:
    ours = xla_loop()
    with xla_adapters.count() as counters, Announced() as announced:
        for batch in ours.fabric.setup_dataloaders(loader(4)):
            with ours.step(name="discriminator"):
                ours.update(batch)
            with ours.step(name="generator"):
                ours.update((batch[0] * 2, batch[1]))
    # Outside of the step the multiplication would be an eager operation; here it is in the generator's graph.
    assert (counters.compiles, counters.executions, counters.eager_ops) == (2, 8, 0)
    assert [line.split(":")[0] for line in announced] == ["discriminator", "generator"]


# ---- explanations ----------------------------------------------------------------------------------


def test_a_compile_for_another_batch_is_explained() -> None:
    ours = xla_loop()
    with Announced() as announced:
        counters = ours.train(3, rows=2 * BATCH + 3)
    assert (counters.compiles, counters.executions) == (2, 3)
    assert "first call" in announced[0]
    assert f"[0]: ({BATCH}, {FEATURES}) float32 -> (3, {FEATURES}) float32" in announced[1]
    assert "step 2" in announced[1]


def test_max_graphs() -> None:
    ours = xla_loop(max_graphs=1)
    ours.train(2)
    before = ours.weights
    with pytest.raises(GraphLimitError):
        ours.train(1, rows=3)
    assert all(map(torch.equal, before, ours.weights))
    assert ours.fabric.strategy.step_count == 2


def test_an_update_outside_of_a_step_works_and_is_told_once() -> None:
    ours, plain = xla_loop(), Loop()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for loop in (ours, plain):
            for batch in loop.fabric.setup_dataloaders(loader(2)):
                loop.losses.append(float(loop.update(batch)))
    # Once, with the user's line.
    assert [told.filename for told in said if "outside of a step" in str(told.message)] == [__file__]
    assert_close(ours.losses, plain.losses)


# ---- precision -------------------------------------------------------------------------------------


@pytest.mark.parametrize("given_to", ["fabric", "strategy"])
@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_bfloat16(precision: str, given_to: str) -> None:
    options: dict[str, Any] = {"precision": precision}
    own = options if given_to == "strategy" else {}
    ours = Loop(XLAEagerFabricStrategy(**own), options={} if own else options)
    plain = Loop(options=options)
    counters = ours.train()
    plain.train()
    expected = torch.bfloat16 if precision == "bf16-true" else torch.float32
    assert ours.model.module[0].weight.dtype == expected
    assert (counters.compiles, counters.executions, counters.eager_ops) == (1, BATCHES, 0)
    assert_close(ours.losses, plain.losses, 3e-2)
    assert ours.losses != Loop().losses
    with ours.fabric.autocast():
        product = torch.ones(2, 2, device=ours.fabric.device) @ torch.ones(2, 2, device=ours.fabric.device)
    assert product.dtype == torch.bfloat16


# ---- random numbers and checkpoints ----------------------------------------------------------------


def test_random_numbers_repeat_after_the_seed_is_set_again() -> None:
    fabric: Any = Fabric(strategy=XLAEagerFabricStrategy())
    fabric.launch()

    def drawn(seed: int) -> list[list[float]]:
        fabric.seed_everything(seed, verbose=False)
        masks = [nn.functional.dropout(torch.ones(32, device=fabric.device))]
        for _ in range(2):
            with fabric.strategy.step():
                masks.append(nn.functional.dropout(torch.ones(32, device=fabric.device)))
        return [mask.tolist() for mask in masks]

    first, again, other = drawn(7), drawn(7), drawn(8)
    assert first == again
    assert len({tuple(mask) for mask in first + other}) == 6


def test_evaluating_does_not_change_the_training() -> None:
    ours, evaluated = xla_loop(dropout=0.5), xla_loop(dropout=0.5)
    ours.train(4)
    evaluated.fabric.seed_everything(7, verbose=False)
    batches = list(evaluated.fabric.setup_dataloaders(loader(4)))
    kept = []
    for batch in batches:
        with evaluated.step():
            kept.append(evaluated.update(batch))
        with torch.no_grad(), evaluated.fabric.strategy.eval_step():
            first = evaluated.loss(batch)
        with torch.no_grad(), evaluated.fabric.strategy.eval_step():
            second = evaluated.loss(batch)
        assert first.item() != second.item()
    assert [float(loss) for loss in kept] == ours.losses


_KEYS = ["model", "optimizer", "epoch"]


class Plugin(TorchCheckpointIO):
    """Copies what it saves."""

    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        super().save_checkpoint(dict(checkpoint), *args, **kwargs)


def test_random_numbers_go_on_from_what_a_plugin_saved(tmp_path: Path) -> None:
    """As in the files of earlier versions they are among the entries."""
    fabric = Fabric(strategy=XLAEagerFabricStrategy(checkpoint_io=Plugin()))
    fabric.launch()
    model = torch.nn.Linear(2, 2)
    wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))
    with fabric.strategy.step():
        fabric.backward(wrapped(torch.ones(1, 2, device=fabric.device)).sum())
        optimizer.step()
    state = {"model": wrapped, "optimizer": optimizer}
    fabric.save(tmp_path / "a.ckpt", state)
    nothing = {"model": lambda name, value: False, "optimizer": lambda name, value: False}
    fabric.save(tmp_path / "nothing.ckpt", {**state, "epoch": 1}, filter=nothing)
    assert torch.load(tmp_path / "nothing.ckpt") == {"epoch": 1}
    resumed = Fabric(strategy=XLAEagerFabricStrategy())
    resumed.launch()
    model = torch.nn.Linear(2, 2)
    wrapped, optimizer = resumed.setup(model, torch.optim.SGD(model.parameters(), 0.1))
    assert resumed.strategy.step_count == 0
    assert resumed.load(tmp_path / "a.ckpt", {"model": wrapped, "optimizer": optimizer}) == {}
    assert resumed.strategy.step_count == 1


def test_resuming_goes_on_exactly(tmp_path: Path) -> None:
    whole = xla_loop(dropout=0.5)
    whole.train(3)
    whole.train(3, seed=1)

    first = xla_loop(dropout=0.5)
    first.train(3)
    with xla_adapters.count() as saving:
        first.fabric.save(tmp_path / "a.ckpt", {"model": first.model, "optimizer": first.opt, "epoch": 1})
    assert (saving.compiles, saving.executions, saving.eager_ops) == (0, 0, 0)

    # What is saved is the user's dict, without a key of ours.
    assert list(torch.load(tmp_path / "a.ckpt")) == list(first.fabric.load(tmp_path / "a.ckpt")) == _KEYS
    rest = xla_loop(dropout=0.5)
    state = {"model": rest.model, "optimizer": rest.opt, "epoch": 0}
    with xla_adapters.count() as loading:
        assert rest.fabric.load(tmp_path / "a.ckpt", state) == {}
    assert (loading.compiles, loading.executions, loading.eager_ops) == (0, 0, 0)
    assert (state["epoch"], rest.fabric.strategy.step_count) == (1, 3)
    rest.train(3, seed=1)
    assert first.losses + rest.losses == whole.losses


def test_checkpoints_go_to_plain_fabric_and_back(tmp_path: Path) -> None:
    plain = Loop()
    plain.train(2)
    plain.fabric.save(tmp_path / "plain.ckpt", {"model": plain.model, "optimizer": plain.opt})
    ours = xla_loop()
    ours.fabric.load(tmp_path / "plain.ckpt", {"model": ours.model, "optimizer": ours.opt})
    counters = ours.train(2, seed=1)
    assert (counters.compiles, counters.executions) == (1, 2)
    ours.fabric.save(tmp_path / "ours.ckpt", {"model": ours.model, "optimizer": ours.opt})

    plain.losses.clear()
    plain.train(2, seed=1)
    assert_close(ours.losses, plain.losses)
    back = Loop()
    back.fabric.load(tmp_path / "ours.ckpt", {"model": back.model, "optimizer": back.opt})
    back.train(2, seed=2)
    plain.losses.clear()
    plain.train(2, seed=2)
    assert_close(back.losses, plain.losses)
    # Without an optimizer the file holds the weights alone.
    ours.fabric.save(tmp_path / "weights.ckpt", ours.model.state_dict())
    loaded = torch.load(tmp_path / "weights.ckpt", weights_only=True)
    assert {value.device.type for value in loaded.values()} == {"cpu"}
    back.fabric.load_raw(tmp_path / "weights.ckpt", back.model)
    assert_close([back.weights[0].sum().item()], [ours.weights[0].sum().item()])


# ---- exceptions and interrupts ---------------------------------------------------------------------


def test_an_exception_in_the_step_leaves_everything_as_it_was() -> None:
    undisturbed = xla_loop(dropout=0.5)
    undisturbed.train(2)
    undisturbed.train(2, seed=1)
    ours = xla_loop(dropout=0.5)
    metric = ours.fabric.to_device(torchmetrics.MaxMetric())
    ours.train(2)
    metric.update(torch.tensor(2.0, device=ours.fabric.device))
    before, batch = ours.weights, next(iter(ours.fabric.setup_dataloaders(loader(1, seed=1))))
    kept: list[torch.Tensor] = []

    def fails() -> None:
        with ours.step():
            kept.append(ours.update(batch))
            metric.update(kept[-1] + 5)
            raise ValueError("no")

    with xla_adapters.count() as counters, pytest.raises(ValueError, match="no"):
        fails()
    assert (counters.compiles, counters.executions, counters.eager_ops) == (0, 0, 0)
    assert all(map(torch.equal, before, ours.weights))
    assert metric.compute().item() == 2
    assert ours.fabric.strategy.step_count == 2
    with pytest.raises(DiscardedTensorError):
        kept[0].item()

    ours.train(2, seed=1)
    assert ours.losses == undisturbed.losses


def test_a_step_that_does_not_begin_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = xla_loop()
    with monkeypatch.context() as patched:
        patched.setattr("xla_adapters.replay.step_program.apply_process_options", Mock(side_effect=ValueError("no")))
        with pytest.raises(ValueError, match="no"), ours.step():
            pass
    assert ours.fabric.strategy.step_count == 0


def test_an_interrupt_while_the_step_is_executed_leaves_it_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and metrics are those of after the step, and the next step has other random numbers."""
    undisturbed = xla_loop(dropout=0.5)
    undisturbed.train(3)
    ours = xla_loop(dropout=0.5)
    metric = ours.fabric.to_device(torchmetrics.SumMetric())
    runtime = xla_adapters.get_runtime()
    finish = runtime.tracing.finish_step
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupted_finish() -> None:
        signal.raise_signal(signal.SIGINT)
        finish()

    for index, batch in enumerate(ours.fabric.setup_dataloaders(loader(3))):
        with monkeypatch.context() as patched:
            if index == 1:
                patched.setattr(runtime.tracing, "finish_step", interrupted_finish)
            with pytest.raises(KeyboardInterrupt) if index == 1 else nullcontext(), ours.step():
                ours.update(batch)
                metric.update(1)
    assert ours.fabric.strategy.step_count == 3
    assert metric.compute().item() == 3
    assert all(map(torch.equal, undisturbed.weights, ours.weights))


def test_reads_and_saves_in_the_step_raise(tmp_path: Path) -> None:
    ours = xla_loop()
    before, batch = ours.weights, next(iter(ours.fabric.setup_dataloaders(loader(1))))

    def reads() -> None:
        with ours.step():
            ours.update(batch).item()

    def logs() -> None:
        with ours.step():
            ours.fabric.log("loss", ours.update(batch))

    def saves() -> None:
        with ours.step():
            ours.update(batch)
            ours.fabric.save(tmp_path / "a.ckpt", {"model": ours.model})

    with pytest.raises(TensorReadError, match="behind the step"):
        reads()
    with pytest.raises(TensorReadError):
        logs()
    with pytest.raises(CheckpointSaveError):
        saves()
    assert not (tmp_path / "a.ckpt").exists()
    assert all(map(torch.equal, before, ours.weights))


# ---- evaluation and metrics ------------------------------------------------------------------------


@pytest.mark.parametrize("compile_eval", [True, False])
def test_evaluation_with_a_metric(compile_eval: bool) -> None:
    ours, plain = xla_loop(compile_eval=compile_eval), Loop()
    values = []
    for loop in (ours, plain):
        loop.train(2)
        metric = loop.fabric.to_device(torchmetrics.Accuracy(task="multiclass", num_classes=CLASSES))
        loop.model.eval()
        evaluating = nullcontext() if loop is plain else loop.fabric.strategy.eval_step()
        with xla_adapters.count() as counters, torch.no_grad():
            for inputs, classes in loop.fabric.setup_dataloaders(loader(4, seed=1)):
                with evaluating:
                    metric.update(loop.model(inputs), classes)
        values.append(metric.compute().item())
        if loop is ours and compile_eval:
            assert (counters.compiles, counters.executions, counters.eager_ops) == (1, 4, 0)
        elif loop is ours:
            assert counters.executions == 0 < counters.eager_ops
    assert values[0] == pytest.approx(values[1], abs=1e-6)


# ---- launch, modes and options ---------------------------------------------------------------------


def test_tied_weights_and_references_to_parameters_survive_the_move() -> None:
    fabric: Any = Fabric(strategy=XLAEagerFabricStrategy())
    fabric.launch()
    model = nn.Sequential(nn.Embedding(CLASSES, FEATURES), nn.Linear(FEATURES, CLASSES, bias=False))
    model[1].weight = model[0].weight
    weight = model[0].weight
    model = fabric.setup(model)
    optimizer = fabric.setup_optimizers(torch.optim.SGD([weight], lr=1.0))
    assert model.module[0].weight is model.module[1].weight is weight is optimizer.param_groups[0]["params"][0]
    assert weight.device.type == "xla"


def test_eager_mode_and_patches_last_from_launch_to_teardown() -> None:
    xla_adapters.initialize(eager=False)
    runtime, seeding = xla_adapters.get_runtime(), torch.manual_seed
    assert not runtime.tracing.eager()
    first, second = (Fabric(strategy=XLAEagerFabricStrategy()) for _ in range(2))
    assert runtime.tracing.eager()
    # The mode of a launch is put back as it was found.
    runtime.tracing.set_eager(False)
    for fabric in (first, second, second):
        fabric.launch()
    assert runtime.tracing.eager()
    first.strategy.teardown()
    assert runtime.tracing.eager()
    second.strategy.teardown()
    assert not runtime.tracing.eager()
    assert torch.manual_seed is seeding
    with pytest.raises(RuntimeOrderError, match=r"fabric\.launch\(\)"), second.strategy.step():  # type: ignore[attr-defined]
        pass


def test_a_batch_that_is_to_stay_on_the_host_stays() -> None:
    ours = xla_loop()
    (inputs, _) = next(iter(ours.fabric.setup_dataloaders(loader(1), move_to_device=False)))
    assert inputs.device.type == "cpu"
    with xla_adapters.count() as counters:
        assert ours.fabric.to_device({"inputs": inputs})["inputs"].device.type == "xla"
    assert (counters.eager_ops, counters.transfers_to_device) == (0, 1)


def test_gathering_on_one_device_changes_nothing() -> None:
    ours = xla_loop()
    gathered = ours.fabric.all_gather({"a": torch.tensor([1.0, 2.0]), "b": 3})
    assert gathered["a"].tolist() == [1.0, 2.0]
    assert gathered["b"].item() == 3
    assert ours.fabric.all_reduce(torch.tensor(2.0)).item() == 2
    assert ours.fabric.broadcast("text") == "text"


@pytest.mark.parametrize(("mode", "executions"), [("eager", 0), ("lazy", BATCHES), ("eager+dynamo", BATCHES)])
def test_other_modes(mode: Any, executions: int) -> None:
    ours, plain = xla_loop(xla_mode=mode), Loop()
    counters = ours.train()
    plain.train()
    assert counters.executions == executions
    assert_close(ours.losses, plain.losses)


def test_under_dynamo_a_loop_without_steps_has_three_graphs() -> None:
    ours, plain = xla_loop(xla_mode="eager+dynamo"), Loop()
    with xla_adapters.count() as counters:
        kept = [ours.update(batch) for batch in ours.fabric.setup_dataloaders(loader(BATCHES))]
    ours.losses = [float(loss) for loss in kept]
    plain.train()
    assert counters.executions == 3 * BATCHES
    assert_close(ours.losses, plain.losses)


def test_under_dynamo_the_graphs_of_updates_outside_of_steps_are_not_limited() -> None:
    ours, plain = xla_loop(xla_mode="eager+dynamo", max_graphs=1, on_recompile="error"), Loop()
    for loop in (ours, plain):
        kept = []
        for number, batch in enumerate(loop.fabric.setup_dataloaders(loader(BATCHES))):
            loop.opt.optimizer.param_groups[0]["weight_decay"] = 0.1 if number % 2 else 0
            kept.append(loop.update(batch))
        loop.losses = [float(loss) for loss in kept]
    assert_close(ours.losses, plain.losses)


def test_a_module_made_on_the_device() -> None:
    fabric: Any = Fabric(strategy=XLAEagerFabricStrategy(precision="bf16-true"))
    fabric.launch()
    with fabric.init_module():
        model = nn.Linear(2, 2)
    with fabric.init_tensor():
        tensor = torch.ones(2)
    assert (
        (model.weight.device.type, model.weight.dtype) == (tensor.device.type, tensor.dtype) == ("xla", torch.bfloat16)
    )


def test_what_cannot_work_is_refused() -> None:
    xla_adapters.initialize()

    def refused(match: str, make: Callable[[], Any], error: type[Exception] = UnsupportedOptionError) -> None:
        with pytest.raises(error, match=match):
            make()

    strategy = XLAEagerFabricStrategy
    refused("accelerator='gpu'", lambda: Fabric(strategy=strategy(), accelerator="gpu"))
    refused("devices=2", lambda: Fabric(strategy=strategy(), devices=2))
    refused("devices=2", lambda: Fabric(strategy="xla_eager", devices=2))
    refused("num_nodes=2", lambda: Fabric(strategy=strategy(), num_nodes=2))
    refused("precision='16-mixed'.*'bf16-mixed'", lambda: Fabric(strategy=strategy(), precision="16-mixed"))
    refused("precision='16-mixed'", lambda: Fabric(strategy="xla_eager", precision="16-mixed"))
    refused("given twice", lambda: Fabric(strategy=strategy(precision="bf16-true"), precision="32-true"), ConfigError)
    refused("MixedPrecision", lambda: Fabric(strategy=strategy(), plugins=[MixedPrecision("bf16-mixed", "cpu")]))
    refused("xla_mode='turbo'", lambda: strategy(xla_mode="turbo"), ConfigError)  # type: ignore[arg-type]
    refused("accumulation='unrolled'", lambda: strategy(accumulation="unrolled"))
    refused("step_replay=True with Fabric", lambda: strategy(xla_adapters.XLAConfig(step_replay=True)))
    refused(
        "with sharding was created after the XLA runtime had started",
        lambda: strategy(auto_sharding=True),
        RuntimeOrderError,
    )
    model = nn.Linear(2, 2)
    fused = torch.optim.AdamW(model.parameters(), fused=True)
    refused("fused=True", lambda: Fabric(strategy=strategy()).setup(model, fused))
    fabric: Any = Fabric(strategy=strategy(), accelerator="cpu", devices=1, precision="bf16-mixed")
    assert fabric.device.type == "xla"
    refused("name=", lambda: fabric.strategy.step("eval"), ConfigError)
    first, second = Fabric(strategy=strategy()), Fabric(strategy=strategy(xla_mode="lazy"))
    first.launch()
    refused("other settings", second.launch, ConfigError)
