"""Exceptions and interrupts: a step that fails in any hook is discarded, and nothing of it is compiled or executed."""

from __future__ import annotations

import os
import signal
from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics

import xla_adapters
from lightning_strategy import XLAEagerStrategy
from tests.device import ON_TORCH_TPU
from tests.lightning_strategy.scenarios import BATCH, CLASSES, FEATURES, Classifier, fit, loader, trainer
from xla_adapters.errors import DiscardedTensorError, GraphLimitError, IndexRangeError, LossError, TensorReadError

pytestmark = pytest.mark.isolated

FAILS_AT = 2
IN_STEP = (
    "training_step",
    "on_before_zero_grad",
    "on_before_backward",
    "backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
)
BETWEEN_STEPS = ("on_train_batch_start", "lr_scheduler_step", "on_train_batch_end", "on_after_batch_transfer")
IN_CALLBACKS = ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")


class Recorder(L.Callback):
    """Keeps the weights and states of before the batch that fails."""

    def __init__(self) -> None:
        self.before: Any = None
        self.state: dict[str, Any] = {}

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == FAILS_AT:
            self.state = state_of(pl_module, trainer.optimizers)
            self.before = xla_adapters.get_runtime().counters.metrics()


def state_of(module: Any, optimizers: list[Any]) -> dict[str, torch.Tensor]:
    values = {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}
    for number, optimizer in enumerate(optimizers):
        for index, entries in optimizer.state_dict()["state"].items():
            for name, value in entries.items():
                if isinstance(value, torch.Tensor):
                    values[f"optimizer {number} {index} {name}"] = value.detach().cpu().clone()
    return values


