"""Errors inside a step: the step has no effect, and the state of the process is restored."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any
from unittest.mock import Mock

import accelerate.data_loader
import accelerate.utils.operations
import pytest
import torch
import torch._dynamo
import transformers.trainer_pt_utils
from transformers import TrainerCallback

import hf_trainer
import xla_adapters
from tests.device import ON_TORCH_TPU
from tests.hf_trainer.scenarios import (
    Classifier,
    Sample,
    arguments,
    assert_close,
    on_cpu,
    ours,
    reference,
    steps_of,
    vector_samples,
)
from xla_adapters import GraphLimitError, TensorReadError, get_runtime

pytestmark = pytest.mark.isolated


def _patchable() -> dict[str, Any]:
    """Everything the trainer replaces while it runs."""
    return {
        # accelerate has it only if torch_xla is installed.
        "MpDeviceLoaderWrapper": vars(accelerate.data_loader).get("MpDeviceLoaderWrapper"),
        "_tpu_gather": accelerate.utils.operations._tpu_gather,
        "nested_xla_mesh_reduce": transformers.trainer_pt_utils.nested_xla_mesh_reduce,
        "_is_compiling_flag": torch.compiler._is_compiling_flag,
        "eager": get_runtime().tracing.eager(),
        "execution_allowed": get_runtime().tracing.execution_allowed(),
        "graph_name": get_runtime().tracing.graph_name(),
        "modes": torch.overrides._len_torch_function_stack(),
        "gradients": torch.is_grad_enabled(),
    }


def _before_in_lazy_mode() -> dict[str, Any]:
    """As `_patchable`, in a process that is lazy again: a run that does not put the mode back is seen."""
    get_runtime().tracing.set_eager(False)
    return _patchable()


def _state(trainer: Any) -> dict[str, torch.Tensor]:
    tensors = {name: value.detach().cpu() for name, value in trainer.model.state_dict().items()}
    for index, values in enumerate(trainer.optimizer.state.values()):
        tensors |= {f"{index}.{name}": torch.as_tensor(value).cpu().clone() for name, value in values.items()}
    return tensors


class Snapshot(TrainerCallback):
    """Keeps the state before each step, and counts executions from there."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.state: dict[str, torch.Tensor] = {}
        self.executions = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.state = _state(self.trainer)
        self.executions = get_runtime().counters.metrics().executions


class FailsAt(TrainerCallback):
    """Raises in one of the loop's events, once."""

    def __init__(self, event: str, error: BaseException) -> None:
        self.armed = True

        def fail(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2 and self.armed:
                self.armed = False
                raise error

        setattr(self, event, fail)


class FailingTrainer(hf_trainer.Trainer):
    """Raises once in `compute_loss`, after the model's forward was traced."""

    error: BaseException | None = None

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        if self.state.global_step == 2 and self.error is not None:
            error, self.error = self.error, None
            raise error
        return loss


def _trainer(where: str, error: BaseException, **options: Any) -> Any:
    snapshot = Snapshot()
    callbacks: list[TrainerCallback] = [snapshot]
    if where.startswith("on_"):
        callbacks.append(FailsAt(where, error))
    trainer = FailingTrainer(
        model=Classifier(dropout=0.2),
        args=arguments(max_steps=5),
        train_dataset=vector_samples(40),
        callbacks=callbacks,
        **options,
    )
    snapshot.trainer = trainer
    if where == "compute_loss":
        trainer.error = error
    return trainer, snapshot


@pytest.mark.parametrize("where", ["compute_loss", "on_pre_optimizer_step"])
@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()])
@pytest.mark.parametrize("options", [{}, {"accumulation": "unrolled"}], ids=["plain", "unrolled"])
def test_exception_leaves_everything_as_before(where: str, error: BaseException, options: dict[str, Any]) -> None:
    trainer, snapshot = _trainer(where, error, **options)
    before = _before_in_lazy_mode()
    if options:
        trainer.args.gradient_accumulation_steps = 2
    with pytest.raises(type(error)) as raised:
        trainer.train()
    assert raised.value is error
    # Nothing is pending, so that reading the state below executes nothing.
    assert get_runtime().tracing.pending_count() == 0
    assert get_runtime().counters.metrics().executions == snapshot.executions
    after = _state(trainer)
    assert trainer.state.global_step == 2
    assert snapshot.state.keys() == after.keys()
    assert all(torch.equal(snapshot.state[name], after[name]) for name in after)
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    assert _patchable() == before
    # Training starts again in the same process, at the first step, and needs no new graph.
    trainer.train()
    assert trainer.state.global_step == 5
    assert steps_of(trainer).train.graphs == 1
    assert _patchable() == before


