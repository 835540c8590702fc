"""Options: how they are given, what is refused, and mistakes of users."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import HfArgumentParser, TrainingArguments

import hf_trainer
from hf_trainer import XLAArguments
from tests.hf_trainer.scenarios import Classifier, arguments, gpt2, ours, token_samples, vector_samples
from xla_adapters import ConfigError, UnsupportedOptionError, XLAConfig, get_runtime
from xla_adapters.errors import CheckpointNotFoundError, LossError
from xla_adapters.sharding import ShardingConfig

pytestmark = pytest.mark.isolated


_VALUES: dict[str, Any] = {
    "xla_mode": "eager+compile",
    "on_graph_break": "warn",
    "compile_eval": False,
    "max_graphs": 3,
    "on_recompile": "ignore",
    "free_grads": "false",
    "accumulation": "unrolled",
}
_CONFIG = XLAConfig(
    on_graph_break="warn",
    compile_eval=False,
    max_graphs=3,
    on_recompile="ignore",
    free_grads=False,
    accumulation="unrolled",
)


def test_command_line() -> None:
    line = ["--output_dir", "out"]
    for name, value in _VALUES.items():
        line += [f"--{name}", str(value)]
    parsed, args = HfArgumentParser((XLAArguments, TrainingArguments)).parse_args_into_dataclasses(line)
    assert parsed.to_config() == _CONFIG
    assert args.output_dir == "out"


def test_steps_of_a_profile_on_the_command_line() -> None:
    (parsed,) = HfArgumentParser(XLAArguments).parse_args_into_dataclasses(["--profile_steps", "3", "6"])
    assert parsed.to_config() == XLAConfig(profile_steps=(3, 6))


def test_defaults_on_the_command_line() -> None:
    (parsed,) = HfArgumentParser(XLAArguments).parse_args_into_dataclasses([])
    assert parsed.to_config() == XLAConfig()


@pytest.mark.parametrize("free_grads", ["auto", "true", "false", True, False])
@pytest.mark.parametrize("kind", ["json", "yaml"])
def test_files(kind: str, free_grads: Any, tmp_path: Path) -> None:
    path = tmp_path / f"options.{kind}"
    # JSON is valid YAML.
    path.write_text(json.dumps({**_VALUES, "free_grads": free_grads}))
    parser = HfArgumentParser(XLAArguments)
    (parsed,) = parser.parse_json_file(str(path)) if kind == "json" else parser.parse_yaml_file(str(path))
    expected = {"auto": "auto", "true": True, "false": False}.get(free_grads, free_grads)
    assert parsed.to_config() == XLAConfig(**{**_VALUES, "free_grads": expected})


def test_native_yaml(tmp_path: Path) -> None:
    path = tmp_path / "options.yaml"
    path.write_text("xla_mode: eager+compile\nmax_graphs: null\nfree_grads: true\ncompile_eval: off\n")
    (parsed,) = HfArgumentParser(XLAArguments).parse_yaml_file(str(path))
    assert parsed.to_config() == XLAConfig(free_grads=True, compile_eval=False)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("xla_mode", "compile"),
        ("on_graph_break", "raise"),
        ("accumulation", "per_step"),
        ("free_grads", "sometimes"),
        ("max_graphs", 0),
    ],
)
def test_unknown_values_list_the_valid_ones(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as raised:
        XLAArguments(**{name: value})
    assert f"{name}={value!r}" in str(raised.value)
    valid = {"xla_mode": "'eager+dynamo'", "on_graph_break": "'allow'", "accumulation": "'unrolled'"}
    assert valid.get(name, "valid values") in str(raised.value)


def _construct(**options: Any) -> hf_trainer.Trainer:
    get_runtime().device.initialize()
    args = options.pop("args", None) or arguments()
    return hf_trainer.Trainer(model=Classifier(), args=args, train_dataset=vector_samples(8), **options)


def test_the_three_ways_are_one() -> None:
    assert _construct(xla_args=XLAArguments(**_VALUES)).xla_config == _CONFIG
    assert _construct(xla_args=_CONFIG).xla_config == _CONFIG
    assert _construct(**_VALUES).xla_config == _CONFIG
    assert _construct().xla_config == XLAConfig()


def test_options_given_twice() -> None:
    with pytest.raises(ConfigError, match=r"twice.*max_graphs=, xla_mode="):
        _construct(xla_args=XLAArguments(), xla_mode="lazy", max_graphs=1)


def test_every_option_is_an_argument() -> None:
    assert _construct(replay_verify_every=None, profile_steps=(2, 3)).xla_config.replay_verify_every is None
    with pytest.raises(ConfigError, match="steps_per_execution is no longer an option"):
        _construct(steps_per_execution=2)


def test_unknown_mode_lists_the_valid_ones() -> None:
    with pytest.raises(ConfigError, match=r"'eager', 'eager\+compile', 'eager\+dynamo', 'lazy'"):
        _construct(xla_mode="jit")
    with pytest.raises(ConfigError, match=r"unrolled.*needs xla_mode='eager\+compile'"):
        _construct(xla_mode="lazy", accumulation="unrolled")


# Arguments that cannot work, and the alternative that the error names.
_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "fp16": ({"fp16": True}, "bf16=True"),
    "torch_compile": ({"torch_compile": True}, r"xla_mode='eager\+dynamo'"),
    "torch_compile_backend": ({"torch_compile_backend": "inductor"}, r"xla_mode='eager\+dynamo'"),
    "fused": ({"optim": "adamw_torch", "optim_args": "fused=True"}, "Leave it out"),
    "use_cpu": ({"use_cpu": True}, "PJRT_DEVICE=CPU"),
    "fsdp": ({"fsdp": "full_shard"}, r"add fsdp_config=\{'xla': True\}"),
    "fsdp with another dtype": (
        {"fsdp": "full_shard", "fsdp_config": {"xla": True, "xla_fsdp_settings": {"compute_dtype": "bfloat16"}}},
        "bf16=True",
    ),
    "liger": ({"use_liger_kernel": True}, "leave it off"),
    "empty cache": ({"torch_empty_cache_steps": 2}, "leave it off"),
}


@pytest.mark.parametrize("name", sorted(_REFUSED))
def test_refused_arguments(name: str) -> None:
    options, alternative = _REFUSED[name]
    with pytest.raises(UnsupportedOptionError, match=alternative):
        _construct(args=arguments(**options))


def test_deepspeed_is_refused() -> None:
    args = arguments()
    # Without the package installed transformers refuses the option when it is parsed.
    args.deepspeed = "config.json"
    with pytest.raises(UnsupportedOptionError, match="SPMD"):
        _construct(args=args)


def test_fused_optimizers_are_refused() -> None:
    with pytest.raises(UnsupportedOptionError, match=r"optimizer_cls_and_kwargs.*Leave it out"):
        _construct(optimizer_cls_and_kwargs=(torch.optim.AdamW, {"lr": 0.1, "fused": True}))
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with pytest.raises(UnsupportedOptionError, match=r"AdamW was made with fused=True.*Leave it out"):
        hf_trainer.Trainer(model=model, args=arguments(), train_dataset=vector_samples(8), optimizers=(optimizer, None))


def test_sharding_options_are_checked_when_they_are_parsed() -> None:
    assert XLAArguments().to_sharding() is None
    assert XLAArguments(auto_sharding=True).to_sharding() == ShardingConfig()
    assert XLAArguments(sharding="fsdp").to_sharding() == ShardingConfig(scheme="fsdp")
    as_json = XLAArguments(sharding='{"scheme": "2d", "mesh_shape": [2, 4]}')
    assert as_json.to_sharding() == ShardingConfig(scheme="2d", mesh_shape=(2, 4))
    for wrong, message in (
        ({"sharding": "zero3"}, "valid values: 'auto', 'dp'"),
        ({"sharding": "{zero3"}, "neither a scheme nor JSON"),
        ({"sharding": "dp", "auto_sharding": True}, "not both"),
    ):
        with pytest.raises(ConfigError, match=message):
            XLAArguments(**wrong)


def test_a_refused_trainer_leaves_the_process_usable() -> None:
    with pytest.raises(UnsupportedOptionError):
        _construct(args=arguments(fp16=True))
    run = ours(Classifier(), vector_samples(16))
    run.assert_one_graph(4)


def test_checkpoint_offload_is_refused() -> None:
    args = arguments(gradient_checkpointing=True, activation_checkpointing_kwargs={"offload": True})
    trainer = hf_trainer.Trainer(model=gpt2(), args=args, train_dataset=token_samples(8))
    with pytest.raises(UnsupportedOptionError, match="leave offload off"):
        trainer.train()


# ---- wrong use --------------------------------------------------------------------------------------


class _Returns(hf_trainer.Trainer):
    """Its loss is what the test wants."""

    result: Any = None

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        logits = model(inputs["x"])["logits"]
        return self.result(logits) if callable(self.result) else self.result


def _train(kind: Any = hf_trainer.Trainer, model: Any = None, **options: Any) -> Any:
    samples = vector_samples(16)
    trainer = kind(model or Classifier(), arguments(max_steps=2), train_dataset=samples, **options)
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    ("result", "found"),
    [
        (None, "None. Return the loss as a tensor"),
        (1.5, "a float. Return"),
        (lambda logits: logits.mean(1), r"a tensor of the shape \[4\]. Reduce it to one number: loss.mean\(\)"),
        (lambda logits: (logits.mean(), logits), "a tuple. Return"),
    ],
    ids=["None", "float", "one for each sample", "with outputs"],
)
def test_a_loss_that_is_none(result: Any, found: str) -> None:
    kind = type("Mine", (_Returns,), {"result": result if not callable(result) else staticmethod(result)})
    line = inspect.getsourcelines(_Returns.compute_loss)[1]
    with pytest.raises(LossError, match=rf"_Returns.compute_loss \(.*test_options.py:{line}\) returns is {found}"):
        _train(kind)


class _Tuple(Classifier):
    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        return (self.layers(x),)


def test_a_loss_of_the_model_and_of_a_function() -> None:
    with pytest.raises(LossError, match=r"_Tuple.forward \(.*\) returns is a tensor of the shape"):
        _train(model=_Tuple())

    def each(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(outputs["logits"], labels, reduction="none")

    with pytest.raises(LossError, match=r"each \(.*test_options.py:\d+\) returns"):
        _train(compute_loss_func=each)
    # The process and the classes are as before.
    assert len(_train().state.log_history) > 0


@pytest.mark.parametrize("safe", [True, False])
def test_a_checkpoint_that_is_not_there(safe: bool, tmp_path: Path) -> None:
    options = arguments(str(tmp_path), max_steps=2, save_strategy="steps", save_steps=2)
    trainer = hf_trainer.Trainer(Classifier(), options, train_dataset=vector_samples(16), safe_checkpoints=safe)
    with pytest.raises((CheckpointNotFoundError, ValueError), match="No valid checkpoint found in output directory"):
        trainer.train(resume_from_checkpoint=True)
    trainer.train()
    with pytest.raises(CheckpointNotFoundError, match=r"at .*checkpoint-3: nothing is there \(in "):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    file = tmp_path / "checkpoint-2" / "model.safetensors"
    with pytest.raises(CheckpointNotFoundError, match=r"it is a file, .*did you mean .*checkpoint-2\?"):
        trainer.train(resume_from_checkpoint=str(file))


@pytest.mark.parametrize(
    ("given", "meant"), [("shard", "sharding"), ("on_graphbreak", "on_graph_break"), ("xla_reports", "xla_report")]
)
def test_an_option_that_is_misspelt(given: str, meant: str) -> None:
    with pytest.raises(TypeError, match=f"argument '{given}'; did you mean .*{meant}"):
        hf_trainer.Trainer(Classifier(), **{given: "fsdp"})
    with pytest.raises(TypeError, match=r"argument 'quite_another'$"):
        hf_trainer.Trainer(Classifier(), quite_another=1)
