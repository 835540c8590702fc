"""The command `xla-adapters plan`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.isolation import isolated
from tests.tools.trainings import needs_libtpu
from xla_adapters.cli import main
from xla_adapters.sharding import ShardingPlan, load_model

LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 512,
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(inputs).square().mean()
        return result


def factory(rows: int, length: int | None) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """What `--model tests.sharding.test_cli:factory` calls."""
    return Net(), {"inputs": torch.empty(rows, length or 64)}


def only_a_model(rows: int, length: int | None) -> nn.Module:
    return Net()


def with_a_number(rows: int, length: int | None) -> tuple[nn.Module, int]:
    return Net(), 3


def with_another_batch(rows: int, length: int | None) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return Net(), {"inputs": torch.empty(6, 64)}


def without_data(rows: int, length: int | None) -> None:
    raise FileNotFoundError("no train.jsonl")


def config_file(folder: Path, **values: Any) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps({**LLAMA, **values}))
    return str(path)


# A runtime of this kind does not exist: none is started to plan.
@isolated(env={"PJRT_DEVICE": "NONE"})
def test_a_configuration_of_transformers(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    saved, drawn = tmp_path / "plan.json", tmp_path / "plan.html"
    arguments = ["plan", "--model", config_file(tmp_path), "--mesh", "2x4", "--batch", "16x128", "--topology", "v5p"]
    assert main([*arguments, "--save", str(saved), "--html", str(drawn)]) == 0
    plan = ShardingPlan.load(saved)
    assert plan.mesh.shape == (2, 4)
    assert plan.predicted is not None
    assert plan.predicted.step_seconds > 0
    assert {entry.name for entry in plan.parameters} >= {"model.layers.3.mlp.up_proj.weight", "lm_head.weight"}
    assert "up_proj" in drawn.read_text()


@isolated
@pytest.mark.parametrize(
    ("architecture", "values"),
    [
        ("BertForSequenceClassification", {"model_type": "bert"}),
        ("ViTForImageClassification", {"model_type": "vit", "image_size": 32, "patch_size": 16}),
        ("T5ForConditionalGeneration", {"model_type": "t5", "d_model": 64, "d_kv": 8, "d_ff": 64}),
    ],
)
def test_other_families(architecture: str, values: dict[str, Any], tmp_path: Path) -> None:
    path, saved = config_file(tmp_path, architectures=[architecture], **values), tmp_path / "plan.json"
    arguments = ["plan", "--model", path, "--devices", "8", "--batch", "16x32", "--sharding", "fsdp"]
    assert main([*arguments, "--save", str(saved)]) == 0
    plan = ShardingPlan.load(saved)
    assert plan.name == "fsdp"
    assert plan.predicted is not None


@isolated
def test_a_factory_and_gradient_checkpointing_of_a_model_without(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--model", "tests.sharding.test_cli:factory", "--devices", "4", "--batch", "8"]
    assert main(arguments) == 0
    assert "layer.weight" in capsys.readouterr().out
    assert main([*arguments, "--gradient-checkpointing"]) == 2
    assert "Net has no gradient_checkpointing_enable()" in capsys.readouterr().err


@isolated
@pytest.mark.parametrize(
    ("model", "more", "message"),
    [
        ("nowhere:factory", [], "No module named 'nowhere'"),
        ("tests.sharding.test_cli:nobody", [], "has no attribute 'nobody'"),
        ("tests.sharding.test_cli", [], "give a .json file, or module:factory"),
        ("tests.sharding.test_cli:only_a_model", [], "returns (model, batch); it returned Net"),
        ("tests.sharding.test_cli:with_a_number", [], "the batch is a dictionary"),
        (
            "tests.sharding.test_cli:with_another_batch",
            [],
            "the factory was called with 8 samples, and no tensor of its batch has",
        ),
        ("tests.sharding.test_cli:without_data", [], "with 8 samples and length None, raised FileNotFoundError: no"),
        ("tests.sharding.test_cli:config_file", [], "raised TypeError: "),
        ("tests.sharding.test_cli:LLAMA", [], "it is no function, but of the type dict"),
        ("tests/sharding/test_cli.py:factory", [], "give the module by its name: test_cli:factory"),
        (":factory", [], "give a .json file, or module:factory"),
        ("tests", [], "it is a folder; give the configuration file in it: tests/config.json"),
        ("missing.json", [], "there is no such file"),
        ("tests.sharding.test_cli:factory", ["--memory", "0.00001"], "is too little: the smallest"),
    ],
)
def test_bad_input(model: str, more: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", model, "--devices", "4", "--batch", "8", *more]) == 2
    assert message in capsys.readouterr().err


@needs_libtpu
@pytest.mark.slow
@isolated(timeout=900)
def test_plans_are_compiled_for_tpus_that_are_not_there(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path, kept = config_file(tmp_path, num_hidden_layers=2), tmp_path / "plan.json"
    command = ["plan", "--model", path, "--topology", "v5p:2x2x1", "--batch", "8x64", "--measure", "1"]
    assert main([*command, "--save", str(kept)]) == 0
    printed = capfd.readouterr().out
    assert "Prediction and measurement" in printed
    plan = ShardingPlan.load(kept)
    assert plan.measured is not None
    assert plan.predicted is not None
    # Parameters, optimizer state and batch are the same; activations are small.
    assert plan.measured.memory_bytes == pytest.approx(plan.predicted.memory_bytes, rel=0.25)
    schemes = {item.name for item in plan.alternatives if item.measured is not None}
    assert {"dp", "fsdp", "tp", "2d"} <= schemes


@isolated
def test_configurations_that_say_too_little(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for values, batch, message in (
        ({"model_type": "nothing"}, "8x8", "model_type='nothing' is none that transformers"),
        ({"model_type": "vit"}, "8x8", "name the class of the model under 'architectures'"),
        ({}, "8", "needs a length: --batch 8x2048"),
        ({"architectures": ["MyLlama"]}, "8x8", "transformers has no MyLlama; use module:factory"),
        ({"model_type": "gpt2", "n_positions": 64}, "8x65", "samples of 65 tokens are longer than its 64 positions"),
        ({"hidden_size": "wide"}, "8x8", "transformers makes no model of it: StrictDataclass"),
        ({"model_type": "gpt2", "hidden_size": 65}, "8x8", "transformers makes no model of it: ValueError"),
    ):
        path = config_file(tmp_path, **values)
        assert main(["plan", "--model", path, "--devices", "4", "--batch", batch]) == 2
        assert message in capsys.readouterr().err


@isolated
def test_files_that_are_no_configurations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    for text, message in (("{", "is no JSON"), ("[1]", "it is a list, not an object")):
        path.write_text(text)
        assert main(["plan", "--model", str(path), "--devices", "4", "--batch", "8x8"]) == 2
        assert message in capsys.readouterr().err


@isolated
def test_without_a_class_an_encoder_with_a_decoder_keeps_both(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "bart", "d_model": 64, "encoder_layers": 1, "decoder_layers": 1}))
    model, _, _ = load_model(str(path), 2, 8)
    assert type(model).__name__ == "BartForConditionalGeneration"


@isolated
def test_a_module_of_the_present_folder_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "nets_of_mine.py").write_text("from tests.sharding.test_cli import Net, factory\n")
    monkeypatch.chdir(tmp_path)
    # As a console script: its own folder comes first.
    monkeypatch.setattr(sys, "path", ["/usr/bin", *(entry for entry in sys.path if entry)])
    arguments = ["plan", "--model", "nets_of_mine:factory", "--devices", "4", "--batch", "8", "--sharding", "fsdp"]
    assert main(arguments) == 0
    assert "layer.weight" in capsys.readouterr().out


@isolated
@pytest.mark.parametrize(
    "wrong", [["--batch", "8by8"], ["--batch", "8x8x8"], ["--mesh", "2x0"], ["--sharding", "zero3"]]
)
def test_arguments_that_cannot_be_read(wrong: list[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--model", "m:f", "--devices", "4", "--batch", "8", *wrong])


def test_the_module_is_the_command() -> None:
    command = [sys.executable, "-m", "xla_adapters.cli", "explain"]
    assert "ConfigError" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
