"""A pre-flight on TorchTPU: steps are traced without a device, and compiled by libtpu for TPUs that are not there."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

import hf_trainer
import xla_adapters
from lightning_strategy import XLAEagerStrategy
from tests.hf_trainer.scenarios import arguments, gpt2, token_samples
from xla_adapters import cli
from xla_adapters.errors import ConfigError, UnsupportedOptionError
from xla_adapters.hlo.annotations import with_donors
from xla_adapters.runtime.torch_tpu.placeholders import TPUPlaceholders
from xla_adapters.tools import trace_process
from xla_adapters.tools.preflight import report_traced
from xla_adapters.tools.step_capture import EVALUATION, TRAINING
from xla_adapters.tools.tpu_compiler import Target
from xla_adapters.tools.trace_process import Request, Traced, environment_for, trace_in_process

pytestmark = pytest.mark.isolated

MICRO_BATCH = "micro batch without an update (train_step)"
TRANSFORMERS = """
from transformers import Trainer
from tests.hf_trainer.scenarios import arguments, gpt2, token_samples

options = {"gradient_accumulation_steps": 2, "max_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
args = arguments(per_device_eval_batch_size=2, **options)
model = gpt2(dropout=0.1, layers=2, use_cache=False)
Trainer(model=model, args=args, train_dataset=token_samples(16), eval_dataset=token_samples(2)).train()
"""
LOOP = """
import torch, xla_adapters

xla_adapters.initialize()
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 8)).to("tpu")
optimizer = torch.optim.AdamW(model.parameters())
assert torch.tensor(1.0, device="tpu").add(1).item() == 2
print(model[0].weight.norm().shape)
for _ in range(2):
    with xla_adapters.step():
        loss = model(torch.zeros(16, 64).to("tpu")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))

    def training_step(self, batch: Sequence[torch.Tensor], index: int) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Sequence[torch.Tensor], index: int) -> None:
        self.log("val", torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def traced(folder: Path, script: str) -> Traced:
    """What tracing a script gives."""
    (folder / "train.py").write_text(script)
    (found,) = trace_in_process(Request(generation="v5e", command=[str(folder / "train.py")]), 1, timeout=240)
    return found


def operations(text: str) -> list[str]:
    """The operations of a program with the types of their results, in order; not where they come from."""
    found = re.findall(r"= \"?(\w+\.\w+|call)\b.*?-> (.*)|= (stablehlo\.\w+)\b.*?: (tensor<[^>]*>)", text)
    return [" ".join(filter(None, groups)).partition(" loc(")[0] for groups in found]


def test_the_programs_are_those_of_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preflight = traced(tmp_path, TRANSFORMERS)
    assert preflight.problem == ""
    assert [step.kind for step in preflight.steps] == [TRAINING, MICRO_BATCH, EVALUATION]
    trained: list[str] = []
    compiled = TPUPlaceholders.compile

    def compile(self, results, arguments, donated, name):  # type: ignore[no-untyped-def]
        trained.append(self.text(results, arguments))
        return compiled(self, results, arguments, donated, name)

    monkeypatch.setattr(TPUPlaceholders, "compile", compile)
    options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 2}
    args = arguments(str(tmp_path), gradient_accumulation_steps=2, max_steps=1, **options)
    model = gpt2(dropout=0.1, layers=2, use_cache=False)
    hf_trainer.Trainer(model, args, train_dataset=token_samples(16), eval_dataset=token_samples(2)).train()
    micro_batch, training, evaluation = map(operations, trained)
    for step, expected in zip(preflight.steps, (training, micro_batch, evaluation), strict=True):
        assert len(expected) > 50
        assert operations(step.module.decode()) == expected