class InterruptsUpdate(TrainerCallback):
    """Ctrl-C once while the optimizer steps, where it calls a function."""

    def __init__(self, function: Any) -> None:
        self.trainer: Any = None
        self._code = function.__code__
        self.was_replaying = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 8 and not self.was_replaying:
            sys.settrace(self._trace)

    def _trace(self, frame: FrameType, event: str, arg: object) -> None:
        if frame.f_code is self._code and steps_of(self.trainer).train.is_replaying:
            self.was_replaying = True
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    "function", [torch.optim.Optimizer._cuda_graph_capture_health_check, torch._dynamo.graph_break]
)
def test_an_update_that_is_interrupted_in_a_replayed_step(function: Any) -> None:
    """A replay empties the optimizer for its step. Afterwards it must have its parameters again."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    snapshot, interrupts = Snapshot(), InterruptsUpdate(function)
    trainer = hf_trainer.Trainer(
        model=Classifier(dropout=0.2),
        args=arguments(max_steps=10),
        train_dataset=vector_samples(80),
        callbacks=[snapshot, interrupts],
    )
    snapshot.trainer = interrupts.trainer = trainer
    before = _before_in_lazy_mode()
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert interrupts.was_replaying, (steps_of(trainer).train.replay_reasons, steps_of(trainer).train.replays)
    after = _state(trainer)
    assert snapshot.state.keys() == after.keys()
    assert all(torch.equal(snapshot.state[name], after[name]) for name in after)
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    assert held == {id(parameter) for parameter in trainer.model.parameters()}
    assert _patchable() == before
    trainer.train()
    assert trainer.state.global_step == 10


@pytest.mark.parametrize("event", ["on_optimizer_step", "on_step_end", "on_log"])
def test_exception_behind_the_step_keeps_the_step(event: str) -> None:
    """The update is done, but the state of the process is restored."""
    trainer, snapshot = _trainer(event, ValueError("mine"))
    before = _before_in_lazy_mode()
    with pytest.raises(ValueError, match="mine"):
        trainer.train()
    after = _state(trainer)
    assert any(not torch.equal(snapshot.state[name], after[name]) for name in after)
    assert _patchable() == before
    assert get_runtime().tracing.pending_count() == 0
    trainer.train()
    assert trainer.state.global_step == 5


class Reads(TrainerCallback):
    """Reads tensors in an event, as logging callbacks do."""

    def __init__(self, event: str, read: Callable[[Any], Any]) -> None:
        self.values: list[Any] = []

        def act(args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            self.values.append(read(model))

        setattr(self, event, act)


def _first_weight(model: Any) -> float:
    return float(next(model.parameters()).sum().item())


@pytest.mark.parametrize("event", ["on_step_begin", "on_optimizer_step", "on_step_end", "on_log", "on_epoch_end"])
def test_callbacks_may_read_tensors_outside_the_step(event: str) -> None:
    expected_reads, reads = Reads(event, _first_weight), Reads(event, _first_weight)
    expected = reference(Classifier(), vector_samples(16), callbacks=[expected_reads])
    run = ours(Classifier(), vector_samples(16), callbacks=[reads])
    assert_close(run.losses, expected.losses)
    assert_close(reads.values, expected_reads.values)
    assert steps_of(run.trainer).train.graphs == 1


def test_read_inside_the_step_is_an_error_with_its_line() -> None:
    trainer, _ = _trainer("nowhere", ValueError())
    trainer.add_callback(Reads("on_pre_optimizer_step", _first_weight))
    with pytest.raises(TensorReadError) as raised:
        trainer.train()
    assert raised.value.filename == __file__
    assert raised.value.lineno == _first_weight.__code__.co_firstlineno + 1
    assert "on_step_end" in str(raised.value)


def test_read_inside_the_step_works_under_warn() -> None:
    expected_reads = Reads("on_pre_optimizer_step", _first_weight)
    expected = reference(Classifier(), vector_samples(16), callbacks=[expected_reads])
    reads = Reads("on_pre_optimizer_step", _first_weight)
    with pytest.warns(xla_adapters.GraphBreakWarning) as warned:
        run = ours(Classifier(), vector_samples(16), callbacks=[reads], on_graph_break="warn")
    assert len([warning for warning in warned if warning.category is xla_adapters.GraphBreakWarning]) == 1
    assert_close(run.losses, expected.losses)
    assert_close(reads.values, expected_reads.values)
    # One execution at the read, one for the rest of the step. Nothing is computed twice.
    assert [step.executions for step in run.steps] == [2] * 4


def _norms(model: Any) -> list[float] | None:
    if any(parameter.grad is None for parameter in model.parameters()):
        return None
    return [float(parameter.grad.norm().item()) for parameter in model.parameters()]


def test_callbacks_may_read_gradients_in_on_optimizer_step() -> None:
    expected_reads, reads = Reads("on_optimizer_step", _norms), Reads("on_optimizer_step", _norms)
    expected = reference(Classifier(), vector_samples(16), callbacks=[expected_reads])
    run = ours(Classifier(), vector_samples(16), callbacks=[reads])
    assert_close(run.losses, expected.losses)
    for ours_, theirs in zip(reads.values, expected_reads.values, strict=True):
        assert_close(ours_, theirs)
    # With free_grads=True gradients are freed in the step in spite of the callback.
    gone = Reads("on_optimizer_step", _norms)
    ours(Classifier(), vector_samples(16), callbacks=[gone], free_grads=True)
    assert gone.values == [None] * 4


@pytest.mark.parametrize("workers", [0, 2])
def test_dataset_exceptions_reach_the_user(workers: int) -> None:
    class Broken(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int) -> Sample:
            if index == 13:
                raise ValueError("sample 13 is broken")
            return vector_samples(20)[index]

    args = {"max_steps": 5, "dataloader_num_workers": workers, "train_sampling_strategy": "sequential"}
    with on_cpu(Classifier(), Broken(), args=args) as expected, pytest.raises(ValueError, match="sample 13 is broken"):
        expected.train()
    trainer = hf_trainer.Trainer(model=Classifier(), args=arguments(**args), train_dataset=Broken())
    with pytest.raises(ValueError, match="sample 13 is broken"):
        trainer.train()
    # accelerate reads one batch ahead, so the third batch is not trained either.
    assert trainer.state.global_step == expected.state.global_step == 2


def _two_lengths() -> list[Sample]:
    """Batches of 4 vectors, then a partial batch of 2."""
    return vector_samples(10)


def test_new_shape_is_announced(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="xla_adapters"):
        run = ours(Classifier(), _two_lengths(), args=arguments(max_steps=6))
    told = [record.getMessage() for record in caplog.records if "compiled graph 2" in record.getMessage()]
    assert len(told) == 1
    assert "x: (4, 4) float32 -> (2, 4) float32" in told[0]
    assert run.counts.compiles == 2
    assert [step.compiles for step in run.steps] == [1, 0, 1, 0, 0, 0]


def test_max_graphs_discards_the_step() -> None:
    trainer = hf_trainer.Trainer(
        model=Classifier(), args=arguments(max_steps=6), train_dataset=_two_lengths(), max_graphs=1
    )
    snapshot = Snapshot()
    snapshot.trainer = trainer
    trainer.add_callback(snapshot)
    with pytest.raises(GraphLimitError, match="max_graphs=1"):
        trainer.train()
    after = _state(trainer)
    assert all(torch.equal(snapshot.state[name], after[name]) for name in after)
    assert steps_of(trainer).train.graphs == 1


def test_a_recompile_is_an_error_on_request_in_training_only() -> None:
    """The last batch of the evaluation is smaller, and accumulation has a graph for each kind of micro batch."""
    args = arguments(max_steps=4, gradient_accumulation_steps=2, per_device_eval_batch_size=3)
    run = ours(Classifier(), vector_samples(32), args=args, on_recompile="error", eval_dataset=vector_samples(4))
    run.trainer.evaluate()
    assert len(run.losses) == 4
    with pytest.raises(GraphLimitError, match=r"on_recompile='error': x: \(4, 4\) float32 -> \(2, 4\) float32"):
        ours(Classifier(), _two_lengths(), args=arguments(max_steps=6), on_recompile="error")


def test_max_graphs_counts_graphs() -> None:
    """Exactly the allowed number of graphs is no error."""
    one_shape = ours(Classifier(), vector_samples(8), args=arguments(max_steps=6), max_graphs=1)
    assert len(one_shape.losses) == 6
    two_shapes = ours(Classifier(), _two_lengths(), args=arguments(max_steps=6), max_graphs=2)
    assert len(two_shapes.losses) == 6


def _before_each_execution(act: Callable[[], None], step_replay: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = get_runtime()
    assert runtime.replay_works

    def acting(execute: Callable[..., Any]) -> Callable[..., Any]:
        def executed(*args: Any, **options: Any) -> Any:
            act()
            return execute(*args, **options)

        return executed

    if ON_TORCH_TPU:
        compile_ = runtime.placeholders.compile
        monkeypatch.setattr(runtime.placeholders, "compile", lambda *args: acting(compile_(*args)))
        return
    part, execution = (runtime.executables, "run") if step_replay else (runtime.tracing, "finish_step")
    monkeypatch.setattr(part, execution, acting(getattr(part, execution)))


@pytest.mark.parametrize("step_replay", [False, True])
@pytest.mark.parametrize("runs_out_at", [0, 2])
def test_auto_find_batch_size(runs_out_at: int, step_replay: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Running out of memory discards the step and halves the batch."""
    trainer: Any = None

    def run_if_it_fits() -> None:
        if trainer._train_batch_size > 4 and trainer.state.global_step == runs_out_at:
            raise RuntimeError("Bad StatusOr access: RESOURCE_EXHAUSTED: Out of memory allocating 17179869184 bytes.")

    _before_each_execution(run_if_it_fits, step_replay, monkeypatch)
    options = {"train_sampling_strategy": "sequential", "max_steps": 4}
    trainer = hf_trainer.Trainer(
        model=Classifier(),
        args=arguments(per_device_train_batch_size=8, auto_find_batch_size=True, **options),
        train_dataset=vector_samples(32),
        step_replay=step_replay,
    )
    snapshot = Snapshot()
    snapshot.trainer = trainer
    trainer.add_callback(snapshot)
    trainer.train()
    assert trainer._train_batch_size == 4
    assert trainer.state.global_step == 4
    assert trainer.state.train_batch_size == 4
    if runs_out_at == 0:
        # The failed step had no effect: the losses are those of a run that began with the smaller batch.
        expected = reference(Classifier(), vector_samples(32), args=options)
        assert_close([entry["loss"] for entry in trainer.state.log_history if "loss" in entry], expected.losses)


