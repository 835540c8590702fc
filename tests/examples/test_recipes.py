"""Each recipe trains, at a small size: one execution per step, and a resumed run computes what the whole one does."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from scipy.io import wavfile
from sklearn.datasets import load_digits
from tokenizers import ByteLevelBPETokenizer, processors
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    ViTImageProcessor,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    set_seed,
)

from hf_trainer import _requirements, recipes
from tests.architecture import ROOT
from tests.hf_trainer.scenarios import CountEachStep
from tests.isolation import isolated, run_in_child
from xla_adapters import ConfigError, cli
from xla_adapters.tools import commands

pytest.importorskip("trl")
pytest.importorskip("sentence_transformers")

_RECIPES = ROOT / "examples" / "recipes"
_STEPS, _SAVED, _VOCABULARY = 12, 6, 320
_TINY: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_COUNTED = ("python", "numpy", "torch", "tensor", "graph", "step")


def _tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Of the sources of Python's standard library."""
    sources = [Path(sysconfig.get_path("stdlib")) / name for name in ("argparse.py", "bisect.py")]
    trained = ByteLevelBPETokenizer()
    trained.train([str(path) for path in sources], vocab_size=_VOCABULARY, special_tokens=["<pad>", "<bos>", "<eos>"])
    trained.post_processor = processors.TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", 2)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=trained._tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


def _lines(name: str, make: Callable[[int], dict[str, Any]], count: int = 32) -> None:
    Path(name).write_text("".join(json.dumps(make(index)) + "\n" for index in range(count)))


def _decoder() -> None:
    tokenizer = _tokenizer(Path("model"))
    config = LlamaConfig(
        vocab_size=len(tokenizer), **_TINY, num_key_value_heads=1, pad_token_id=0, bos_token_id=1, eos_token_id=2
    )
    set_seed(0)
    LlamaForCausalLM(config).save_pretrained("model")


def _encoder(kind: Any) -> None:
    tokenizer = _tokenizer(Path("model"))
    set_seed(0)
    kind(BertConfig(vocab_size=len(tokenizer), **_TINY, pad_token_id=0)).save_pretrained("model")


def _causal_lm() -> dict[str, Any]:
    _tokenizer(Path("tokenizer"))
    Path("data").mkdir()
    for name in ("bisect", "keyword", "stat"):
        shutil.copy(Path(sysconfig.get_path("stdlib")) / f"{name}.py", f"data/{name}.txt")
    return {"model_config": {**_TINY, "num_key_value_heads": 1}, "max_length": 32}


def _sft_lora() -> dict[str, Any]:
    _decoder()
    _lines("data.jsonl", lambda index: {"id": index, "prompt": f"the {_COUNTED[index % 6]}", "completion": " is red"})
    return {"max_length": 32, "pad_to_multiple_of": 32}


def _dpo() -> dict[str, Any]:
    _decoder()
    _lines(
        "data.jsonl",
        lambda index: {"prompt": f"the {_COUNTED[index % 6]}", "chosen": " is red", "rejected": " was blue"},
    )
    return {"max_length": 32, "pad_to_multiple_of": 32, "gradient_accumulation_steps": 1}


def _classification() -> dict[str, Any]:
    _encoder(BertForSequenceClassification)
    for name, count in (("train", 48), ("test", 8)):
        rows = [f"{('red hot', 'blue')[index % 2]} {index},{('warm', 'cold')[index % 2]}" for index in range(count)]
        Path(f"{name}.csv").write_text("\n".join(["body,kind", *rows]))
    return {
        "columns": ["body", "kind"],
        "learning_rate": 3e-3,
        "max_length": 32,
        "eval_strategy": "steps",
        "eval_steps": 6,
    }


def _seq2seq() -> dict[str, Any]:
    _tokenizer(Path("tokenizer"))
    _lines("train.jsonl", lambda index: {"source": f"{_COUNTED[index % 6]} {index}", "target": _COUNTED[index % 6]}, 64)
    small = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    return {"model_config": small, "max_length": 16}


