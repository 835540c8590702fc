"""Generation: the tokens of the plain CPU, by one graph for each token."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import transformers as hf

import hf_trainer
import xla_adapters
from tests.device import DEVICE, ON_TORCH_TPU
from tests.isolation import isolated
from tests.tiny_models import tiny

_LENGTH = 6
_Made = tuple[Any, dict[str, Any]]
_LAYERS = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_TEXT: dict[str, Any] = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def _tokens(rows: int = 2, length: int = 5) -> torch.Tensor:
    return torch.randint(3, 64, (rows, length), generator=torch.Generator().manual_seed(0))


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def whisper() -> _Made:
    """Takes `input_features`; has no argument `inputs`."""
    model = tiny("whisper", max_source_positions=20)
    return model, {"input_features": _noise(2, 8, 40), "max_new_tokens": _LENGTH}


def bert_pair() -> _Made:
    """Its decoder needs the length of the cache as a number."""
    hf.set_seed(0)
    bert = {**_LAYERS, "vocab_size": 64, "max_position_embeddings": 32}
    config = hf.EncoderDecoderConfig.from_encoder_decoder_configs(hf.BertConfig(**bert), hf.BertConfig(**bert))
    model = hf.EncoderDecoderModel(config=config)
    for settings in (model.config, model.generation_config):
        settings.decoder_start_token_id, settings.pad_token_id, settings.eos_token_id = 1, 0, 2
    tokens = _tokens()
    return model, {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "max_new_tokens": _LENGTH}


def blip() -> _Made:
    """Encodes the image outside of its `forward`, then generates with its decoder."""
    hf.set_seed(0)
    text = {**_LAYERS, **_TEXT, "sep_token_id": 2, "max_position_embeddings": 32, "encoder_hidden_size": 16}
    vision = {**_LAYERS, "image_size": 8, "patch_size": 4}
    model = hf.BlipForConditionalGeneration(hf.BlipConfig(text_config=text, vision_config=vision, projection_dim=16))
    tokens = torch.tensor([[1, 5, 6, 2]]).repeat(2, 1)
    return model, {
        "pixel_values": _noise(2, 3, 8, 8),
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "max_new_tokens": _LENGTH,
    }


def kosmos2() -> _Made:
    """Calls single layers of its parts."""
    hf.set_seed(0)
    text = {
        **_TEXT,
        "embed_dim": 16,
        "layers": 1,
        "ffn_dim": 16,
        "attention_heads": 2,
        "max_position_embeddings": 64,
    }
    vision = {**_LAYERS, "image_size": 8, "patch_size": 4}
    config = hf.Kosmos2Config(text_config=text, vision_config=vision, latent_query_num=2)
    model = hf.Kosmos2ForConditionalGeneration(config)
    tokens = _tokens(2, 6)
    mask = torch.zeros_like(tokens)
    mask[:, 1:3] = 1
    return model, {
        "pixel_values": _noise(2, 3, 8, 8),
        "input_ids": tokens,
        "image_embeds_position_mask": mask,
        "attention_mask": torch.ones_like(tokens),
        "max_new_tokens": _LENGTH,
    }


def parakeet() -> _Made:
    """Generates by one `forward` (CTC), which gets the arguments of `generate`."""
    hf.set_seed(0)
    encoder = {
        **_LAYERS,
        "num_mel_bins": 16,
        "conv_kernel_size": 3,
        "subsampling_conv_channels": 8,
        "max_position_embeddings": 64,
    }
    model = hf.ParakeetForCTC(hf.ParakeetCTCConfig(vocab_size=64, pad_token_id=0, encoder_config=encoder))
    return model, {"input_features": _noise(2, 48, 16), "attention_mask": torch.ones(2, 48, dtype=torch.long)}


def pop2piano() -> _Made:
    """Computes its input from the features and the composer."""
    hf.set_seed(0)
    model = hf.Pop2PianoForConditionalGeneration(
        hf.Pop2PianoConfig(
            vocab_size=64,
            composer_vocab_size=2,
            d_model=16,
            d_kv=8,
            d_ff=16,
            num_layers=1,
            num_decoder_layers=1,
            num_heads=2,
            decoder_start_token_id=0,
        )
    )
    model.generation_config.composer_to_feature_token = {"composer1": 0, "composer2": 1}
    return model, {"input_features": _noise(2, 5, 16), "composer": "composer1", "max_new_tokens": _LENGTH}


def seamless() -> _Made:
    """Makes the tokens that it starts with on its own device."""
    hf.set_seed(0)
    model = hf.SeamlessM4TForTextToText(
        hf.SeamlessM4TConfig(
            **_TEXT,
            hidden_size=16,
            encoder_layers=1,
            encoder_ffn_dim=16,
            encoder_attention_heads=2,
            decoder_layers=1,
            decoder_ffn_dim=16,
            decoder_attention_heads=2,
            max_position_embeddings=64,
            decoder_start_token_id=2,
        )
    )
    model.generation_config.text_decoder_lang_to_code_id = {"eng": 5}
    return model, {"input_ids": _tokens(), "tgt_lang": "eng", "max_new_tokens": _LENGTH}


MODELS: dict[str, Callable[[], _Made]] = {
    "whisper": whisper,
    "bert_pair": bert_pair,
    "blip": blip,
    "kosmos2": kosmos2,
    "parakeet": parakeet,
    "pop2piano": pop2piano,
    "seamless": seamless,
}
# It assigns through a boolean index.
IN_PIECES = ("kosmos2",)


# ---- tests ------------------------------------------------------------------------------------------


_NEW_TOKENS = 8


def _computable(model: Any) -> Any:
    """The model. TorchTPU's attention is a kernel for TPUs, which the stand-in for one cannot run."""
    if ON_TORCH_TPU:
        model.set_attn_implementation("eager")
    return model.eval()


