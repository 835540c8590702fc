"""Tiny models of transformers' architectures, and random batches for them. Built on the CPU, in a child."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn

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


# ---- models ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """A row of a table; built in a child.

    Attributes:
        name: of the row.
        build: makes the model. Called with a batch as keyword arguments, it returns what has a `loss`.
        batch: makes a batch.
        prepare: called in the parent before it forks, to import what `build` needs.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    prepare: Callable[[], object] = lambda: None

    def seeded(self) -> nn.Module:
        """The model with the same random weights at each call."""
        torch.manual_seed(0)
        return self.build()

    def batches(self, count: int) -> list[Batch]:
        """Random batches of one shape, the same at each call."""
        generator = torch.Generator().manual_seed(0)
        return [self.batch(generator) for _ in range(count)]


def _made(model: str, options: dict[str, Any]) -> nn.Module:
    kind: Any = getattr(transformers, model)
    net: nn.Module = kind(kind.config_class(**options))
    return net


def of_transformers(
    name: str, model: str, batch: Callable[[torch.Generator], Batch], *bases: dict[str, Any], **options: Any
) -> Model:
    """A model of transformers with random weights.

    Args:
        name: of the row.
        model: name of its class.
        batch: makes a batch.
        bases: options of its config.
        options: further ones, instead of those.
    """
    together = {key: value for base in (*bases, options) for key, value in base.items()}
    # transformers imports a class when it is first used.
    return Model(name, partial(_made, model, together), batch, partial(getattr, transformers, model))


TOKENS: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2}
PADDED = {"pad_token_id": 0}
SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
MLP = {"intermediate_size": 48}
GROUPED = {"num_key_value_heads": 2}
NO_HIDDEN_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
NO_ACTIVATION_DROPOUT = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0)
CONVOLUTIONS = {"conv_dim": (16, 16), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_feat_extract_layers": 2}
POSITIONS = {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4}
WAVE_DROPOUT = dict.fromkeys(("activation_dropout", "feat_proj_dropout", "final_dropout", "layerdrop"), 0.0)
LAYERS = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
WIDTHS = {"encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
CLASSES = {"num_labels": 3}
_TEXT = {**TOKENS, **PADDED, **SIZES, "max_position_embeddings": 64}
_DECODER = {**_TEXT, **MLP}
_GPT2_DROPOUT = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
_DISTILBERT_DROPOUT = ("dropout", "attention_dropout", "seq_classif_dropout")
_BERT_LIKE = {**_DECODER, **NO_HIDDEN_DROPOUT}
_IMAGE = {**SIZES, **MLP, **NO_HIDDEN_DROPOUT, **CLASSES, "image_size": 32, "patch_size": 8}
_STAGES = {"hidden_sizes": [8, 16], "depths": [1, 1], **CLASSES}
_EXPERTS = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **dict.fromkeys(_GPT2_DROPOUT, 0.0)}
_DISTILBERT = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, **dict.fromkeys(_DISTILBERT_DROPOUT, 0.0)}
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
_SEQ2SEQ = {**TOKENS, **PADDED, **LAYERS, **WIDTHS, "d_model": 32, "dropout": 0.0, "decoder_start_token_id": 2}
_WAVE = {
    **{"vocab_size": VOCABULARY, "apply_spec_augment": False, "classifier_proj_size": 16},
    **{**SIZES, **MLP, **CONVOLUTIONS, **POSITIONS, **NO_DROPOUT, **CLASSES, **WAVE_DROPOUT},
}
_SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4}
_CLIP_PART = {**SIZES, **MLP, "projection_dim": 16}