def _vit() -> dict[str, Any]:
    digits = load_digits()
    for index, (pixels, digit) in enumerate(zip(digits.images[:80], digits.target, strict=False)):
        folder = Path("images") / ("test" if index % 8 == 0 else "train") / str(digit)
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels * 15).astype(np.uint8)).save(folder / f"{index}.png")
    side = {"height": 8, "width": 8}
    ViTImageProcessor(size=side, image_mean=[0.5], image_std=[0.5]).save_pretrained("processor")
    small = {**_TINY, "hidden_size": 32, "image_size": 8, "patch_size": 4, "num_channels": 1}
    return {"model_config": small, "learning_rate": 3e-3, "eval_strategy": "steps", "eval_steps": 6}


def _whisper() -> dict[str, Any]:
    tokenizer = _tokenizer(Path("model"))
    WhisperFeatureExtractor(feature_size=8, chunk_length=1).save_pretrained("model")
    attention = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    layers = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "d_model": 16}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = WhisperConfig(
        **{"vocab_size": len(tokenizer), "num_mel_bins": 8, "max_source_positions": 50, "max_target_positions": 16},
        **{**attention, **layers, **special, "suppress_tokens": None, "begin_suppress_tokens": None},
    )
    set_seed(0)
    WhisperForConditionalGeneration(config).save_pretrained("model")
    for index in range(16):
        pitch = 200 * (1 + index % 4)
        wave = np.sin(2 * np.pi * pitch * np.arange(8000) / 16000)
        wavfile.write(f"{index}.wav", 16000, (wave * 20000).astype(np.int16))
    _lines("sounds.jsonl", lambda index: {"audio": f"{index}.wav", "text": _COUNTED[index % 4]}, 16)
    return {"max_length": 8}


def _sentence_transformers() -> dict[str, Any]:
    _encoder(BertModel)
    _lines("pairs.jsonl", lambda index: {"anchor": f"q{index:02}", "positive": f"answer {index:02}"})
    return {"max_length": 16}


# What prepares a folder for each recipe, and how many graphs its training steps are: one for each length of its texts.
_CASES: dict[str, tuple[Callable[[], dict[str, Any]], int]] = {
    "causal_lm": (_causal_lm, 1),
    "sft_lora": (_sft_lora, 1),
    "dpo": (_dpo, 1),
    "classification": (_classification, 2),
    "seq2seq": (_seq2seq, 1),
    "vit": (_vit, 1),
    "whisper": (_whisper, 1),
    "sentence_transformers": (_sentence_transformers, 1),
}


def _words(options: dict[str, Any]) -> list[str]:
    words = []
    for key, value in options.items():
        words += [f"--{key}", *value] if isinstance(value, list) else [f"--{key}={json.dumps(value).strip(chr(34))}"]
    return words


_SHORT: dict[str, Any] = {
    **{"max_steps": _STEPS, "save_strategy": "steps", "save_steps": _SAVED, "logging_steps": 1},
    **{"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "warmup_steps": 0, "disable_tqdm": True},
    **{"learning_rate": 1e-2},
}


# The others are slow.
_QUICK = ("causal_lm", "classification")


def _prepared(folder: Path, name: str) -> dict[str, Any]:
    os.chdir(folder)
    return {**_SHORT, **_CASES[name][0]()}


def _trained(folder: Path, name: str, options: dict[str, Any]) -> dict[str, Any]:
    os.chdir(folder)
    datasets.config.HF_DATASETS_CACHE = folder / "cache"
    counting = CountEachStep()
    recipes.XLAStatsCallback = lambda: counting  # type: ignore[assignment, misc]
    trainer = recipes.train(str(_RECIPES / f"{name}.yaml"), _words(options))
    return {
        "executions": [step.executions for step in counting.steps],
        "compiles": [step.compiles for step in counting.steps],
        "losses": {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry},
        "evaluations": [entry["eval_accuracy"] for entry in trainer.state.log_history if "eval_accuracy" in entry],
        "files": sorted(path.name for path in Path("out").iterdir()),
    }


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in _QUICK else pytest.mark.slow) for name in _CASES]
)
def test_a_recipe(name: str, tmp_path: Path) -> None:
    options = run_in_child(functools.partial(_prepared, tmp_path, name))
    whole = run_in_child(functools.partial(_trained, tmp_path, name, options))
    assert whole["executions"] == [1] * _STEPS
    assert sum(whole["compiles"]) == _CASES[name][1]
    losses = whole["losses"]
    assert sum(losses[step] for step in (10, 11, 12)) < sum(losses[step] for step in (1, 2, 3))
    assert {"checkpoint-6", "checkpoint-12"} <= set(whole["files"])
    assert bool(whole["evaluations"]) == ("eval_steps" in options)

    shutil.rmtree(tmp_path / "out" / "checkpoint-12")
    resumed = run_in_child(functools.partial(_trained, tmp_path, name, {**options, "resume_from_checkpoint": True}))
    later = {step: loss for step, loss in losses.items() if step > _SAVED}
    assert {step: loss for step, loss in resumed["losses"].items() if step > _SAVED} == later
    assert len(resumed["executions"]) == _STEPS - _SAVED


