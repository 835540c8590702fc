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
from benchmarks.ecosystem.with_transformers import train_with
from hf_trainer import XLATrainerMixin
from tests.hf_trainer import text_models as text
from xla_adapters.config import OnGraphBreak


class _SFT(XLATrainerMixin, trl.SFTTrainer):
    pass


class _DPO(XLATrainerMixin, trl.DPOTrainer):
    pass


class _Reward(XLATrainerMixin, trl.RewardTrainer):
    pass


class _KTO(XLATrainerMixin, trl.KTOTrainer):
    pass


class _GRPO(XLATrainerMixin, trl.GRPOTrainer):
    pass


def _text(index: int) -> dict[str, Any]:
    return {"text": f"row {index % 10} " * 3}


def _preference(index: int) -> dict[str, Any]:
    return {"prompt": f"q{index % 10}:", "chosen": f" good {index % 10}", "rejected": f" bad {index % 7}"}


def _pair(index: int) -> dict[str, Any]:
    return {"chosen": f"q{index % 10}: good", "rejected": f"q{index % 10}: bad{index % 7}"}


def _judged(index: int) -> dict[str, Any]:
    return {"prompt": f"q{index % 10}:", "completion": f" a{index % 7}", "label": index % 3 > 0}


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
    ours: type,
    config: type,
    row: Callable[[int], dict[str, Any]],
    on_graph_break: OnGraphBreak | None,
    *,
    model: Callable[[], Any] = text.llama,
    arguments: dict[str, Any] | None = None,
    more: Callable[[], dict[str, Any]] = dict,
) -> Trained:
    def options() -> dict[str, Any]:
        rows = Dataset.from_list([row(index) for index in range(4 * STEPS)])
        return {"model": model(), "train_dataset": rows, "processing_class": text.tokenizer(), **more()}

    # The class that the mixin is put before is the stock one.
    return train_with(ours.__mro__[2], ours, config, options, on_graph_break, bf16=False, **(arguments or {}))


def cells() -> list[Cell]:
    """Each trainer of TRL that is tested."""
    greedy = {"max_completion_length": 4, "num_generations": 2, "top_k": 1}
    packed = {"packing": True, "max_length": 32, "per_device_train_batch_size": 1, "num_train_epochs": 3}
    made: list[tuple[str, str, Callable[[OnGraphBreak | None], Trained]]] = [
        ("TRL SFT", "decoder", functools.partial(_train, _SFT, trl.SFTConfig, _text)),
        ("TRL SFT", "decoder, packed rows", functools.partial(_train, _SFT, trl.SFTConfig, _text, arguments=packed)),
        (
            "TRL SFT",
            "decoder, LoRA",
            functools.partial(_train, _SFT, trl.SFTConfig, _text, more=lambda: {"peft_config": _lora()}),
        ),
        ("TRL DPO", "decoder", functools.partial(_train, _DPO, trl.DPOConfig, _preference)),
        (
            "TRL DPO",
            "decoder, LoRA",
            functools.partial(_train, _DPO, trl.DPOConfig, _preference, more=lambda: {"peft_config": _lora()}),
        ),
        ("TRL Reward", "decoder", functools.partial(_train, _Reward, trl.RewardConfig, _pair, model=_judge)),
        ("TRL KTO", "decoder", functools.partial(_train, _KTO, trl.KTOConfig, _judged)),
        (
            "TRL GRPO",
            "decoder",
            functools.partial(
                _train,
                _GRPO,
                trl.GRPOConfig,
                _question,
                arguments=greedy,
                more=lambda: {"reward_funcs": _length},
            ),
        ),
    ]
    return [Cell(trainer, model, train) for trainer, model, train in made]