@pytest.mark.parametrize(
    ("execution", "step_replay"),
    [("placeholders.compile", False), ("placeholders.compile", True)]
    if ON_TORCH_TPU
    else [("tracing.finish_step", False), ("executables.compile", True)],
)
def test_out_of_memory_without_auto_find_batch_size(
    execution: str, step_replay: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> Any:
        raise RuntimeError(
            "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm."
        )

    assert get_runtime().replay_works
    part, _, method = execution.partition(".")
    monkeypatch.setattr(getattr(get_runtime(), part), method, fail)
    trainer = hf_trainer.Trainer(
        model=Classifier(), args=arguments(), train_dataset=vector_samples(16), step_replay=step_replay
    )
    with pytest.raises(xla_adapters.errors.DeviceOutOfMemoryError, match="batch smaller"):
        trainer.train()


def test_a_run_that_does_not_begin_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next run has its patches and its eager mode."""
    trainer = hf_trainer.Trainer(model=Classifier(), args=arguments(max_steps=3), train_dataset=vector_samples(24))
    before = _before_in_lazy_mode()
    with monkeypatch.context() as patched, pytest.raises(ValueError, match="mine"):
        patched.setattr(trainer._xla.sharding, "applied", Mock(side_effect=ValueError("mine")))
        trainer.train()
    assert _patchable() == before
    trainer.train()
    assert steps_of(trainer).train.calls == 3
    assert _patchable() == before