_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {**_TOKENS, "n_layer": 2, "n_embd": 32},
    "llama": {**_TOKENS, "num_hidden_layers": 2, "hidden_size": 32},
    "t5": {"num_layers": 2, "d_model": 32},
    "bart": {"encoder_layers": 2, "decoder_layers": 2, "d_model": 32},
}


def build(name: str) -> Any:
    return _computable(tiny(name, **_SIZES[name]))


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "bart"])
@isolated
def test_tokens_equal_plain_cpu_generation(name: str, tmp_path: Path) -> None:
    model = build(name)
    reference = copy.deepcopy(model)
    prompt = torch.randint(3, 64, (2, 5), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(prompt)
    mask[0, :2] = 0
    trainer = hf_trainer.Trainer(model, transformers.TrainingArguments(output_dir=str(tmp_path), report_to=[]))
    for options in ({"do_sample": False}, {"do_sample": True, "top_k": 20}, {"num_beams": 2, "do_sample": False}):
        options["max_new_tokens"] = _NEW_TOKENS
        transformers.set_seed(1)
        wanted = reference.generate(prompt, attention_mask=mask, **options)
        transformers.set_seed(1)
        with xla_adapters.count() as counters:
            written = trainer.generate(prompt, attention_mask=mask, **options)
        assert torch.equal(written, wanted), options
        # Beams reorder the cache on the device.
        assert counters.eager_ops == 0 or (ON_TORCH_TPU and "num_beams" in options)
        if "num_beams" not in options:
            steps = written.shape[1] - (1 if model.config.is_encoder_decoder else prompt.shape[1])
            encoder = 1 if model.config.is_encoder_decoder else 0
            assert counters.executions == steps + encoder
            assert counters.transfers_to_host <= 2 * steps
    with xla_adapters.count() as again:
        trainer.generate(prompt, attention_mask=mask, do_sample=False, max_new_tokens=_NEW_TOKENS)
    assert again.compiles == 0
    assert "forward" not in vars(trainer.model)


@isolated(timeout=400)
def test_predict_with_generate(tmp_path: Path) -> None:
    tokens = torch.randint(3, 64, (6, 5), generator=torch.Generator().manual_seed(0))
    columns = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}
    data = [{name: value[row] for name, value in columns.items()} for row in range(len(tokens))]
    model = build("t5")
    wanted = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_length=7, do_sample=False).numpy()
    wanted_loss = model(**columns).loss.item()
    shapes: list[tuple[int, ...]] = []

    def metrics(prediction: transformers.EvalPrediction) -> dict[str, float]:
        shapes.append(prediction.predictions.shape)
        return {"matches": float((prediction.predictions[:, : wanted.shape[1]] == wanted).mean())}

    trainer = hf_trainer.Seq2SeqTrainer(
        model,
        transformers.Seq2SeqTrainingArguments(
            output_dir=str(tmp_path),
            report_to=[],
            per_device_eval_batch_size=3,
            predict_with_generate=True,
            generation_max_length=7,
        ),
        eval_dataset=data,
        compute_metrics=metrics,
    )
    first = trainer.evaluate()
    with xla_adapters.count() as counters:
        second = trainer.evaluate()
    assert first["eval_matches"] == second["eval_matches"] == 1.0
    assert abs(first["eval_loss"] - wanted_loss) < 1e-5
    assert counters.compiles == counters.eager_ops == 0
    # Per batch: the encoder, six tokens, and the forward for the loss.
    assert counters.executions == 2 * (1 + 6 + 1)
    predictions = trainer.predict(data).predictions
    assert np.array_equal(predictions[:, : wanted.shape[1]], wanted)
    assert "generate" not in vars(trainer.model)