def assert_same(ours: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == other.keys()
    changed = [name for name in ours if not torch.equal(ours[name], other[name])]
    assert not changed, f"changed: {changed}"


class Metered(Classifier):
    """Logs per epoch and updates a metric: state that a failed step must restore."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, classes = batch
        scores = self.net(inputs)
        self.accuracy(scores, classes)
        self.log("accuracy", self.accuracy, prog_bar=True, on_step=True, on_epoch=True)
        loss = torch.nn.functional.cross_entropy(scores, classes)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def fail_now(error: type[BaseException] | None) -> None:
    if error is None:
        # To this thread: a signal to the process may be handled much later, in code that ignores exceptions.
        signal.raise_signal(signal.SIGINT)
    else:
        raise error("the test's own")


def failing(hook: str, error: type[BaseException] | None) -> type[Metered]:
    """A module whose `hook` fails in batch `FAILS_AT`, after the work of the hook is done."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = getattr(Metered, hook)(self, *args, **kwargs)
        loop = self.trainer.fit_loop
        if loop.total_batch_idx + (hook == "on_after_batch_transfer") == FAILS_AT:
            fail_now(error)
        return result

    return type("Failing", (Metered,), {hook: method})


def failing_callback(hook: str) -> L.Callback:
    def method(self: Any, trainer: Any, *args: Any, **kwargs: Any) -> None:
        if trainer.fit_loop.total_batch_idx == FAILS_AT:
            fail_now(ValueError)

    return type("Failing", (L.Callback,), {hook: method})()


def assert_nothing_left(
    module: Any, expected: type[BaseException], *, steps: int, callbacks: Any = (), **options: Any
) -> None:
    """Fits, which fails; nothing of the failed step is left.

    Args:
        module: fails.
        expected: the exception.
        steps: how many steps of the failing batch were executed before it failed.
        callbacks, options: of the Trainer.
    """
    runtime = xla_adapters.get_runtime()
    runtime.device.initialize()
    environment, recorder = dict(os.environ), Recorder()
    run = trainer(XLAEagerStrategy(), callbacks=[recorder, *callbacks], **{"max_epochs": 1, **options})
    # A run that does not put the mode back is seen.
    runtime.tracing.set_eager(False)
    with pytest.raises(expected):
        run.fit(module, loader())
    after = runtime.counters.metrics()
    assert recorder.before is not None
    assert after.executions - recorder.before.executions == steps
    assert after.compiles == recorder.before.compiles
    assert runtime.tracing.pending_count() == 0
    assert ON_TORCH_TPU or not runtime.tracing.eager()
    assert runtime.tracing.execution_allowed()
    assert dict(os.environ) == environment
    if not steps:
        assert any(name.startswith("optimizer") for name in recorder.state)
        assert_same(state_of(module, run.optimizers), recorder.state)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_hooks_inside_the_step(error: type[BaseException]) -> None:
    expected = SystemExit if error is KeyboardInterrupt else error
    for hook in IN_STEP:
        assert_nothing_left(failing(hook, error)(), expected, steps=0)


def test_hooks_between_steps() -> None:
    for hook in BETWEEN_STEPS:
        module = failing(hook, ValueError)()
        steps = int(hook in ("lr_scheduler_step", "on_train_batch_end"))
        if hook == "on_after_batch_transfer":
            # Lightning calls it before `on_train_batch_start`, where the snapshot of this test is taken.
            with pytest.raises(ValueError, match="the test's own"):
                trainer(XLAEagerStrategy()).fit(module, loader())
            assert xla_adapters.get_runtime().tracing.pending_count() == 0
            continue
        assert_nothing_left(module, ValueError, steps=steps)


def test_hooks_of_callbacks() -> None:
    for hook in IN_CALLBACKS:
        assert_nothing_left(Metered(), ValueError, steps=0, callbacks=[failing_callback(hook)])


def test_accumulation_and_clipping() -> None:
    for hook in ("training_step", "on_before_zero_grad", "on_after_backward"):
        options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
        assert_nothing_left(failing(hook, ValueError)(), ValueError, steps=0, **options)


def test_a_real_interrupt_in_the_step() -> None:
    for hook in ("training_step", "on_after_backward"):
        # A shell that starts the tests in the background has SIGINT ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        assert_nothing_left(failing(hook, None)(), SystemExit, steps=0)


def test_manual_optimization() -> None:
    class Manual(Metered):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            optimizer = self.optimizers()
            loss = super().training_step(batch, batch_idx)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            if batch_idx == FAILS_AT:
                raise ValueError("the test's own")
            return loss

    assert_nothing_left(Manual(), ValueError, steps=0)


def test_a_read_in_the_step_names_its_line() -> None:
    class Reads(Metered):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if batch_idx == FAILS_AT:
                print(loss.item())
            return loss

    with pytest.raises(TensorReadError) as caught:
        fit(Reads, XLAEagerStrategy())
    line = Reads.training_step.__code__.co_firstlineno + 3
    assert (caught.value.filename, caught.value.lineno) == (__file__, line)
    assert "on_train_batch_end" in str(caught.value)
    if not ON_TORCH_TPU:
        ours = fit(Reads, XLAEagerStrategy(on_graph_break="allow"), max_epochs=1)
        assert ours.counters.executions == 7


def test_validation_that_fails() -> None:
    class Fails(Metered):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            super().validation_step(batch, batch_idx)
            if not self.trainer.sanity_checking and batch_idx == 1:
                raise ValueError("the test's own")

    runtime = xla_adapters.get_runtime()
    runtime.device.initialize()
    run = trainer(XLAEagerStrategy())
    runtime.tracing.set_eager(False)
    with pytest.raises(ValueError, match="the test's own"):
        run.fit(Fails(), loader(), loader(2))
    assert runtime.tracing.pending_count() == 0
    assert ON_TORCH_TPU or not runtime.tracing.eager()


def test_a_later_fit_goes_on_from_before_the_failed_step() -> None:
    """Metrics and logged values have nothing of the failed step."""

    class FailsOnce(Metered):
        fails = True

        def on_after_backward(self) -> None:
            if self.fails and self.trainer.fit_loop.total_batch_idx == FAILS_AT:
                self.fails = False
                raise ValueError("the test's own")

    L.seed_everything(7)
    module = FailsOnce()
    with pytest.raises(ValueError, match="the test's own"):
        trainer(XLAEagerStrategy(), max_epochs=1).fit(module, loader())
    assert module.accuracy._update_count == FAILS_AT
    run = trainer(XLAEagerStrategy(), max_epochs=1)
    run.fit(module, loader())
    assert all(value.isfinite() for value in run.callback_metrics.values())


@pytest.mark.parametrize("limit", [{"max_graphs": 1}, {"on_recompile": "error"}], ids=str)
def test_step_that_is_refused_at_its_end_leaves_metrics_as_before_it(limit: dict[str, Any]) -> None:
    class Counts(Metered):
        seen: Any = None

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.seen = {name: value.clone() for name, value in self.accuracy.metric_state.items()}

    rows = BATCH + BATCH // 2
    module = Counts()
    run = trainer(XLAEagerStrategy(**limit), max_epochs=1)
    with pytest.raises(GraphLimitError):
        run.fit(module, loader(rows=rows))
    assert module.seen is not None
    for name, value in module.accuracy.metric_state.items():
        assert torch.equal(value.cpu(), module.seen[name].cpu()), name


def test_what_a_dead_step_made_cannot_be_used() -> None:
    class Keeps(Metered):
        made: torch.Tensor

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.made = super().training_step(batch, batch_idx)
            if batch_idx == FAILS_AT:
                raise ValueError("the test's own")
            return self.made

    module = Keeps()
    with pytest.raises(ValueError, match="the test's own"):
        trainer(XLAEagerStrategy()).fit(module, loader())
    with pytest.raises(DiscardedTensorError):
        module.made.item()


def test_stopping_in_the_middle_of_an_accumulation() -> None:
    class Stops(Metered):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.trainer.should_stop = batch_idx == FAILS_AT

    for accumulation in ("per_micro_batch", "unrolled"):
        strategy = XLAEagerStrategy(accumulation=accumulation)  # type: ignore[arg-type]
        ours = fit(Stops, strategy, accumulate_grad_batches=4, max_epochs=1, min_epochs=0)
        # The batches before the stop are executed: their losses are logged, and their norms' averages kept, as on CPU.
        executed = 1 if accumulation == "unrolled" else FAILS_AT + 1
        assert ours.counters.executions == executed
        assert ours.trainer.global_step == 0
        assert xla_adapters.get_runtime().tracing.pending_count() == 0


def test_teardown_by_hand_executes_nothing() -> None:
    """The user catches the exception inside a hook and calls `teardown`."""
    runtime = xla_adapters.get_runtime()

    class TearsDown(Metered):
        executions: tuple[int, int] = (0, 0)

        def on_after_backward(self) -> None:
            if self.trainer.fit_loop.total_batch_idx == 0:
                before = runtime.counters.compile_totals()[0]
                self.trainer.strategy.teardown()
                self.executions = (before, runtime.counters.compile_totals()[0])
                raise ValueError("the test's own")

    module = TearsDown()
    run = trainer(XLAEagerStrategy())
    with xla_adapters.count() as counters, pytest.raises(ValueError, match="the test's own"):
        run.fit(module, loader())
    assert module.executions[0] == module.executions[1]
    assert counters.executions == 0
    assert next(module.parameters()).device.type == "cpu"


class ManyLosses(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, classes = batch
        return torch.nn.functional.cross_entropy(self.net(inputs), classes, reduction="none")


def test_a_loss_that_is_not_one_number() -> None:
    with pytest.raises(LossError, match=r"ManyLosses.training_step \(.*test_exceptions.py:\d+\) returns is a tensor"):
        fit(ManyLosses, XLAEagerStrategy(), max_epochs=1)
    fit(Classifier, XLAEagerStrategy(), max_epochs=1)


def test_a_class_that_is_out_of_range() -> None:
    inputs, classes = torch.randn(4 * BATCH, FEATURES), torch.zeros(4 * BATCH, dtype=torch.long)
    classes[2 * BATCH + 1] = CLASSES
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, classes), BATCH)
    with pytest.raises(IndexRangeError, match=rf"item 1\[1\] is {CLASSES}, and cross_entropy takes 0 to {CLASSES - 1}"):
        fit(Classifier, XLAEagerStrategy(), data=lambda: data, max_epochs=1)
