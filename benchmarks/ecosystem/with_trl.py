"""The trainers of TRL, with a decoder."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import trl
from datasets import Dataset
from peft import LoraConfig
from transformers import LlamaForSequenceClassification

from benchmarks.ecosystem.cell import STEPS, Cell, Trained
from benchmarks.ecosystem.with_transformers import on_xla, train_with
from tests.hf_trainer import text_models as text
from tests.hf_trainer import trl_runs as rows
from xla_adapters.config import OnGraphBreak


def _question(index: int) -> dict[str, Any]:
    return {"prompt": f"say {index % 10}:"}


def _length(completions: list[str], **_: Any) -> list[float]:
    """A reward."""
    return [float(completion.count("a")) + len(completion) * 0.01 for completion in completions]


def _lora() -> LoraConfig:
    return LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)


def _judge() -> Any:
    return text.llama(LlamaForSequenceClassification, num_labels=1)


def _train(
    stock: type,
    config: type,
    row: Callable[[int], dict[str, Any]],
    on_graph_break: OnGraphBreak | None,
    *,
    model: Callable[[], Any] = text.llama,
    arguments: dict[str, Any] | None = None,
    more: Callable[[], dict[str, Any]] = dict,
) -> Trained:
    def options() -> dict[str, Any]:
        data = Dataset.from_list([row(index) for index in range(4 * STEPS)])
        return {"model": model(), "train_dataset": data, "processing_class": text.tokenizer(), **more()}

    return train_with(stock, on_xla(stock), config, options, on_graph_break, bf16=False, **(arguments or {}))


def cells() -> list[Cell]:
    """Each trainer of TRL that is tested."""
    sampled = {"max_completion_length": 4, "num_generations": 4}
    packed = {"packing": True, "max_length": 32, "per_device_train_batch_size": 1, "num_train_epochs": 3}
    sft, dpo = (trl.SFTTrainer, trl.SFTConfig, rows.text), (trl.DPOTrainer, trl.DPOConfig, rows.preference)
    lora = {"more": lambda: {"peft_config": _lora()}}
    grpo = {"arguments": sampled, "more": lambda: {"reward_funcs": _length}}
    made: list[tuple[str, str, tuple[Any, ...], dict[str, Any]]] = [
        ("TRL SFT", "decoder", sft, {}),
        ("TRL SFT", "decoder, packed rows", sft, {"arguments": packed}),
        ("TRL SFT", "decoder, LoRA", sft, lora),
        ("TRL DPO", "decoder", dpo, {}),
        ("TRL DPO", "decoder, LoRA", dpo, lora),
        ("TRL Reward", "decoder", (trl.RewardTrainer, trl.RewardConfig, rows.pair), {"model": _judge}),
        ("TRL KTO", "decoder", (trl.KTOTrainer, trl.KTOConfig, rows.judged), {}),
        ("TRL GRPO", "decoder", (trl.GRPOTrainer, trl.GRPOConfig, _question), grpo),
    ]
    return [Cell(trainer, model, functools.partial(_train, *what, **options)) for trainer, model, what, options in made]
