"""Checkpoints in parts, and other uses of a sharded model: adapters, generation, activation checkpointing."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import hf_trainer
import xla_adapters
from hf_trainer.saving import deferred_state_dict, writing_deferred_weights
from tests.hf_trainer.scenarios import Run, arguments, assert_close, ours, reference
from tests.hf_trainer.sharded_models import MODELS, ROWS, data, model
from tests.hf_trainer.test_sharding import assert_cut_as_planned, options, start
from tests.isolation import run_in_child
from tests.trainers import shape_of_a_shard
from xla_adapters.checkpoint import CheckpointStore, CheckpointWarning
from xla_adapters.errors import ConfigError
from xla_adapters.sharding import ShardingConfig
from xla_adapters.sharding.mesh import tiles_of
from xla_adapters.sharding.state import consolidate, model_state, save_state

pytestmark = pytest.mark.isolated(env={"CPU_NUM_DEVICES": "8"})

STEPS = 6


def run(folder: Path, name: str, scheme: str | None, *, checkpoints: Any = "sharded", **more: Any) -> Run:
    if scheme is not None:
        xla_adapters.initialize(spmd=True)
        more["sharding"] = ShardingConfig(scheme=scheme, checkpoints=checkpoints)  # type: ignore[arg-type]
    args = options(output_dir=str(folder), save_strategy="steps", save_steps=3, max_steps=STEPS)
    return ours(model(name), data(name), args=arguments(**args), **more)


# Tied weights, experts that are saved one by one, and names that differ on disk.
_IN_SHORT = ("gpt2", "mixtral", "vit")


@pytest.mark.parametrize(
    "name", [*_IN_SHORT, *(pytest.param(name, marks=pytest.mark.slow) for name in MODELS if name not in _IN_SHORT)]
)
def test_weights_of_every_model_are_read_by_from_pretrained(name: str, tmp_path: Path) -> None:
    done = run(tmp_path, name, "2d")
    # The step is the only graph.
    assert done.counts.compiles == 1, done.explain()
    checkpoint = tmp_path / f"checkpoint-{STEPS}"
    assert not (checkpoint / "optimizer.pt").exists()
    loaded: Any = type(model(name)).from_pretrained(checkpoint)
    for key, value in done.parameters().items():
        assert torch.equal(loaded.state_dict()[key], value), key
    # The same names as without the option.
    plain = tmp_path / "plain"
    loaded.save_pretrained(plain)
    names = [set(_names(folder)) for folder in (checkpoint, plain)]
    assert names[0] == names[1]


def _names(folder: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as file:
        return list(file.keys())


@pytest.mark.slow
def test_other_meshes_and_one_device_go_on_exactly(tmp_path: Path) -> None:
    def writes() -> list[float]:
        return run(tmp_path, "llama", "fsdp").losses

    def goes_on(scheme: str | None, checkpoints: str, folder: Path = tmp_path) -> list[float]:
        resumed = run(
            folder,
            "llama",
            scheme,
            checkpoints=checkpoints,
            train_options={"resume_from_checkpoint": str(folder / "checkpoint-3")},
        )
        if scheme is not None:
            assert_cut_as_planned(resumed)
        return resumed.losses

    losses = run_in_child(writes, env={"CPU_NUM_DEVICES": "8"})
    for devices, scheme, checkpoints in (
        (8, "fsdp", "sharded"),
        (4, "2d", "sharded"),
        (8, "tp", "whole"),
        (1, None, "whole"),
    ):
        env = {"CPU_NUM_DEVICES": str(devices)}
        resumed = run_in_child(lambda scheme=scheme, kind=checkpoints: goes_on(scheme, kind), env=env)
        assert_close(resumed, losses, 1e-5)
        if scheme == "fsdp":
            assert resumed == losses
    one = tmp_path / "one"
    written = run_in_child(lambda: run(one, "llama", None).losses, env={"CPU_NUM_DEVICES": "1"})
    for scheme in ("fsdp", "2d"):
        on_8 = run_in_child(lambda scheme=scheme: goes_on(scheme, "sharded", one), env={"CPU_NUM_DEVICES": "8"})
        assert_close(on_8, written, 1e-5)


def test_a_whole_checkpoint_is_gone_on_from_in_parts(tmp_path: Path) -> None:
    losses = run(tmp_path, "gpt2", "2d", checkpoints="whole").losses
    resumed = run(tmp_path, "gpt2", "2d", train_options={"resume_from_checkpoint": str(tmp_path / "checkpoint-3")})
    assert resumed.losses == losses


def test_parts_are_committed_and_verified_too(tmp_path: Path) -> None:
    losses = run(tmp_path, "gpt2", "2d").losses
    store = CheckpointStore(tmp_path)
    assert [(saved.name, saved.manifest.world["devices"]) for saved in store.checkpoints()] == [
        ("checkpoint-3", 8),
        ("checkpoint-6", 8),
    ]
    part = next((tmp_path / "checkpoint-6" / "optimizer").glob("*.distcp"))
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.warns(CheckpointWarning, match=rf"checkpoint-6 is damaged.*{part.name}"):
        resumed = run(tmp_path, "gpt2", "2d", train_options={"resume_from_checkpoint": True})
    assert resumed.losses == losses
    assert store.load("checkpoint-6").step == 6


def test_the_host_has_few_weights_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixtral's experts are one weight in the model and many in the file."""
    done = run(tmp_path / "run", "mixtral", "2d")
    runtime, net = xla_adapters.get_runtime(), done.trainer.model
    brought: list[list[str]] = []
    stock = type(runtime.transfers).to_host
    shapes = {tuple(value.shape) for value in net.state_dict().values()}

    def to_host(self: Any, tensors: Any) -> Any:
        brought.append([str(tuple(tensor.shape)) for tensor in tensors])
        return stock(self, tensors)

    monkeypatch.setattr(type(runtime.transfers), "to_host", to_host)
    with xla_adapters.count() as counted, writing_deferred_weights():
        net.save_pretrained(tmp_path / "saved", state_dict=deferred_state_dict(net))
    assert (counted.compiles, counted.executions, counted.eager_ops) == (0, 0, 0)
    assert {len(tensors) for tensors in brought} == {1}
    # Each weight is copied once or twice, into however many it is split.
    assert len(shapes) <= len(brought) <= 2 * len(net.state_dict())
    net.cpu()
    net.save_pretrained(tmp_path / "stock")
    assert set(_names(tmp_path / "saved")) == set(_names(tmp_path / "stock"))


