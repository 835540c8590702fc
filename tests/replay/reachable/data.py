"""Batches of the corpus: the same for the same number."""

from __future__ import annotations

import torch

FEATURES, CLASSES, ROWS = 4, 3, 6


def classified(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Vectors of `FEATURES` numbers with a class each."""
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randn(ROWS, FEATURES, generator=generator)
    return inputs, torch.randint(0, CLASSES, (ROWS,), generator=generator)


def regressed(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Vectors of `FEATURES` numbers with as many targets as there are classes."""
    generator = torch.Generator().manual_seed(100 + number)
    return torch.randn(ROWS, FEATURES, generator=generator), torch.randn(ROWS, CLASSES, generator=generator)


def tokens(number: int, *, length: int = 5, vocabulary: int = 11) -> tuple[torch.Tensor]:
    """Rows of tokens."""
    generator = torch.Generator().manual_seed(200 + number)
    return (torch.randint(0, vocabulary, (ROWS, length), generator=generator),)


def samples(count: int = 64) -> list[dict[str, object]]:
    """For the HF Trainer."""
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(count, FEATURES, generator=generator)
    return [{"x": row, "labels": int(row[:CLASSES].argmax())} for row in vectors]