ARCHITECTURES: tuple[Model, ...] = (
    of_transformers("GPT-2", "GPT2LMHeadModel", causal, TOKENS, _GPT2),
    of_transformers("Llama (padded)", "LlamaForCausalLM", causal_padded, _DECODER, GROUPED),
    of_transformers("Mistral (sliding window)", "MistralForCausalLM", causal, _DECODER, GROUPED, sliding_window=4),
    of_transformers("Qwen2", "Qwen2ForCausalLM", causal, _DECODER, GROUPED),
    of_transformers("Qwen3 (padded)", "Qwen3ForCausalLM", causal_padded, _DECODER, GROUPED, head_dim=8),
    of_transformers("Gemma", "GemmaForCausalLM", causal, _DECODER, GROUPED, head_dim=8),
    of_transformers(
        *("Gemma 2 (padded)", "Gemma2ForCausalLM", causal_padded, _DECODER, GROUPED), head_dim=8, sliding_window=4
    ),
    of_transformers("Gemma 3", "Gemma3ForCausalLM", causal, _DECODER, GROUPED, head_dim=8, sliding_window=4),
    of_transformers("GPT-NeoX", "GPTNeoXForCausalLM", causal, _DECODER, NO_DROPOUT),
    of_transformers(
        *("OPT (padded)", "OPTForCausalLM", causal_padded, _TEXT), ffn_dim=48, word_embed_proj_dim=32, dropout=0.0
    ),
    of_transformers("Phi", "PhiForCausalLM", causal, _DECODER),
    of_transformers("Phi-3 (padded)", "Phi3ForCausalLM", causal_padded, _DECODER, GROUPED),
    of_transformers("OLMo 2", "Olmo2ForCausalLM", causal, _DECODER, GROUPED),
    of_transformers(
        *("StarCoder2", "Starcoder2ForCausalLM", causal, _DECODER, GROUPED),
        **{"residual_dropout": 0.0, "embedding_dropout": 0.0},
    ),
    of_transformers(
        *("Mixtral", "MixtralForCausalLM", causal, _DECODER, GROUPED), num_local_experts=4, output_router_logits=True
    ),
    of_transformers(
        *("Qwen2-MoE (padded)", "Qwen2MoeForCausalLM", causal_padded, _DECODER, GROUPED, _EXPERTS),
        **{"shared_expert_intermediate_size": 24, "output_router_logits": True},
    ),
    of_transformers("OLMoE", "OlmoeForCausalLM", causal, _DECODER, GROUPED, num_experts=4, num_experts_per_tok=2),
    of_transformers(
        *("Mamba", "MambaForCausalLM", causal, PADDED),
        **{"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4},
    ),
    of_transformers("Falcon (padded)", "FalconForCausalLM", causal_padded, _TEXT, NO_DROPOUT),
    of_transformers(
        *("Bloom (padded)", "BloomForCausalLM", causal_padded, NO_DROPOUT),
        **{"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    ),
    of_transformers("BERT (padded)", "BertForMaskedLM", masked_padded, _BERT_LIKE),
    of_transformers("RoBERTa (padded)", "RobertaForMaskedLM", masked_padded, _BERT_LIKE),
    of_transformers(
        *("DeBERTa-v2 (padded)", "DebertaV2ForMaskedLM", masked_padded, _BERT_LIKE),
        **{"relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"]},
    ),
    of_transformers(
        *("DistilBERT (padded)", "DistilBertForSequenceClassification", classified_padded, PADDED),
        *(_DISTILBERT, CLASSES, {"vocab_size": VOCABULARY, "max_position_embeddings": 64}),
    ),
    of_transformers("ALBERT", "AlbertForMaskedLM", masked, _BERT_LIKE, embedding_size=16),
    of_transformers(
        *("ELECTRA (padded)", "ElectraForSequenceClassification", classified_padded, _BERT_LIKE, CLASSES),
        embedding_size=16,
    ),
    of_transformers("ModernBERT (padded)", "ModernBertForMaskedLM", masked_padded, _DECODER),
    of_transformers(
        *("T5 (padded)", "T5ForConditionalGeneration", translated_padded, _T5, PADDED),
        **{"vocab_size": VOCABULARY, "eos_token_id": 2, "decoder_start_token_id": 0},
    ),
    of_transformers(
        "BART (padded)", "BartForConditionalGeneration", translated_padded, _SEQ2SEQ, max_position_embeddings=64
    ),
    of_transformers("ViT", "ViTForImageClassification", image, _IMAGE),
    of_transformers("DeiT", "DeiTForImageClassification", image, _IMAGE),
    of_transformers("BEiT", "BeitForImageClassification", image, _IMAGE, drop_path_rate=0.0),
    of_transformers("ResNet", "ResNetForImageClassification", image, _STAGES, embedding_size=8, layer_type="basic"),
    of_transformers("ConvNeXt", "ConvNextForImageClassification", image, _STAGES, num_stages=2, drop_path_rate=0.0),
    of_transformers("Swin", "SwinForImageClassification", image, _SWIN, NO_HIDDEN_DROPOUT, CLASSES, drop_path_rate=0.0),
    of_transformers(
        *("CLIP", "CLIPModel", image_and_text),
        projection_dim=16,
        text_config={**_CLIP_PART, **_TEXT},
        vision_config={**_CLIP_PART, "image_size": 32, "patch_size": 8},
    ),
    of_transformers(
        *("Whisper", "WhisperForConditionalGeneration", spectrogram, _SEQ2SEQ),
        **{"num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 16},
    ),
    of_transformers("Wav2Vec2 (classification)", "Wav2Vec2ForSequenceClassification", waveform_class, _WAVE),
    of_transformers("Wav2Vec2 (CTC)", "Wav2Vec2ForCTC", waveform_text, _WAVE),
)


def named(names: str) -> list[Model]:
    """The architectures of these names, or whose name contains the word (comma separated); all if empty.

    Raises:
        ValueError: a word matches none; the message lists what there is.
    """
    return report.matching(names, ARCHITECTURES, lambda architecture: architecture.name, "architecture")