def test_large_models_have_several_files(tmp_path: Path) -> None:
    xla_adapters.initialize(spmd=True)
    net = model("llama").to("xla")
    with writing_deferred_weights():
        net.save_pretrained(tmp_path, state_dict=deferred_state_dict(net), max_shard_size="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    for name, value in model("llama").state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


def test_models_that_carry_dtensors(tmp_path: Path) -> None:
    xla_adapters.initialize(spmd=True)
    net, mesh = model("gpt2"), DeviceMesh("xla", torch.arange(8).reshape(4, 2))
    layer = net.transformer.h[0].mlp.c_fc
    layer.weight = nn.Parameter(distribute_tensor(layer.weight, mesh, [Shard(0), Replicate()]))
    done = ours(net, data("gpt2"), args=arguments(**options()), sharding="2d")
    plan = done.trainer.sharding_plan
    entry = next(entry for entry in plan.parameters if entry.name == "transformer.h.0.mlp.c_fc.weight")
    assert (entry.spec, entry.decided_by) == (("data", None), "user")
    assert_cut_as_planned(done)
    assert_close(done.losses, reference(model("gpt2"), data("gpt2"), args=options()).losses, 1e-5)
    layer.weight = nn.Parameter(distribute_tensor(model("gpt2").transformer.h[0].mlp.c_fc.weight, mesh, None))
    earlier = torch.optim.AdamW(net.parameters())
    with pytest.raises(ConfigError, match="before its DTensors were accepted"):
        ours(net, data("gpt2"), args=arguments(**options()), sharding="2d", optimizers=(earlier, None))


def test_a_module_of_ones_own_is_saved_as_ever(tmp_path: Path) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model("gpt2")

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
            return self.inner(input_ids=input_ids, labels=labels)

    xla_adapters.initialize(spmd=True)
    args = options(output_dir=str(tmp_path), save_strategy="steps", save_steps=3)
    sharding = ShardingConfig(scheme="fsdp", checkpoints="sharded")
    trainer = hf_trainer.Trainer(Own(), arguments(**args), train_dataset=data("gpt2"), sharding=sharding)
    trainer.train()
    again = hf_trainer.Trainer(Own(), arguments(**args), train_dataset=data("gpt2"), sharding=sharding)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert again.state.log_history[-2]["loss"] == trainer.state.log_history[-2]["loss"]


# ---- consolidation ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_from_pretrained_reads_them(name: str, tmp_path: Path) -> None:
    saved: Any = model(name)
    save_state({"model": model_state(saved)}, tmp_path / "parts")
    saved.config.save_pretrained(tmp_path / "whole")
    consolidate(tmp_path / "parts", tmp_path / "whole")
    loaded: Any = type(saved).from_pretrained(tmp_path / "whole")
    for key, value in saved.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value), key