@pytest.mark.slow
@pytest.mark.parametrize("name", _CASES)
def test_a_recipe_with_an_adapter(name: str, tmp_path: Path) -> None:
    options = run_in_child(functools.partial(_prepared, tmp_path, name))
    targets = {"seq2seq": ["q", "v"], "whisper": ["q_proj", "v_proj"], "vit": ["q_proj", "v_proj"]}
    lora = {"r": 2, "target_modules": targets.get(name, "all-linear")}
    trained = run_in_child(functools.partial(_trained, tmp_path, name, {**options, "max_steps": 3, "lora": lora}))
    assert trained["executions"] == [1] * 3
    assert "adapter_model.safetensors" in trained["files"]


def test_a_recipe_on_several_devices(tmp_path: Path) -> None:
    options = run_in_child(functools.partial(_prepared, tmp_path, "causal_lm")) | {"max_steps": 3, "sharding": "fsdp"}
    trained = run_in_child(functools.partial(_trained, tmp_path, "causal_lm", options), env={"CPU_NUM_DEVICES": "8"})
    assert trained["executions"] == [1] * 3


def test_documents_are_packed(tmp_path: Path) -> None:
    options = run_in_child(functools.partial(_prepared, tmp_path, "causal_lm"))
    options |= {
        "max_steps": 3,
        "max_length": 64,
        "shapes": {"packing": 64},
        "resume_from_checkpoint": False,
        "per_device_train_batch_size": 2,
    }
    trained = run_in_child(functools.partial(_trained, tmp_path, "causal_lm", options))
    assert (trained["executions"], sum(trained["compiles"])) == ([1] * 3, 1)


def test_a_column_of_messages(tmp_path: Path) -> None:
    def prepared() -> dict[str, Any]:
        options = _prepared(tmp_path, "sft_lora")
        tokenizer = PreTrainedTokenizerFast.from_pretrained("model")
        tokenizer.chat_template = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}{% endfor %}"
        tokenizer.save_pretrained("model")
        turns = (("user", "what is it"), ("assistant", "a graph"))
        _lines("data.jsonl", lambda index: {"chat": [{"role": role, "content": content} for role, content in turns]})
        return {**options, "max_steps": 2, "columns": ["chat"]}

    trained = run_in_child(functools.partial(_trained, tmp_path, "sft_lora", run_in_child(prepared)))
    assert trained["executions"] == [1, 1]


def test_sounds(tmp_path: Path) -> None:
    job: Any = SimpleNamespace(file="recipe.yaml", error=lambda key, message: ConfigError(f"{key}: {message}"))
    samples = np.array([[16384, 0], [-16384, 16384]], np.int16)
    wavfile.write(tmp_path / "stereo.wav", 8000, samples)
    np.testing.assert_allclose(recipes._sound(job, str(tmp_path / "stereo.wav"), 8000), [0.25, 0.0], atol=1e-4)
    decoded = {"array": [0.5, -0.5], "sampling_rate": 16000}
    np.testing.assert_allclose(recipes._sound(job, decoded, 16000), [0.5, -0.5])
    with pytest.raises(ConfigError, match="16000 samples per second, and the feature extractor wants 8000"):
        recipes._sound(job, decoded, 8000)
    with pytest.raises(ConfigError, match=r"audio: nowhere.wav"):
        recipes._sound(job, "nowhere.wav", 8000)


