"""The trainers on TorchTPU: one launch per step, the losses of the CPU, and what is not there says so."""

from __future__ import annotations

import itertools
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import lightning as L
import lightning.pytorch as pl
import pytest
import torch

import hf_trainer
import xla_adapters
from lightning_strategy import XLAEagerFabricStrategy, XLAEagerStrategy
from tests.hf_trainer.scenarios import Classifier, arguments, gpt2, token_samples, vector_samples
from tests.lightning_strategy.scenarios import trainer
from tests.torch_tpu import stand_in
from tests.trainers import Moment, each_trainer, train
from xla_adapters.errors import UnsupportedOptionError, XLAAdapterError

pytestmark = pytest.mark.isolated


@each_trainer
@pytest.mark.parametrize("step_replay", ["auto", False])
def test_it_trains_as_the_cpu_does_in_one_launch_per_step(kind: str, step_replay: str | bool) -> None:
    """With tied weights in transformers' trainer, and clipping."""

    def options() -> dict[str, Any]:
        if kind == "hf":
            return {"net": gpt2(layers=2), "data": token_samples(32), "clip": 1.0}
        return {"net": Classifier(), "data": vector_samples(32), "clip": 1.0}

    counted: list[stand_in.Counts] = []

    def count(moment: Moment) -> None:
        assert next(moment.model.parameters()).device == torch.device("tpu:0")
        torch.accelerator.synchronize()
        counted.append(stand_in.counts())

    expected = train(kind, on_cpu=True, **options())
    trained = train(kind, step_replay=step_replay, at={"step begin": count}, **options())
    if kind == "hf":
        assert trained.trainer.accelerator.device == trained.trainer.args.device == torch.device("tpu:0")
        assert trained.trainer.model.lm_head.weight is trained.trainer.model.transformer.wte.weight
        assert trained.trainer.run_stats.steps == 8
    torch.testing.assert_close(trained.losses, expected.losses, rtol=0, atol=1e-5)
    weights = expected.weights()
    for name, value in trained.weights().items():
        torch.testing.assert_close(value, weights[name], rtol=0, atol=1e-4, msg=name)
    # From the begin of one step to that of the next; with transformers' logs.
    steps = [after.since(before) for before, after in itertools.pairwise(counted)]
    assert len(steps) == 7
    steady = steps[3:] if kind == "hf" else steps
    assert {counts.executions for counts in steady} == {1}
    # Of the first step, which finds no gradients; the others are the same program.
    assert [counts.compiles for counts in steps[3:]] == [0] * 4
    assert kind == "hf" or sum(counts.compiles for counts in steps) == 1


@pytest.mark.parametrize(
    ("kind", "option", "value", "named"),
    [
        *((kind, "sharding", "fsdp", "torch_tpu") for kind in ("hf", "lightning")),
        *((kind, "xla_mode", "lazy", "xla_mode='lazy'") for kind in ("hf", "lightning")),
        ("hf", "xla_mode", "eager+dynamo", "xla_mode='eager\\+dynamo'"),
        ("hf", "rng_algorithm", "philox", "rng_algorithm='philox'"),
    ],
)
def test_what_is_not_there_says_so(kind: str, option: str, value: Any, named: str) -> None:
    with pytest.raises(XLAAdapterError, match=named):
        train(kind, **{option: value})


# ---- transformers ------------------------------------------------------------------------------------


def test_the_device_of_accelerate_is_set_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="hf_trainer"):
        for _ in range(2):
            hf_trainer.Trainer(gpt2(), arguments(), train_dataset=token_samples(4))
    (said,) = [record.getMessage() for record in caplog.records if record.name.startswith("hf_trainer")]
    assert said == "accelerate took the device cpu; a trainer of TorchTPU gives it tpu:0"


def test_an_accelerator_of_the_program_is_no_reason_to_refuse() -> None:
    args = arguments()
    accelerate.Accelerator()
    trainer = hf_trainer.Trainer(model=gpt2(), args=args, train_dataset=token_samples(4))
    assert trainer.accelerator.device == torch.device("tpu:0")


@pytest.mark.isolated(env={"WORLD_SIZE": "2"})
@pytest.mark.parametrize(
    "make",
    [
        XLAEagerFabricStrategy,
        lambda: xla_adapters.CompiledStep(lambda value: value + 1)(torch.ones(2)),
        xla_adapters.initialize,
    ],
    ids=["fabric", "own loop", "initialize"],
)
def test_one_of_several_processes_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(UnsupportedOptionError, match="2 processes were launched"):
        make()


@pytest.mark.long
def test_torchrun_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import xla_adapters\nxla_adapters.initialize()\nprint('trained')\n")
    launched = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert launched.returncode
    assert "trained" not in launched.stdout
    assert "UnsupportedOptionError: 2 processes were launched (WORLD_SIZE=2)" in launched.stderr


# ---- Lightning ---------------------------------------------------------------------------------------


def test_auto_takes_the_cpu_and_a_warning_says_so(tmp_path: Path) -> None:
    quiet: dict[str, Any] = {"logger": False, "default_root_dir": tmp_path}
    with pytest.warns(UserWarning, match=r"strategy=lightning_strategy\.XLAEagerStrategy\(\) to train on it"):
        made = pl.Trainer(**quiet)
    assert made.strategy.root_device == torch.device("cpu")
    with pytest.warns(UserWarning, match=r"strategy=lightning_strategy\.XLAEagerFabricStrategy\(\)"):
        L.Fabric()


@pytest.mark.filterwarnings("error:accelerator='auto'")
def test_ours_is_no_choice_of_the_cpu() -> None:
    for strategy in ("xla_eager", XLAEagerStrategy()):
        assert trainer(strategy).strategy.root_device == torch.device("tpu:0")
    pl.Trainer(accelerator="cpu", logger=False)