# ---- other uses -------------------------------------------------------------------------------------


def with_adapters() -> Any:
    torch.manual_seed(2)
    config = peft.LoraConfig(
        r=8, lora_alpha=8, lora_dropout=0.0, target_modules=["q_proj", "up_proj"], init_lora_weights=False
    )
    return peft.get_peft_model(model("llama"), config)


@pytest.mark.parametrize("scheme", ["2d", "fsdp", pytest.param("auto", marks=pytest.mark.slow)])
def test_lora(scheme: str) -> None:
    args = options(learning_rate=0.05)
    start()
    frozen = {name: value.clone() for name, value in with_adapters().state_dict().items() if "lora" not in name}
    run = ours(with_adapters(), data("llama"), args=arguments(**args), sharding=scheme)
    run.assert_one_graph(args["max_steps"])
    expected = reference(with_adapters(), data("llama"), args=args)
    assert_close(run.losses, expected.losses, 1e-5)
    after = run.parameters()
    assert all(torch.equal(after[name], value) for name, value in frozen.items())
    # Frozen weights are sharded too, and have no optimizer state.
    plan, split = run.trainer.sharding_plan, 0
    for name, parameter in run.trainer.model.named_parameters():
        tiles = tiles_of(plan.mesh, plan.spec_of(name))
        local = tuple(size // count for size, count in zip(parameter.shape, tiles.counts, strict=True))
        assert shape_of_a_shard(parameter) == local, name
        split += tiles.number > 1 and not parameter.requires_grad
        assert (len(run.trainer.optimizer.state.get(parameter, {})) > 0) == parameter.requires_grad
    assert split or scheme == "auto"


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_generation(name: str, tmp_path: Path) -> None:
    start()
    trained = model(name)
    trained.generation_config.pad_token_id = 0
    plain = copy.deepcopy(trained).eval()
    trainer = hf_trainer.Trainer(trained, arguments(str(tmp_path)), sharding="2d")
    generator = torch.Generator().manual_seed(3)
    prompts = torch.randint(3, 128, (ROWS, 5), generator=generator)
    wanted = {"max_new_tokens": 6, "do_sample": False}
    expected = plain.generate(input_ids=prompts, attention_mask=torch.ones_like(prompts), **wanted)
    actual = trainer.generate(input_ids=prompts, attention_mask=torch.ones_like(prompts), **wanted)
    assert torch.equal(actual, expected)
    with xla_adapters.count() as counters:
        trainer.generate(input_ids=prompts, attention_mask=torch.ones_like(prompts), **wanted)
    assert counters.compiles == 0
    assert any(xla_adapters.get_runtime().spmd.tiles_of(item) is not None for item in trainer.model.parameters())


def test_predict_with_generate(tmp_path: Path) -> None:
    start()
    samples = [{name: value[:6] for name, value in sample.items()} for sample in data("t5", ROWS + 3)]
    args = {"predict_with_generate": True, "generation_max_length": 8, "per_device_eval_batch_size": ROWS}
    trained = model("t5")
    trained.generation_config.pad_token_id = 0
    plain = copy.deepcopy(trained).eval()
    trainer = hf_trainer.Seq2SeqTrainer(
        trained,
        transformers.Seq2SeqTrainingArguments(str(tmp_path), report_to=[], disable_tqdm=True, **args),
        sharding="2d",
    )
    found = trainer.predict(samples).predictions
    inputs = torch.stack([sample["input_ids"] for sample in samples])
    expected = plain.generate(input_ids=inputs, max_length=8, do_sample=False, num_beams=1)
    assert found[:, : expected.shape[1]].tolist() == expected.tolist()


@pytest.mark.parametrize("scheme", ["fsdp", "2d"])
def test_gradient_checkpointing_with_accumulation(scheme: str) -> None:
    args = options(gradient_checkpointing=True, gradient_accumulation_steps=2, max_steps=4)
    start()
    run = ours(model("gpt2"), data("gpt2", 8 * ROWS), args=arguments(**args), sharding=scheme)
    expected = reference(model("gpt2"), data("gpt2", 8 * ROWS), args={**args, "gradient_checkpointing": False})
    assert_close(run.losses, expected.losses, 1e-5)