def test_arguments_have_names_and_what_is_updated_is_donated(tmp_path: Path) -> None:
    (step,) = traced(tmp_path, LOOP).steps
    batch = next(name for name in step.names.values() if name.startswith("copied at "))
    assert batch.endswith("train.py:11")
    names = {*step.names.values()} - {batch}
    assert len(names) == 12
    assert {"0.weight", "exp_avg of 0.weight"} < names
    signature = step.module.decode().partition("func.func @main(")[2].partition(") -> ")[0]
    donors = {int(number) for number in re.findall(r"%arg(\d+): [^%]*jax\.buffer_donor", signature)}
    assert {step.names[number] for number in donors} == names


def test_of_a_trainer(tmp_path: Path) -> None:
    trainer = hf_trainer.Trainer(model=gpt2(), args=arguments(str(tmp_path)), train_dataset=token_samples(8))
    report = trainer.preflight("v5e:1x1")
    assert report.fits, str(report)
    assert len(report.graphs) == 1
    assert report.graphs[0].memory is not None
    assert report.graphs[0].memory.aliased > 0.9 * report.graphs[0].memory.outputs
    assert trainer.state.global_step == 0


@pytest.mark.long
def test_of_a_strategy(tmp_path: Path) -> None:
    strategy = XLAEagerStrategy()
    trainer = pl.Trainer(strategy=strategy, max_steps=1, logger=False, default_root_dir=tmp_path)
    loader = DataLoader([(torch.randn(8), torch.tensor(number % 2)) for number in range(8)], batch_size=4)
    report = strategy.preflight(trainer, Module(), loader, loader, topology="v6e:2x2")
    assert report.fits, str(report)
    assert [graph.step for graph in report.graphs] == [
        f"{kind}, on one of 4 devices" for kind in (TRAINING, EVALUATION)
    ]


@pytest.mark.long
def test_of_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(LOOP)
    assert cli.main(["preflight", "--topology", "v5e:1x1", "train.py"]) == 0
    assert "FITS" in capfd.readouterr().out
    (tmp_path / "train.py").write_text(LOOP.replace(".norm().shape", ".norm().item()"))
    assert cli.main(["preflight", "--topology", "v5e:1x1", "train.py"]) == 2
    said = capfd.readouterr().out
    assert ".item() reads a tensor that has no value in a pre-flight" in said
    assert "train.py:8" in said


def test_of_a_model(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    gpt2().config.to_json_file(tmp_path / "config.json", use_diff=False)
    command = ["preflight", "--topology", "v5e:1x1", "--model", str(tmp_path / "config.json"), "--batch", "4x12"]
    assert cli.main([*command, "--dtype", "bf16-mixed"]) == 0
    said = capfd.readouterr().out
    assert "one device, adamw, bf16-mixed" in said
    assert "FITS" in said
    assert cli.main([*command, "--sharding", "fsdp"]) == 2
    assert "with TorchTPU each process has one device" in capfd.readouterr().err


def test_of_ranks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = hf_trainer.Trainer(model=gpt2(), args=arguments(str(tmp_path)), train_dataset=token_samples(8))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UnsupportedOptionError, match=r"in one of 2 processes: .* without what ranks exchange"):
        trainer.preflight("v5e:2x4")


def test_of_several_devices_says_that_nothing_is_exchanged() -> None:
    found = report_traced("a training", Target.parse("v5e:2x4"), Traced(), timeout=1)
    assert "without the exchange of gradients" in " ".join(found.notes)
    assert report_traced("a training", Target.parse("v5e:1x1"), Traced(), timeout=1).notes == ()


def test_without_the_plugin_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    xla_adapters.initialize()
    monkeypatch.setattr(trace_process, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install .*preflight-torch-tpu"):
        environment_for(1)


def test_donors_are_written_into_the_signature() -> None:
    text = b"module {\n  func.func @main(%arg0: tensor<2xf32>, %arg1: tensor<f32>) -> (tensor<f32>) {\n"
    found = with_donors(text, [1])
    assert b"(%arg0: tensor<2xf32>, %arg1: tensor<f32> {jax.buffer_donor = true}) -> (tensor<f32>)" in found
