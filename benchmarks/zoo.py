"""Tiny models of transformers' architectures, and random batches for them. Built on the CPU, in a child."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers

Batch = dict[str, Any]

VOCABULARY, LENGTH, BATCH = 96, 10, 4


def _tokens(generator: torch.Generator, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (BATCH, length), generator=generator)


def _mask(length: int = LENGTH) -> torch.Tensor:
    """Row i has i padding tokens at its end."""
    return (torch.arange(length)[None] < length - torch.arange(BATCH)[:, None]).long()


def causal(generator: torch.Generator) -> Batch:
    """Tokens that predict themselves."""
    tokens = _tokens(generator)
    return {"input_ids": tokens, "labels": tokens.clone()}


def causal_padded(generator: torch.Generator) -> Batch:
    """The same with padding, which the loss leaves out."""
    tokens, mask = _tokens(generator), _mask()
    tokens = tokens.masked_fill(mask == 0, 0)
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def masked(generator: torch.Generator) -> Batch:
    """Some tokens to be guessed, no padding."""
    tokens = _tokens(generator)
    return {"input_ids": tokens, "labels": tokens.masked_fill(torch.arange(LENGTH) % 3 != 0, -100)}


def masked_padded(generator: torch.Generator) -> Batch:
    """Some tokens to be guessed, with padding."""
    batch, mask = masked(generator), _mask()
    batch["attention_mask"] = mask
    batch["input_ids"] = batch["input_ids"].masked_fill(mask == 0, 0)
    batch["labels"] = batch["labels"].masked_fill(mask == 0, -100)
    return batch


def classified_padded(generator: torch.Generator) -> Batch:
    """A class per text, with padding."""
    mask = _mask()
    labels = torch.randint(0, 3, (BATCH,), generator=generator)
    return {"input_ids": _tokens(generator).masked_fill(mask == 0, 0), "attention_mask": mask, "labels": labels}


def translated_padded(generator: torch.Generator) -> Batch:
    """A source with padding and a target."""
    mask = _mask()
    source = _tokens(generator).masked_fill(mask == 0, 0)
    return {"input_ids": source, "attention_mask": mask, "labels": _tokens(generator, 6)}


def image(generator: torch.Generator) -> Batch:
    """A class per image."""
    pixels = torch.randn(BATCH, 3, 32, 32, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(0, 3, (BATCH,), generator=generator)}


def image_and_text(generator: torch.Generator) -> Batch:
    """Pairs to be matched; texts of different length, each with its end token."""
    mask = _mask()
    tokens = _tokens(generator).masked_fill(mask == 0, 0)
    tokens[torch.arange(BATCH), mask.sum(-1) - 1] = 2
    pixels = torch.randn(BATCH, 3, 32, 32, generator=generator)
    return {"input_ids": tokens, "attention_mask": mask, "pixel_values": pixels, "return_loss": True}


def spectrogram(generator: torch.Generator) -> Batch:
    """Sound as Whisper takes it, and its transcript."""
    return {"input_features": torch.randn(BATCH, 8, 40, generator=generator), "labels": _tokens(generator, 6)}


def waveform_class(generator: torch.Generator) -> Batch:
    """A class per sound."""
    labels = torch.randint(0, 3, (BATCH,), generator=generator)
    return {"input_values": torch.randn(BATCH, 200, generator=generator), "labels": labels}


def waveform_text(generator: torch.Generator) -> Batch:
    """Sound and its transcript, as CTC takes them."""
    return {"input_values": torch.randn(BATCH, 200, generator=generator), "labels": _tokens(generator, 4)}


# ---- architectures ---------------------------------------------------------------------------------------

_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_MLP = {"intermediate_size": 48}
_GROUPED = {"num_key_value_heads": 2}
_NO_HIDDEN_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@dataclass(frozen=True)
class Architecture:
    """How to build one row of the table.

    Attributes:
        name: of the row.
        model, config: names of classes in transformers.
        options: of the config.
        batch: makes a batch.
        parts: options whose value is itself a config: option -> (class, options).
    """

    name: str
    model: str
    config: str
    options: dict[str, Any]
    batch: Callable[[torch.Generator], Batch]
    parts: tuple[tuple[str, str, dict[str, Any]], ...] = ()

    def load_classes(self) -> None:
        """Imports the model's code; the parent does so before it forks."""
        for name in (self.model, self.config, *(part[1] for part in self.parts)):
            importlib.import_module(getattr(transformers, name).__module__)

    def build(self, seed: int = 0) -> transformers.PreTrainedModel:
        """A model with random weights."""
        torch.manual_seed(seed)
        parts = {option: getattr(transformers, name)(**values) for option, name, values in self.parts}
        config = getattr(transformers, self.config)(**self.options, **parts)
        return getattr(transformers, self.model)(config)

    def batches(self, count: int, seed: int = 0) -> list[Batch]:
        """Random batches of one shape."""
        generator = torch.Generator().manual_seed(seed)
        return [self.batch(generator) for _ in range(count)]


