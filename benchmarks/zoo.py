"""Tiny models of transformers' architectures, and random batches for them. Built on the CPU, in a child."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from benchmarks import report

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

_TOKENS: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2}
_PADDED = {"pad_token_id": 0}
_SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_TEXT: dict[str, Any] = {**_TOKENS, **_PADDED, **_SIZES, "max_position_embeddings": 64}
_MLP = {"intermediate_size": 48}
_GROUPED = {"num_key_value_heads": 2}
_NO_HIDDEN_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_GPT2_DROPOUT = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
_DISTILBERT_DROPOUT = ("dropout", "attention_dropout", "seq_classif_dropout")


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


def _of(
    name: str, stem: str, head: str, batch: Callable[[torch.Generator], Batch], *bases: dict[str, Any], **options: Any
) -> Architecture:
    """An architecture whose classes are named after it, with the options of the bases and its own."""
    together = {key: value for base in (*bases, options) for key, value in base.items()}
    return Architecture(name, f"{stem}{head}", f"{stem}Config", together, batch)


def _text(name: str, stem: str, batch: Callable[[torch.Generator], Batch], **options: Any) -> Architecture:
    """A decoder."""
    return _of(name, stem, "ForCausalLM", batch, _TEXT, **options)


_BERT_LIKE = {**_TEXT, **_MLP, **_NO_HIDDEN_DROPOUT}
_CLASSES = {"num_labels": 3}
_IMAGE = {**_SIZES, **_MLP, **_NO_HIDDEN_DROPOUT, **_CLASSES, "image_size": 32, "patch_size": 8}
_STAGES = {"hidden_sizes": [8, 16], "depths": [1, 1], **_CLASSES}
_EXPERTS = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
_NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **dict.fromkeys(_GPT2_DROPOUT, 0.0)}
_DISTILBERT = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, **dict.fromkeys(_DISTILBERT_DROPOUT, 0.0)}
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
_LAYERS = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
_WIDTHS = {"d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "dropout": 0.0, "decoder_start_token_id": 2}
_SEQ2SEQ = {**_TOKENS, **_PADDED, **_LAYERS, **_WIDTHS}
_CONVOLUTIONS = {"conv_dim": (16, 16), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_feat_extract_layers": 2}
_POSITIONS = {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4, "classifier_proj_size": 16}
_WAVE = {
    **{"vocab_size": VOCABULARY, "apply_spec_augment": False},
    **{**_SIZES, **_MLP, **_CONVOLUTIONS, **_POSITIONS, **_NO_DROPOUT, **_CLASSES},
    **dict.fromkeys(("activation_dropout", "feat_proj_dropout", "final_dropout", "layerdrop"), 0.0),
}
_SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4}
_CLIP_PART = {**_SIZES, **_MLP, "projection_dim": 16}

ARCHITECTURES: tuple[Architecture, ...] = (
    _of("GPT-2", "GPT2", "LMHeadModel", causal, _TOKENS, _GPT2),
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
    _text("GPT-NeoX", "GPTNeoX", causal, **_NO_DROPOUT, **_MLP),
    _text("OPT (padded)", "OPT", causal_padded, ffn_dim=48, word_embed_proj_dim=32, dropout=0.0),
    _text("Phi", "Phi", causal, **_MLP),
    _text("Phi-3 (padded)", "Phi3", causal_padded, **_MLP, **_GROUPED),
    _text("OLMo 2", "Olmo2", causal, **_MLP, **_GROUPED),
    _text("StarCoder2", "Starcoder2", causal, residual_dropout=0.0, embedding_dropout=0.0, **_MLP, **_GROUPED),
    _text("Mixtral", "Mixtral", causal, num_local_experts=4, output_router_logits=True, **_MLP, **_GROUPED),
    _text(
        *("Qwen2-MoE (padded)", "Qwen2Moe", causal_padded),
        **{"shared_expert_intermediate_size": 24, "output_router_logits": True, **_EXPERTS, **_MLP, **_GROUPED},
    ),
    _text("OLMoE", "Olmoe", causal, num_experts=4, num_experts_per_tok=2, **_MLP, **_GROUPED),
    Architecture(
        "Mamba",
        "MambaForCausalLM",
        "MambaConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4, "pad_token_id": 0},
        causal,
    ),
    _text("Falcon (padded)", "Falcon", causal_padded, **_NO_DROPOUT),
    _of(
        *("Bloom (padded)", "Bloom", "ForCausalLM", causal_padded),
        *(_NO_DROPOUT, {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    ),
    _of("BERT (padded)", "Bert", "ForMaskedLM", masked_padded, _BERT_LIKE),
    _of("RoBERTa (padded)", "Roberta", "ForMaskedLM", masked_padded, _BERT_LIKE),
    _of(
        *("DeBERTa-v2 (padded)", "DebertaV2", "ForMaskedLM", masked_padded, _BERT_LIKE),
        **{"relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"]},
    ),
    _of(
        *("DistilBERT (padded)", "DistilBert", "ForSequenceClassification", classified_padded),
        *(_DISTILBERT, _CLASSES, {"vocab_size": VOCABULARY, "max_position_embeddings": 64, "pad_token_id": 0}),
    ),
    _of("ALBERT", "Albert", "ForMaskedLM", masked, _BERT_LIKE, embedding_size=16),
    _of(
        *("ELECTRA (padded)", "Electra", "ForSequenceClassification", classified_padded),
        *(_BERT_LIKE, _CLASSES, {"embedding_size": 16}),
    ),
    _of("ModernBERT (padded)", "ModernBert", "ForMaskedLM", masked_padded, _TEXT, _MLP),
    _of(
        *("T5 (padded)", "T5", "ForConditionalGeneration", translated_padded, _T5),
        **{"vocab_size": VOCABULARY, "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0},
    ),
    _of(
        *("BART (padded)", "Bart", "ForConditionalGeneration", translated_padded, _SEQ2SEQ),
        max_position_embeddings=64,
    ),
    _of("ViT", "ViT", "ForImageClassification", image, _IMAGE),
    _of("DeiT", "DeiT", "ForImageClassification", image, _IMAGE),
    _of("BEiT", "Beit", "ForImageClassification", image, _IMAGE, drop_path_rate=0.0),
    _of("ResNet", "ResNet", "ForImageClassification", image, _STAGES, embedding_size=8, layer_type="basic"),
    _of("ConvNeXt", "ConvNext", "ForImageClassification", image, _STAGES, num_stages=2, drop_path_rate=0.0),
    _of(
        *("Swin", "Swin", "ForImageClassification", image, _SWIN, _NO_HIDDEN_DROPOUT, _CLASSES),
        drop_path_rate=0.0,
    ),
    Architecture(
        "CLIP",
        "CLIPModel",
        "CLIPConfig",
        {"projection_dim": 16},
        image_and_text,
        parts=(
            ("text_config", "CLIPTextConfig", {**_CLIP_PART, **_TEXT}),
            ("vision_config", "CLIPVisionConfig", {**_CLIP_PART, "image_size": 32, "patch_size": 8}),
        ),
    ),
    _of(
        *("Whisper", "Whisper", "ForConditionalGeneration", spectrogram, _SEQ2SEQ),
        **{"num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 16},
    ),
    _of("Wav2Vec2 (classification)", "Wav2Vec2", "ForSequenceClassification", waveform_class, _WAVE),
    _of("Wav2Vec2 (CTC)", "Wav2Vec2", "ForCTC", waveform_text, _WAVE),
)


def named(names: str) -> list[Architecture]:
    """The architectures of these names, or whose name contains the word (comma separated); all if empty.

    Raises:
        ValueError: a word matches none; the message lists what there is.
    """
    return report.matching(names, ARCHITECTURES, lambda architecture: architecture.name, "architecture")
