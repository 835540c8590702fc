"""Activation checkpointing in training: the same parameters get gradients as on plain CPU torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn

from tests.hf_trainer.scenarios import arguments, assert_close, gpt2, ours, reference, steps_of, token_samples
from tests.tiny_models import tiny

pytestmark = pytest.mark.isolated

_Case = tuple[nn.Module, list[dict[str, Any]]]


def _draw(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(3))


def _pictures() -> list[dict[str, Any]]:
    return [{"pixel_values": picture, "labels": number % 2} for number, picture in enumerate(_draw(16, 3, 8, 8))]


def _vit(dropout: float = 0.0) -> Any:
    return tiny("vit", num_hidden_layers=2, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)


def _vit_lora(dropout: float = 0.0) -> _Case:
    config = peft.LoraConfig(
        r=4,
        target_modules=["q_proj", "v_proj", "query", "value"],
        modules_to_save=["classifier"],
        lora_dropout=dropout,
        init_lora_weights=False,
    )
    model = _vit(dropout)
    torch.manual_seed(1)
    return peft.get_peft_model(model, config), _pictures()


def _vit_frozen() -> _Case:
    model = _vit()
    model.vit.embeddings.requires_grad_(False)
    return model, _pictures()


def _gpt2_frozen() -> _Case:
    model = gpt2(layers=2, tie_word_embeddings=False)
    model.transformer.wte.requires_grad_(False)
    model.transformer.wpe.requires_grad_(False)
    return model, token_samples(16)


def _bert_frozen() -> _Case:
    model = tiny("bert", num_hidden_layers=2)
    model.bert.embeddings.requires_grad_(False)
    rows = [{"input_ids": sample["input_ids"], "labels": n % 2} for n, sample in enumerate(token_samples(16))]
    return model, rows


def _wav2vec2_frozen() -> _Case:
    torch.manual_seed(0)
    config = transformers.Wav2Vec2Config(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        conv_dim=(8, 8),
        conv_stride=(4, 4),
        conv_kernel=(4, 4),
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        apply_spec_augment=False,
        layerdrop=0.0,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        feat_proj_dropout=0.0,
        final_dropout=0.0,
    )
    model = transformers.Wav2Vec2ForSequenceClassification(config)
    model.freeze_feature_encoder()
    encoder = model.wav2vec2.encoder
    for part in (model.wav2vec2.feature_projection, encoder.pos_conv_embed, encoder.layer_norm):
        part.requires_grad_(False)
    return model, [{"input_values": row, "labels": n % 2} for n, row in enumerate(_draw(16, 160))]


def _whisper() -> _Case:
    rows = zip(_draw(16, 8, 16), token_samples(16), strict=True)
    model = tiny("whisper", encoder_layers=2, decoder_layers=2)
    return model, [{"input_features": sound, "labels": sample["labels"]} for sound, sample in rows]


_CASES: dict[str, Callable[[], _Case]] = {
    "ViT": lambda: (_vit(), _pictures()),
    "ViT, embeddings frozen": _vit_frozen,
    "ViT LoRA": _vit_lora,
    "GPT-2, embeddings frozen": _gpt2_frozen,
    "BERT, embeddings frozen": _bert_frozen,
    "wav2vec2, front frozen": _wav2vec2_frozen,
    "Llama": lambda: (tiny("llama", num_hidden_layers=2), token_samples(16)),
    "T5": lambda: (tiny("t5", num_layers=2), token_samples(16)),
    "Whisper": _whisper,
}


def _moved(make: Callable[[], _Case], run: Any) -> set[str]:
    """Names of the parameters that the training changed."""
    before, after = dict(make()[0].named_parameters()), dict(run.trainer.model.named_parameters())
    return {name for name, value in after.items() if not torch.equal(value.detach().cpu(), before[name].detach())}


def _compare(make: Callable[[], _Case], steps: int = 3, **options: Any) -> Any:
    """Trains on plain CPU torch and on XLA, both with checkpointing, and compares losses and changed parameters."""
    # SGD: a gradient that is wrong by a factor changes the parameter by the same factor.
    args = {"activation_checkpointing": True, "optim": "sgd", "learning_rate": 0.1, "max_steps": steps, **options}
    model, data = make()
    expected = reference(model, data, args=args)
    model, _ = make()
    run = ours(model, data, args=arguments(**args))
    run.assert_one_graph(steps)
    assert_close(run.losses, expected.losses)
    theirs = _moved(make, expected)
    assert theirs == _moved(make, run)
    assert theirs
    wanted = expected.parameters()
    for name, value in run.parameters().items():
        torch.testing.assert_close(
            value, wanted[name], rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )
    return run


@pytest.mark.parametrize("name", _CASES)
def test_what_has_a_gradient_on_cpu_has_one_here(name: str) -> None:
    run = _compare(_CASES[name])
    trainable = {name for name, value in run.trainer.model.named_parameters() if value.requires_grad}
    # Biases of the keys do not change the attention. By rounding they may have gradients of 1e-10.
    assert len(_moved(_CASES[name], run)) >= 0.8 * len(trainable)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_steps_are_replayed(family: str, reentrant: bool) -> None:
    """transformers has the embeddings require gradients by a hook, and layers compute through `checkpoint`."""
    run = _compare(
        lambda: (tiny(family), token_samples(24)),
        6,
        activation_checkpointing_kwargs={"use_reentrant": reentrant},
    )
    assert run.trainer.model.get_input_embeddings()._forward_hooks
    assert steps_of(run.trainer).train.replays == 4, steps_of(run.trainer).train.replay_reasons


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"])
def test_the_variant_is_the_users(name: str, reentrant: bool) -> None:
    """Parameters that reentrant checkpointing does not train are not trained on CPU either."""
    run = _compare(_vit_lora, **{name: {"use_reentrant": reentrant}})
    moved = _moved(_vit_lora, run)
    assert any("lora" in name for name in moved) is not reentrant


def test_other_options_leave_the_default_variant() -> None:
    run = _compare(_gpt2_frozen, activation_checkpointing_kwargs={"every_n_layers": 2, "preserve_rng_state": True})
    assert [block.gradient_checkpointing for block in run.trainer.model.transformer.h] == [True, False]


@pytest.mark.parametrize("options", [{}, {"activation_checkpointing_kwargs": {"use_reentrant": True}}])
def test_dropout_is_the_same_again(options: dict[str, Any]) -> None:
    def make() -> _Case:
        if options:
            return gpt2(dropout=0.3, layers=2), token_samples(16)
        return _vit_lora(dropout=0.3)

    args = {"optim": "sgd", "learning_rate": 0.1, "seed": 7}
    model, data = make()
    plain = ours(model, data, args=arguments(**args))
    model, _ = make()
    run = ours(model, data, args=arguments(activation_checkpointing=True, **args, **options))
    run.assert_one_graph(4)
    assert_close(run.losses, plain.losses)
    assert _moved(make, run) == _moved(make, plain)
    expected = plain.parameters()
    for name, value in run.parameters().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6)


def test_who_enables_it_on_the_model() -> None:
    model, data = _vit_frozen()
    calls: list[int] = []
    # The second is the name in transformers 5.22.
    enable: Any = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    next(part for name, part in model.named_modules() if name.endswith("attention")).register_forward_pre_hook(
        lambda *args: calls.append(1)
    )
    run = ours(model, data, args=arguments(max_steps=2))
    run.assert_one_graph(2)
    assert len(calls) == 2 * 2
