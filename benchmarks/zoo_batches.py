"""Random batches for the models of `benchmarks.zoo`: one function for each kind of task."""

from __future__ import annotations

from typing import Any

import torch

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
