"""The GPT-2 that runs are compared on, by depth and width."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import transformers

from benchmarks import zoo
from benchmarks.training import token_batches

DROPOUT = 0.1


@dataclass(frozen=True)
class Size:
    """A GPT-2, and its batches."""

    layers: int
    width: int
    length: int = 64
    batch: int = 8
    vocabulary: int = 256
    heads: int = 2
    dropout: float = DROPOUT

    def __str__(self) -> str:
        return f"{self.layers}x{self.width}"

    def model(self) -> transformers.PreTrainedModel:
        """With random weights, the same at each call."""
        torch.manual_seed(0)
        config = transformers.GPT2Config(
            vocab_size=self.vocabulary,
            n_positions=self.length,
            n_embd=self.width,
            n_layer=self.layers,
            n_head=self.heads,
            resid_pdrop=self.dropout,
            embd_pdrop=self.dropout,
            attn_pdrop=self.dropout,
            bos_token_id=0,
            eos_token_id=0,
        )
        return transformers.GPT2LMHeadModel(config)

    def batches(self, number: int) -> list[zoo.Batch]:
        """Random tokens that predict themselves."""
        return token_batches(number, (self.batch, self.length), self.vocabulary)


def sizes(text: str, **options: int) -> list[Size]:
    """`"2x128,12x32"`: layers and width of each.

    Raises:
        ValueError: it is written otherwise.
    """
    made = []
    for item in text.split(","):
        layers, times, width = item.strip().partition("x")
        if not (times and layers.isdigit() and width.isdigit()):
            raise ValueError(f"{item!r} is not LAYERSxWIDTH, as in 12x32")
        made.append(Size(int(layers), int(width), **options))
    return made