def test_each_recipe_is_tried_and_each_task_has_one() -> None:
    found = {path.stem: yaml.safe_load(path.read_text())["task"] for path in _RECIPES.glob("*.yaml")}
    assert found.keys() == _CASES.keys()
    assert set(found.values()) == set(recipes.TASKS)


_CLASSIFICATION: dict[str, Any] = {
    **{"task": "classification", "model": "model", "dataset": "csv", "data_files": ["train.csv"]},
    **{"columns": ["body", "kind"], "output_dir": "out", "max_steps": 1},
}


@pytest.mark.parametrize(
    ("change", "overrides", "message"),
    [
        ({"learning_rat": 1}, [], "there is no key 'learning_rat'; is it learning_rate"),
        ({}, ["--shape=auto"], "the command line: there is no key 'shape'; is it shapes"),
        ({}, ["max_steps=3"], "the command line: 'max_steps=3' is not understood; write --key=value"),
        ({}, ["--beta=1"], "the command line: there is no key 'beta'"),
        ({"task": "dop"}, [], "task: 'dop' is none of causal-lm, sft, dpo"),
        ({"max_steps": "many"}, [], r"recipe.yaml: argument --max_steps.*: invalid int value: 'many'"),
        ({"eval_strategy": "steps"}, [], "eval_strategy: steps needs eval_files or eval_split"),
        ({"sharding": "fdsp"}, [], "recipe.yaml: .*fdsp"),
        ({"dataset": None}, [], "dataset: give json"),
        ({"dataset": "josn"}, [], "dataset: 'josn' cannot be loaded"),
        ({}, ["--data_files", "train.csv", "tets.csv"], "data_files: there is no 'tets.csv' in /"),
        ({"data_dir": "nowhere"}, [], "data_dir: there is no 'nowhere'"),
        ({"split": "test"}, [], "split: the dataset has no 'test'; it has train"),
        (
            {"columns": None},
            [],
            r"columns: classification reads text, text_pair, label or text, label; .* has body",
        ),
        ({"columns": ["body", "knd"]}, [], "has body, kind, number, and no knd. Name them in this order"),
        ({}, ["--eval_files", "other.csv"], "(?s)recipe.yaml: dataset: 'csv' cannot be loaded: .*kind"),
        ({"columns": ["body"]}, [], "columns: classification reads"),
        ({"model": None}, ["--processor=model"], "model: give a folder or a name on the hub; or model_type"),
        ({"model": "nowhere"}, [], "recipe.yaml: model: "),
        ({"model": None, "model_type": "brt", "processor": "model"}, [], "recipe.yaml: model_type: .*brt"),
        ({"model": None, "model_type": "bert"}, [], "processor: a model from scratch has none"),
        (
            {"model_config": {"hidden_sise": 8}},
            [],
            "model_config: there is no value of bert 'hidden_sise'; is it hid",
        ),
        ({}, ["--model_config=[8]"], r"model_config: \[8\] is no mapping"),
        ({}, ["--model_config={"], "model_config: '{' is no mapping, and no JSON"),
        ({"lora": {"rank": 8}}, [], "lora: there is no value 'rank'"),
        ({"lora": {"r": 8, "target_modules": ["nothing"]}}, [], "recipe.yaml: lora: No modules"),
        ({"columns": ["kind", "number"]}, [], "labels are texts or numbers of classes, and not 0.5"),
        (
            {"task": "sentence-transformers", "loss": "NegativesRankingLoss"},
            [],
            "no loss 'NegativesRankingLoss'; is",
        ),
        ({"task": "causal-lm", "columns": ["body"], "max_length": 9999}, [], "max_length: the texts are shorter than"),
    ],
)
@isolated
def test_a_mistake_names_the_key(
    change: dict[str, Any], overrides: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    _encoder(BertForSequenceClassification)
    Path("train.csv").write_text("body,kind,number\na,warm,0.5\nb,cold,1.5\n")
    Path("other.csv").write_text("body,sort,number\na,warm,0.5\n")
    Path("recipe.yaml").write_text(yaml.safe_dump({**_CLASSIFICATION, **change}))
    with pytest.raises(ConfigError, match=message):
        recipes.train("recipe.yaml", overrides)


@isolated
def test_a_library_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_requirements, "find_spec", lambda name: None)
    sys.modules.pop("hf_trainer.trl", None)
    with pytest.raises(ConfigError, match=r"dpo.yaml: task: hf_trainer.trl needs TRL; install it with"):
        recipes.train(str(_RECIPES / "dpo.yaml"))
    with pytest.raises(ConfigError, match=r"vit.yaml: dataset: a recipe needs datasets; install it with"):
        recipes.train(str(_RECIPES / "vit.yaml"))


