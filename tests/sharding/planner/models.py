"""Small models of every family, on the meta device: no weights, no device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

from xla_adapters.sharding import Mesh, PlanCost, ShardingConfig, ShardingPlan
from xla_adapters.sharding.planner import Planner, Topology, meshes_of

Batch = dict[str, torch.Tensor]
_TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 256,
}


def ids(rows: int = 8, columns: int = 16) -> torch.Tensor:
    return torch.zeros(rows, columns, dtype=torch.long, device="meta")


def tokens(rows: int = 8, columns: int = 16) -> Batch:
    return {"input_ids": ids(rows, columns), "labels": ids(rows, columns)}


def _images() -> Batch:
    return {"pixel_values": torch.zeros(8, 3, 32, 32, device="meta"), "labels": _classes()}


def _classes() -> torch.Tensor:
    return torch.zeros(8, dtype=torch.long, device="meta")


def llama(**settings: Any) -> nn.Module:
    return on_meta(
        lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**{**_TEXT, "num_key_value_heads": 4, **settings})
        )
    )


def gpt2(**settings: Any) -> nn.Module:
    plain = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 256, "n_positions": 64}
    return on_meta(lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**plain, **settings})))


def _bert() -> nn.Module:
    return on_meta(lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**_TEXT)))


def _t5() -> nn.Module:
    config = transformers.T5Config(
        d_model=64, d_ff=128, d_kv=16, num_layers=2, num_heads=4, vocab_size=256, decoder_start_token_id=0
    )
    return on_meta(lambda: transformers.T5ForConditionalGeneration(config))


def _vit() -> nn.Module:
    config = transformers.ViTConfig(**{**_TEXT, "image_size": 32, "patch_size": 8})
    return on_meta(lambda: transformers.ViTForImageClassification(config))


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(**{**_TEXT, "num_key_value_heads": 2, "num_local_experts": 4})
    return on_meta(lambda: transformers.MixtralForCausalLM(config))


def _resnet() -> nn.Module:
    config = transformers.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[2, 2], num_labels=8)
    return on_meta(lambda: transformers.ResNetForImageClassification(config))


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make().train()


def plan_model(
    model: nn.Module,
    batch: Any,
    *,
    mesh: Mesh | None,
    devices: int,
    config: ShardingConfig,
    topology: Topology,
    **options: Any,
) -> list[ShardingPlan]:
    """The planner's plans; `options` as for `Planner.begin`."""
    planner = Planner.begin(model, batch, topology=topology, overrides=config.overrides, **options)
    return planner.best(meshes_of(mesh, devices), config.memory_budget, given=mesh is not None)


def evaluate_all(plans: list[ShardingPlan], model: nn.Module, batch: Any, *, topology: Topology) -> list[PlanCost]:
    return Planner.begin(model, batch, topology=topology).costs(plans)


def evaluate(plan: ShardingPlan, model: nn.Module, batch: Any, *, topology: Topology) -> PlanCost:
    return evaluate_all([plan], model, batch, topology=topology)[0]


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch]]] = {
    "llama": (llama, tokens),
    "gpt2": (gpt2, tokens),
    "bert": (_bert, lambda: {"input_ids": ids(), "attention_mask": ids(), "labels": _classes()}),
    "t5": (_t5, tokens),
    "vit": (_vit, _images),
    "mixtral": (mixtral, tokens),
    "resnet": (_resnet, _images),
}