@pytest.mark.parametrize("name", MODELS)
@isolated(timeout=400)
def test_models_that_generate_in_a_way_of_their_own(name: str, tmp_path: Path) -> None:
    xla_adapters.initialize()
    model, inputs = MODELS[name]()
    reference = copy.deepcopy(_computable(model))
    wanted = reference.generate(**inputs)
    args = transformers.TrainingArguments(output_dir=str(tmp_path), report_to=[])
    trainer = hf_trainer.Trainer(model, args, on_graph_break="warn" if name in IN_PIECES else "error")
    assert torch.equal(trainer.generate(**inputs), wanted)
    with xla_adapters.count() as again:
        assert torch.equal(trainer.generate(**inputs), wanted)
    assert again.compiles == again.eager_ops == 0
    # Vision or text is encoded once; the first of the new tokens is a start token in some models.
    new_tokens = 1 if name == "parakeet" else inputs["max_new_tokens"]
    assert again.executions <= new_tokens + (4 if name in IN_PIECES else 2)
    assert not any("forward" in vars(part) or "generate" in vars(part) for part in model.modules())
    assert model.device.type == DEVICE


@pytest.mark.parametrize("name", ["whisper", "bert_pair"])
@isolated(timeout=400)
def test_predict_with_generate_by_another_input(name: str, tmp_path: Path) -> None:
    xla_adapters.initialize()
    model, inputs = MODELS[name]()
    options = {"max_new_tokens": inputs.pop("max_new_tokens")}
    wanted = copy.deepcopy(_computable(model)).generate(**inputs, **options).numpy()
    labels = torch.full((2, 5), 5)
    rows = [{key: value[row] for key, value in (*inputs.items(), ("labels", labels))} for row in range(2)]
    args = transformers.Seq2SeqTrainingArguments(
        output_dir=str(tmp_path), report_to=[], predict_with_generate=True, per_device_eval_batch_size=2
    )
    trainer = hf_trainer.Seq2SeqTrainer(model, args)
    result = trainer.predict(rows, **options)
    assert np.array_equal(result.predictions[:, : wanted.shape[1]], wanted)
    assert np.isfinite(result.metrics["test_loss"])