def _text(name: str, stem: str, batch: Callable[[torch.Generator], Batch], **options: Any) -> Architecture:
    """A decoder whose classes are named after it."""
    return Architecture(name, f"{stem}ForCausalLM", f"{stem}Config", {**_TEXT, **options}, batch)


_BERT_LIKE = {**_TEXT, **_MLP, **_NO_HIDDEN_DROPOUT}
_IMAGE = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_labels": 3,
    **_MLP,
    **_NO_HIDDEN_DROPOUT,
}
_EXPERTS = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
_SEQ2SEQ = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "decoder_start_token_id": 2,
}
_WAVE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "conv_dim": (16, 16),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "feat_proj_dropout": 0.0,
    "final_dropout": 0.0,
    "layerdrop": 0.0,
    "apply_spec_augment": False,
    "classifier_proj_size": 16,
    "num_labels": 3,
}
_CLIP_PART = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}

ARCHITECTURES: tuple[Architecture, ...] = (
    Architecture(
        "GPT-2",
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "vocab_size": VOCABULARY,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        causal,
    ),
    _text("Llama (padded)", "Llama", causal_padded, **_MLP, **_GROUPED),
    _text("Mistral (sliding window)", "Mistral", causal, sliding_window=4, **_MLP, **_GROUPED),
    _text("Qwen2", "Qwen2", causal, **_MLP, **_GROUPED),
    _text("Qwen3 (padded)", "Qwen3", causal_padded, head_dim=8, **_MLP, **_GROUPED),
    _text("Gemma", "Gemma", causal, head_dim=8, **_MLP, **_GROUPED),
    _text("Gemma 2 (padded)", "Gemma2", causal_padded, head_dim=8, sliding_window=4, **_MLP, **_GROUPED),
    Architecture(
        "Gemma 3",
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**_TEXT, **_MLP, **_GROUPED, "head_dim": 8, "sliding_window": 4},
        causal,
    ),
    _text("GPT-NeoX", "GPTNeoX", causal, hidden_dropout=0.0, attention_dropout=0.0, **_MLP),
    _text("OPT (padded)", "OPT", causal_padded, ffn_dim=48, word_embed_proj_dim=32, dropout=0.0),
    _text("Phi", "Phi", causal, **_MLP),
    _text("Phi-3 (padded)", "Phi3", causal_padded, **_MLP, **_GROUPED),
    _text("OLMo 2", "Olmo2", causal, **_MLP, **_GROUPED),
    _text("StarCoder2", "Starcoder2", causal, residual_dropout=0.0, embedding_dropout=0.0, **_MLP, **_GROUPED),
    _text("Mixtral", "Mixtral", causal, num_local_experts=4, output_router_logits=True, **_MLP, **_GROUPED),
    _text(
        "Qwen2-MoE (padded)",
        "Qwen2Moe",
        causal_padded,
        shared_expert_intermediate_size=24,
        output_router_logits=True,
        **_EXPERTS,
        **_MLP,
        **_GROUPED,
    ),
    _text("OLMoE", "Olmoe", causal, num_experts=4, num_experts_per_tok=2, **_MLP, **_GROUPED),
    Architecture(
        "Mamba",
        "MambaForCausalLM",
        "MambaConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4, "pad_token_id": 0},
        causal,
    ),
    _text("Falcon (padded)", "Falcon", causal_padded, hidden_dropout=0.0, attention_dropout=0.0),
    Architecture(
        "Bloom (padded)",
        "BloomForCausalLM",
        "BloomConfig",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "n_layer": 2,
            "n_head": 4,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
        },
        causal_padded,
    ),
    Architecture("BERT (padded)", "BertForMaskedLM", "BertConfig", _BERT_LIKE, masked_padded),
    Architecture("RoBERTa (padded)", "RobertaForMaskedLM", "RobertaConfig", _BERT_LIKE, masked_padded),
    Architecture(
        "DeBERTa-v2 (padded)",
        "DebertaV2ForMaskedLM",
        "DebertaV2Config",
        {**_BERT_LIKE, "relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"]},
        masked_padded,
    ),
    Architecture(
        "DistilBERT (padded)",
        "DistilBertForSequenceClassification",
        "DistilBertConfig",
        {
            "vocab_size": VOCABULARY,
            "dim": 32,
            "n_layers": 2,
            "n_heads": 4,
            "hidden_dim": 48,
            "max_position_embeddings": 64,
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "seq_classif_dropout": 0.0,
            "num_labels": 3,
            "pad_token_id": 0,
        },
        classified_padded,
    ),
    Architecture("ALBERT", "AlbertForMaskedLM", "AlbertConfig", {**_BERT_LIKE, "embedding_size": 16}, masked),
    Architecture(
        "ELECTRA (padded)",
        "ElectraForSequenceClassification",
        "ElectraConfig",
        {**_BERT_LIKE, "embedding_size": 16, "num_labels": 3},
        classified_padded,
    ),
    Architecture("ModernBERT (padded)", "ModernBertForMaskedLM", "ModernBertConfig", {**_TEXT, **_MLP}, masked_padded),
    Architecture(
        "T5 (padded)",
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "dropout_rate": 0.0,
            "pad_token_id": 0,
            "eos_token_id": 2,
            "decoder_start_token_id": 0,
        },
        translated_padded,
    ),
    Architecture(
        "BART (padded)",
        "BartForConditionalGeneration",
        "BartConfig",
        {**_SEQ2SEQ, "max_position_embeddings": 64},
        translated_padded,
    ),
    Architecture("ViT", "ViTForImageClassification", "ViTConfig", _IMAGE, image),
    Architecture("DeiT", "DeiTForImageClassification", "DeiTConfig", _IMAGE, image),
    Architecture(
        "BEiT",
        "BeitForImageClassification",
        "BeitConfig",
        {**_IMAGE, "drop_path_rate": 0.0},
        image,
    ),
    Architecture(
        "ResNet",
        "ResNetForImageClassification",
        "ResNetConfig",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic", "num_labels": 3},
        image,
    ),
    Architecture(
        "ConvNeXt",
        "ConvNextForImageClassification",
        "ConvNextConfig",
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "drop_path_rate": 0.0, "num_labels": 3},
        image,
    ),
    Architecture(
        "Swin",
        "SwinForImageClassification",
        "SwinConfig",
        {
            "image_size": 32,
            "patch_size": 4,
            "embed_dim": 16,
            "depths": [1, 1],
            "num_heads": [2, 4],
            "window_size": 4,
            "drop_path_rate": 0.0,
            "num_labels": 3,
            **_NO_HIDDEN_DROPOUT,
        },
        image,
    ),
    Architecture(
        "CLIP",
        "CLIPModel",
        "CLIPConfig",
        {"projection_dim": 16},
        image_and_text,
        parts=(
            (
                "text_config",
                "CLIPTextConfig",
                {**_CLIP_PART, **_TEXT, "projection_dim": 16},
            ),
            (
                "vision_config",
                "CLIPVisionConfig",
                {**_CLIP_PART, "image_size": 32, "patch_size": 8, "projection_dim": 16},
            ),
        ),
    ),
    Architecture(
        "Whisper",
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {**_SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 16},
        spectrogram,
    ),
    Architecture(
        "Wav2Vec2 (classification)", "Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", _WAVE, waveform_class
    ),
    Architecture("Wav2Vec2 (CTC)", "Wav2Vec2ForCTC", "Wav2Vec2Config", _WAVE, waveform_text),
)


def named(names: str) -> list[Architecture]:
    """The architectures of these names, or whose name contains the word (comma separated); all if empty.

    Raises:
        ValueError: a word matches none; the message lists what there is.
    """
    if not names:
        return list(ARCHITECTURES)
    chosen: list[Architecture] = []
    for word in (part.strip().lower() for part in names.split(",")):
        found = [a for a in ARCHITECTURES if word == a.name.lower()]
        found = found or [a for a in ARCHITECTURES if word in a.name.lower()]
        if not found:
            raise ValueError(
                f"no architecture is called {word!r}; there are {', '.join(a.name for a in ARCHITECTURES)}"
            )
        chosen.extend(a for a in found if a not in chosen)
    return chosen