@isolated
def test_what_yaml_reads_as_something_else(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    values = {**_CLASSIFICATION, "eval_files": [], "shapes": {"buckets": 3}, "eval_steps": None, "bf16": False}
    file.write_text(yaml.safe_dump(values) + "save_strategy: no\nlearning_rate: 1e-3\n")
    _, recipe, xla, args, texts = recipes._parsed(str(file), ["--max_steps=7", "--columns", "a", "b", "--bf16"])
    assert (args.save_strategy, args.learning_rate, args.max_steps, args.bf16) == ("no", 1e-3, 7, True)
    assert (recipe.columns, recipe.eval_files, xla.shapes) == (["a", "b"], [], '{"buckets": 3}')
    assert texts.max_length == 512


@isolated
def test_a_model_is_loaded_as_the_recipe_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    BertModel(BertConfig(vocab_size=32, **_TINY)).bfloat16().save_pretrained("model")

    def loaded(**config: Any) -> Any:
        recipe = recipes.Recipe(model="model", model_config=json.dumps(config))
        job = recipes._Job("recipe.yaml", recipe, None, recipes.XLAArguments(), None, None, None)
        return job.model("AutoModelForSequenceClassification", id2label={0: "a", 1: "b", 2: "c"})

    model = loaded(hidden_dropout_prob=0.25)
    assert (model.dtype, model.classifier.out_features, model.dropout.p) == (torch.float32, 3, 0.25)
    assert loaded(dtype="bfloat16").dtype is torch.bfloat16


@isolated
def test_files_that_are_no_recipe(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        recipes.train(str(tmp_path / "none.yaml"))
    for text in ("a: [", "- a"):
        (tmp_path / "recipe.yaml").write_text(text)
        with pytest.raises(ConfigError, match="recipe"):
            recipes.train(str(tmp_path / "recipe.yaml"))


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    given = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["xla_adapters.train"]
    ((name, value),) = given.items()
    entry = EntryPoint(name, value, "xla_adapters.train")
    assert entry.load() is recipes.main
    monkeypatch.setattr(commands, "entry_points", lambda group: [entry])
    calls: list[Any] = []
    monkeypatch.setattr(recipes, "main", lambda *args: calls.append(args) or 3)
    assert cli.main(["train", "recipe.yaml", "--max_steps=3", "--help"]) == 3
    assert calls == [("recipe.yaml", ["--max_steps=3", "--help"])]
    monkeypatch.setattr(commands, "entry_points", lambda group: [])
    assert cli.main(["train", "recipe.yaml"]) == 2
    assert "reinstall xla-adapters" in capsys.readouterr().err


def test_all_keys_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        recipes.train(str(_RECIPES / "dpo.yaml"), ["--help"])
    assert ended.value.code == 0
    listed = capsys.readouterr().out
    assert all(f"--{key} " in listed for key in ("beta", "lora", "model_type", "sharding", "max_steps"))


def test_help_needs_no_torch() -> None:
    code = "import sys, xla_adapters.cli as cli\ntry: cli.main(['train', '--help'])\nexcept SystemExit: pass\n"
    done = subprocess.run([sys.executable, "-c", f"{code}sys.exit('torch' in sys.modules)"], timeout=100)
    assert done.returncode == 0
