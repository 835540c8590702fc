"""Other uses of a sharded model: training adapters, generation, activation checkpointing."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

import hf_trainer
import xla_adapters
from tests.hf_trainer.scenarios import arguments, assert_close, ours, reference
from tests.hf_trainer.sharded_models import ROWS, data, model
from tests.hf_trainer.test_sharding import on_8_devices, options, shape_of_a_shard, start
from xla_adapters.sharding.mesh import tiles_of


def with_adapters() -> Any:
    torch.manual_seed(2)
    config = peft.LoraConfig(
        r=8, lora_alpha=8, lora_dropout=0.0, target_modules=["q_proj", "up_proj"], init_lora_weights=False
    )
    return peft.get_peft_model(model("llama"), config)


@pytest.mark.parametrize("scheme", ["2d", "fsdp", pytest.param("auto", marks=pytest.mark.slow)])
@on_8_devices
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
@on_8_devices
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


@on_8_devices
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
@on_8_devices
def test_gradient_checkpointing_with_accumulation(scheme: str) -> None:
    args = options(gradient_checkpointing=True, gradient_accumulation_steps=2, max_steps=4)
    start()
    run = ours(model("gpt2"), data("gpt2", 8 * ROWS), args=arguments(**args), sharding=scheme)
    expected = reference(model("gpt2"), data("gpt2", 8 * ROWS), args={**args, "gradient_checkpointing": False})
    assert_close(run.losses, expected.losses, 1e-5)
