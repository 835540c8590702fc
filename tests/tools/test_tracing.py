"""Steps of scripts, trainers and models are traced as their training would trace them, without running any."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

import xla_adapters
from hf_trainer import Trainer
from lightning_strategy import XLAEagerStrategy
from tests.hlo.modules import donated, operations, parameters, results, shardings_of_parameters
from tests.isolation import isolated, run_in_child
from tests.tools.trainings import (
    BATCH_NORM,
    LIGHTNING,
    LIGHTNING_CLI,
    LOOP,
    TRANSFORMERS,
    Net,
    batch,
    plan_of,
    traced_step,
)
from tests.tools.trainings import traced as traced_in_this_process
from xla_adapters import distribute_module
from xla_adapters.runtime import Runtime, get_runtime
from xla_adapters.runtime.torch_xla.tracing import XLATracing
from xla_adapters.sharding import ShardingConfig, place_batch
from xla_adapters.tools import preflight, user_script
from xla_adapters.tools.preflight_report import PreflightReport
from xla_adapters.tools.step_capture import EVALUATION, TRAINING, TracedStep
from xla_adapters.tools.trace_process import Request, Traced, adamw, trace_requested
from xla_adapters.tools.user_script import Hand, put_in, run_command
from xla_adapters.tracing.step_scope import current_scope
from xla_adapters.utils.child_process import Asked

ON_FOUR = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4", "XLA_ADAPTERS_CPU_TUNING": "0"}
CLASSES = {
    "transformers.trainer.Trainer": "hf_trainer.check:checked",
    "lightning.pytorch.trainer.trainer.Trainer": "lightning_strategy.check:checked",
}
MICRO_BATCH = "micro batch without an update (train_step)"


def in_folder(folder: Path, text: str, run: Callable[[str], Any]) -> list[str]:
    """Runs something with a script in the present folder; returns the files that are left there."""
    script = folder / "train.py"
    script.write_text(text)
    # A file that is newer than the process is not known to be what runs; the fork is older.
    os.utime(script, (0, 0))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        registered = [EntryPoint(name, value, user_script.GROUP) for name, value in CLASSES.items()]
        patch.setattr(user_script, "entry_points", lambda group: registered)
        run(str(script))
    return sorted(path.name for path in folder.iterdir())


def answered(request: Request, *, devices: int = 4) -> Traced:
    """What the tracing process answers."""

    def run(folder: str) -> list[bytes]:
        asked = Asked(pickle.dumps(request), Path(folder))
        trace_requested(asked)
        return [path.read_bytes() for path in Path(folder).glob("answer_*")]

    with tempfile.TemporaryDirectory() as scratch:
        environment = {**ON_FOUR, "CPU_NUM_DEVICES": str(devices)}
        (answer,) = run_in_child(lambda: run(scratch), env=environment)
        return pickle.loads(answer)  # type: ignore[no-any-return]


def traced(folder: Path, text: str, *, sharding: str | None = None, devices: int = 4) -> tuple[Traced, list[str]]:
    """What tracing a script gives, and the files that it left."""
    found: list[Traced] = []

    def run(script: str) -> None:
        request = Request(generation="v5e", command=(script,), sharding=sharding)
        found.append(answered(request, devices=devices))

    files = in_folder(folder, text, run)
    return found[0], files


def trained(folder: Path, text: str) -> list[tuple[bool, bytes]]:
    """The graphs that the script executes when it really trains, sharded by FSDP; and whether each updates."""
    modules: list[tuple[bool, bytes]] = []
    stock = XLATracing.finish_step

    def finish_step(self: XLATracing) -> None:
        runtime, scope = get_runtime(), current_scope()
        pending = {runtime.lazy.tensor_number(item): item for item in self.live_tensors() if self.is_pending(item)}
        assert scope is not None
        updates = bool(scope.undo_logs()[-1].optimizers())
        modules.append((updates, runtime.executables.text([pending[number] for number in sorted(pending)])))
        stock(self)

    def run(script: str) -> None:
        get_runtime().device.initialize(spmd=True)
        hand = Hand(folder=folder, change=lambda _: None, skip=lambda _: None, sharding="fsdp")
        with pytest.MonkeyPatch.context() as patch, put_in(hand):
            patch.setattr(XLATracing, "finish_step", finish_step)
            patch.setattr(Runtime, "replay_works", False)
            run_command([script])

    in_folder(folder, text, run)
    return modules


def kinds(found: Traced) -> list[str]:
    return [step.kind for step in found.steps]


def named(step: TracedStep, numbers: set[int]) -> set[str]:
    return {step.names[number] for number in numbers if number in step.names}


def in_bfloat16(step: TracedStep) -> bool:
    """Whether there is a matrix product in bfloat16 (16 in `xla_data.proto`)."""
    return any(operation[:2] == ("dot", 16) for operation in operations(step.module))


def test_a_loop_of_ones_own_is_traced_up_to_its_first_update(tmp_path: Path) -> None:
    found, files = traced(tmp_path, LOOP, devices=1)
    assert (found.problem, kinds(found), found.plan) == ("", [TRAINING], None)
    (step,) = found.steps
    state = {f"{kind}{layer}.{name}" for kind in ("", "exp_avg of ", "exp_avg_sq of ")
             for layer in (0, 2) for name in ("weight", "bias")}  # fmt: skip
    assert named(step, donated(step.module)) == state
    size = 4 * (128 * 256 + 256 + 256 * 8 + 8)
    assert 3 * size + 4 * 16 * 128 <= step.argument_bytes < 3 * size + 4 * 16 * 128 + 200
    assert files == ["train.py"]


def test_a_stock_trainer_is_traced_with_accumulation_and_evaluation(tmp_path: Path) -> None:
    found, files = traced(tmp_path, TRANSFORMERS, sharding="fsdp")
    assert (found.problem, kinds(found)) == ("", [TRAINING, MICRO_BATCH, EVALUATION])
    assert [step.batch for step in found.steps] == [
        f"input_ids {size}, labels {size}" for size in ("8x16", "8x16", "4x16")
    ]
    assert found.plan is not None
    assert (found.plan.name, found.plan.mesh.size) == ("fsdp", 4)
    update, micro_batch, evaluation = found.steps
    weight = "transformer.h.0.mlp.c_fc.weight"
    everything = {weight, f"exp_avg of {weight}", f"exp_avg_sq of {weight}", f"gradient of {weight}"}
    assert everything <= set(update.names.values())
    assert everything - named(update, donated(update.module)) <= {f"gradient of {weight}"}
    assert everything & set(micro_batch.names.values()) == {weight}
    assert {"batch.input_ids", "batch.labels"} <= set(evaluation.names.values())
    assert donated(evaluation.module) == set()
    # State and gradients in quarters beside the parameters.
    assert update.argument_bytes > 3.5 * micro_batch.argument_bytes
    assert all(in_bfloat16(step) for step in found.steps)
    assert files == ["train.py"]
    assert any("sharding='fsdp'" in note for note in found.changed)
    assert any("evaluate" in note and "left out" in note for note in found.changed)


@isolated(env=ON_FOUR, timeout=400)
def test_the_graphs_are_those_of_the_training(tmp_path: Path) -> None:
    text = TRANSFORMERS.replace("trainer.evaluate()\n", "").replace('save_model("final")', "evaluate()")
    for name in ("traced", "trained"):
        (tmp_path / name).mkdir()
    found, _ = traced(tmp_path / "traced", text, sharding="fsdp")
    assert kinds(found) == [TRAINING, MICRO_BATCH, EVALUATION], found.problem
    (micro_batch, first), (_, second), *evaluations = zip(*[iter(trained(tmp_path / "trained", text))] * 2, strict=True)
    assert (micro_batch[0], first[0], second[0], evaluations[-1][-1][0]) == (False, True, True, False)
    for step, (_, module) in zip(found.steps, (second, micro_batch, evaluations[-1][-1]), strict=True):
        for what in (operations, parameters, results):
            ours, theirs = what(step.module), what(module)
            assert ours == theirs, (step.kind, what.__name__, ours - theirs, theirs - ours)


def test_a_stock_trainer_of_lightning_is_traced(tmp_path: Path) -> None:
    found, files = traced(tmp_path, LIGHTNING, sharding="fsdp")
    assert (found.problem, kinds(found)) == ("", [TRAINING, MICRO_BATCH, EVALUATION])
    update, micro_batch, evaluation = found.steps
    state = {f"{kind}layer.{name}" for kind in ("", "momentum_buffer of ") for name in ("weight", "bias")}
    assert state <= named(update, donated(update.module)) <= state | {f"gradient of {name}" for name in state}
    for step in found.steps:
        assert {"layer.weight", "batch[0]", "batch[1]"} <= set(step.names.values())
    assert donated(evaluation.module) == set()
    assert update.argument_bytes > micro_batch.argument_bytes
    assert files == ["train.py"]
    assert any("sharding='fsdp'" in note for note in found.changed)
    assert any("left out" in note for note in found.changed)


def test_a_script_of_the_lightning_cli_is_traced(tmp_path: Path) -> None:
    pytest.importorskip("jsonargparse")
    found, files = traced(tmp_path, LIGHTNING_CLI, devices=1)
    assert (found.problem, kinds(found), found.steps[0].batch) == ("", [TRAINING], "16x64")
    assert files == ["train.py"]


def test_running_statistics_are_updated_by_micro_batches(tmp_path: Path) -> None:
    found, _ = traced(tmp_path, BATCH_NORM, devices=1)
    assert (found.problem, kinds(found)) == ("", [TRAINING, "micro batch without an update (step)"])
    statistics = {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    for step in found.steps:
        assert statistics <= named(step, donated(step.module))


def test_a_script_that_fails_names_its_line(tmp_path: Path) -> None:
    found, _ = traced(tmp_path, LOOP.replace("loss.backward()", "loss.backward(); loss.item()"), devices=1)
    assert found.steps == []
    assert found.problem.startswith("TensorReadError: ")
    assert "train.py:12" in found.problem
    # What a training would do after a warning needs the value.
    warned = LOOP.replace("loss.backward()", "loss.backward(); loss.item()")
    warned = warned.replace("xla_adapters.step()", "xla_adapters.step(on_graph_break='warn')")
    found, _ = traced(tmp_path, warned, devices=1)
    assert found.problem.startswith("TensorReadError: ")
    assert "on_graph_break" not in found.problem
    found, _ = traced(tmp_path, "print('nothing')", devices=1)
    assert found.problem.startswith("the script ended without an update in a step of xla-adapters")
    handled = TRANSFORMERS.replace("trainer.train()", "try:\n    trainer.train()\nexcept ValueError: pass")
    handled = handled.replace("tokens = torch.stack(rows)", "raise ValueError('no samples')")
    found, _ = traced(tmp_path, handled, devices=1)
    assert found.problem.startswith("the training raised, and the script went on: ValueError: no samples (")
    found, _ = traced(tmp_path, "import sys; sys.exit(3)", devices=1)
    assert found.problem == "the script ended with the exit status 3"


def traced_live(make: Callable[[], PreflightReport]) -> tuple[str, Traced]:
    """What a pre-flight that is made in a process of its own asks for, and what tracing it gives."""

    def run() -> tuple[str, Request]:
        requests: list[Request] = []

        def of(what: str, target: Any, request: Request, **_: Any) -> PreflightReport:
            requests.append(request)
            return PreflightReport(what=f"{what} for {target}", topology="")

        get_runtime().device.initialize(spmd=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(preflight, "_preflight", of)
            return make().what, requests[0]

    what, request = run_in_child(run, env=ON_FOUR)
    return what, answered(request)


def test_a_live_trainer_is_constructed_again_and_traced(tmp_path: Path) -> None:
    class Scaled(Trainer):
        def __init__(self, scale: float, **options: Any) -> None:
            super().__init__(**options)
            self.scale = scale

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
            return self.scale * super().compute_loss(model, inputs, **options)

    def make() -> PreflightReport:
        sizes: Any = {"n_layer": 1, "n_head": 1, "n_embd": 64, "vocab_size": 64, "n_positions": 16}
        trainer = Scaled(
            0.5,
            model=GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)),
            args=TrainingArguments(
                str(tmp_path), per_device_train_batch_size=8, gradient_accumulation_steps=2, report_to=[]
            ),
            train_dataset=[{"input_ids": torch.arange(16), "labels": torch.arange(16)}] * 4,
            sharding="dp",
        )
        report = trainer.preflight("v5e:2x2")
        assert trainer.xla_report().preflight is report
        return report

    what, found = traced_live(make)
    assert what == "Scaled of GPT2LMHeadModel for v5e:2x2"
    assert (found.problem, kinds(found)) == ("", [TRAINING, MICRO_BATCH])
    assert found.plan is not None
    assert found.plan.name == "dp"
    # The batch has 8 samples of 16 tokens, as in the training.
    assert {"batch.input_ids", "batch.labels"} <= set(found.steps[0].names.values())


def test_a_live_strategy_traces_a_fit_with_the_trainers_options(tmp_path: Path) -> None:
    class Classifier(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(64, 8)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("loss", torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1]))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    def make() -> PreflightReport:
        loader = DataLoader(TensorDataset(torch.zeros(8, 64), torch.zeros(8, dtype=torch.long)), batch_size=16)
        strategy = XLAEagerStrategy(sharding="fsdp")
        trainer = L.Trainer(
            strategy=strategy,
            accumulate_grad_batches=2,
            precision="bf16-mixed",
            logger=False,
            enable_progress_bar=False,
            default_root_dir=tmp_path,
        )
        report = strategy.preflight(trainer, Classifier(), loader, loader, topology="v5e:2x2")
        assert strategy.xla_report().preflight is report
        return report

    what, found = traced_live(make)
    assert what == "Classifier for v5e:2x2"
    assert (found.problem, kinds(found)) == ("", [TRAINING, MICRO_BATCH, EVALUATION])
    assert found.plan is not None
    assert found.plan.name == "fsdp"
    assert all(in_bfloat16(step) for step in found.steps)


def trained_net(scheme: str, *shape: int) -> bytes:
    """The graph of the second step of a real training."""
    modules: list[bytes] = []
    model = distribute_module(Net(), partition_fn=ShardingConfig(scheme=scheme, mesh_shape=shape))  # type: ignore[arg-type]
    optimizer, stock = adamw(list(model.parameters())), XLATracing.finish_step

    def finish_step(self: XLATracing) -> None:
        runtime = get_runtime()
        pending = {runtime.lazy.tensor_number(item): item for item in self.live_tensors() if self.is_pending(item)}
        modules.append(runtime.executables.text([pending[number] for number in sorted(pending)]))
        stock(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(XLATracing, "finish_step", finish_step)
        for _ in range(2):
            values = place_batch(model, batch())
            with xla_adapters.step():
                loss = model(**values)["loss"]
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            assert loss.item() > 0
    return modules[-1]


@isolated(env=ON_FOUR)
@pytest.mark.parametrize(("scheme", "shape"), [("dp", (4, 1)), ("fsdp", (4, 1)), ("2d", (2, 2))])
def test_the_step_of_a_model_is_that_of_a_training(scheme: str, shape: tuple[int, int]) -> None:
    ours, real = traced_step(scheme, *shape).module, trained_net(scheme, *shape)
    for what in (operations, parameters, results):
        assert what(ours) == what(real)


@isolated(env=ON_FOUR)
def test_state_is_donated_and_named_and_has_no_memory() -> None:
    found = traced_step("fsdp", 4, 1)
    state = {f"{kind}{name}" for name, _ in Net().named_parameters() for kind in ("", "exp_avg of ", "exp_avg_sq of ")}
    assert named(found, donated(found.module)) == state
    assert set(found.names.values()) - state == {"batch.inputs", "batch.labels"}
    assert set(found.names) <= set(shardings_of_parameters(found.module))
    assert get_runtime().tracing.pending_count() == 0


@isolated(env=ON_FOUR)
def test_a_step_that_reads_cannot_be_traced() -> None:
    class Reading(Net):
        def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            assert inputs.sum().item() >= 0
            return super().forward(inputs, labels)

    with torch.device("meta"):
        model = Reading()
    found = traced_in_this_process(plan_of("dp", 4, 1), model)
    assert found.steps == []
    assert found.problem.startswith("TensorReadError: ")
