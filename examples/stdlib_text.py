"""The source code of Python's standard library as a `datasets` corpus: real text that needs no download."""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

from datasets import Dataset
from transformers import ByT5Tokenizer


def sizes_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser of the options that the examples share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps in all (even)")
    parser.add_argument("--batch", type=int, default=16, help="blocks per step")
    parser.add_argument("--block", type=int, default=128, help="bytes per block")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--characters", type=int, default=1_000_000, help="how much source text to read")
    return parser


def read_sources(limit: int) -> list[str]:
    """The library's modules in alphabetical order, up to `limit` characters in all."""
    texts, size = [], 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        texts.append(path.read_text(encoding="utf-8", errors="ignore"))
        size += len(texts[-1])
        if size >= limit:
            break
    return texts


def byte_blocks(
    tokenizer: ByT5Tokenizer, *, block: int, characters: int, held_out: float = 0.02
) -> tuple[Dataset, Dataset]:
    """Tokenises the sources into blocks of equal length.

    Args:
        tokenizer: one token per byte; needs no download.
        block: tokens per example.
        characters: how much of the library to take.
        held_out: the share of blocks for evaluation.

    Returns:
        training and evaluation sets with `input_ids` and `labels`.
    """

    def to_blocks(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        joined = [token for text in batch["text"] for token in tokenizer(text)["input_ids"]]
        blocks = [joined[start : start + block] for start in range(0, len(joined) - block + 1, block)]
        return {"input_ids": blocks, "labels": blocks}

    texts = Dataset.from_dict({"text": read_sources(characters)})
    blocks = texts.map(to_blocks, batched=True, remove_columns=["text"], desc="bytes to blocks")
    parts = blocks.train_test_split(test_size=held_out, seed=0)
    return parts["train"], parts["test"]
