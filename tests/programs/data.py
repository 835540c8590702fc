"""Data without downloads: the standard library's own text, scikit-learn's digits, and synthetic sounds."""

from __future__ import annotations

import math
import textwrap
from typing import Any

import torch
from datasets import Dataset
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset
from transformers import ByT5Tokenizer

# Bytes and the special tokens of ByT5Tokenizer.
VOCABULARY, LENGTH = 384, 24
_WORDS = ("def", "class", "return", "import")


def lines(number: int, *, skip: int = 0) -> list[str]:
    """Lines of the standard library's text wrapping module."""
    with open(textwrap.__file__, encoding="utf-8") as source:
        found = [line.strip() for line in source if len(line.strip()) > 12]
    return [found[(skip + index) % len(found)] for index in range(number)]


def tokenized(texts: list[str], length: int = LENGTH) -> dict[str, Any]:
    """Padded to one length."""
    return ByT5Tokenizer(extra_ids=125)(texts, padding="max_length", truncation=True, max_length=length)


def language(number: int, *, skip: int = 0) -> Dataset:
    """Text that predicts itself."""
    return Dataset.from_dict(dict(tokenized(lines(number, skip=skip))))


def classified(number: int, *, skip: int = 0) -> Dataset:
    """Lines by the keyword that they hold, which is 0 for the first and 4 for none."""
    texts = lines(number, skip=skip)
    labels = [next((i for i, word in enumerate(_WORDS) if word in text), len(_WORDS)) for text in texts]
    return Dataset.from_dict({**tokenized(texts), "label": labels})


def tagged(number: int) -> Dataset:
    """Whether each byte is a letter, a digit or something else; padding is left out of the loss."""
    columns = tokenized(lines(number))
    columns["labels"] = [[_tag(token) for token in row] for row in columns["input_ids"]]
    return Dataset.from_dict(dict(columns))


def _tag(token: int) -> int:
    if token < 3:
        return -100
    character = chr(token - 3)
    return 0 if character.isalpha() else 1 if character.isdigit() else 2


def answered(number: int) -> Dataset:
    """Where the first word of a line ends and the second begins."""
    texts = lines(number)
    starts = [min(text.find(" ") + 1, LENGTH - 2) for text in texts]
    return Dataset.from_dict(
        {**tokenized(texts), "start_positions": starts, "end_positions": [start + 1 for start in starts]}
    )


def chosen(number: int, choices: int = 2) -> Dataset:
    """Which of several lines is the right one: the first of them in the alphabet."""
    columns: dict[str, Any] = {"input_ids": [], "attention_mask": [], "labels": []}
    for index in range(number):
        texts = lines(choices, skip=choices * index)
        for name, values in tokenized(texts).items():
            columns[name].append(values)
        columns["labels"].append(min(range(choices), key=texts.__getitem__))
    return Dataset.from_dict(columns)


def reversed_words(number: int, *, skip: int = 0) -> Dataset:
    """Lines, and the same in the other direction to be written; padding of the target is left out of the loss."""
    texts = lines(number, skip=skip)
    columns = tokenized(texts)
    targets = tokenized([text[::-1] for text in texts], 16)["input_ids"]
    columns["labels"] = [[token if token else -100 for token in row] for row in targets]
    return Dataset.from_dict(dict(columns))


def images(number: int, *, skip: int = 0, channels: int = 1) -> list[dict[str, Any]]:
    """Digits of 8 x 8 pixels as image models of transformers take them."""
    pixels, labels = load_digits(return_X_y=True)
    return [
        {
            "pixel_values": torch.tensor(pixels[i], dtype=torch.float32).reshape(1, 8, 8).repeat(channels, 1, 1) / 16,
            "labels": int(labels[i]),
        }
        for i in range(skip, skip + number)
    ]


def digits(number: int, *, skip: int = 0, flat: bool = False) -> TensorDataset:
    """Digits of 8 x 8 pixels, and which they are."""
    pixels, labels = load_digits(return_X_y=True)
    chosen_pixels = torch.tensor(pixels[skip : skip + number], dtype=torch.float32) / 16
    shape = (number, 64) if flat else (number, 1, 8, 8)
    return TensorDataset(chosen_pixels.reshape(shape), torch.tensor(labels[skip : skip + number]))


def tone(pitch: int, samples: int) -> torch.Tensor:
    """A sine wave."""
    return torch.sin(2 * math.pi * (pitch + 1) * torch.arange(samples) / 32)


def sounds(number: int, samples: int, classes: int = 3) -> list[dict[str, Any]]:
    """Tones, and which they are."""
    return [{"input_values": tone(i % classes, samples), "labels": i % classes} for i in range(number)]
