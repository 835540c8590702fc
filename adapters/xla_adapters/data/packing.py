"""Rows of whole documents for causal language models: one length, little padding, and no document sees another.

`PackedDataset` puts documents together by best fit, longest first. A row numbers the positions of each document from
0, by which transformers' models keep them apart (`find_packed_sequence_indices` of `transformers.masking_utils`); its
first token has no label, since no token of the document predicts it.
"""

from __future__ import annotations

import bisect
import re
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

from xla_adapters.data.shapes import lengths_of
from xla_adapters.errors import ConfigError

# Families of transformers (folders of `transformers.models`) whose causal language models keep the documents of a row
# apart: tests/data/test_packing.py compares each. Others ignore positions, or have states that go on from document to
# document.
KEEPING_DOCUMENTS_APART = frozenset(
    """codegen cohere cohere2 gemma gemma2 gemma3 glm glm4 gpt2 gpt_neo gpt_neox gptj granite llama mistral mixtral
    nemotron olmo olmo2 phi phi3 qwen2 qwen2_moe qwen3 smollm3 stablelm starcoder2""".split()  # noqa: SIM905 (a list has a line for each)
)
_IDS, _MASK, _LABELS, _IGNORED = "input_ids", "attention_mask", "labels", -100


def best_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Puts documents into rows: each, the longest first, into the fullest row that has room for it.

    Args:
        lengths: of each document, at most `room`. Empty documents are left out.
        room: of a row.

    Returns:
        For each row the numbers of its documents.
    """
    rows: list[list[int]] = []
    # Rows by the room that is left in them, and these numbers in order.
    with_room: dict[int, list[int]] = {}
    rooms: list[int] = []
    for number in sorted((index for index, size in enumerate(lengths) if size), key=lambda index: -lengths[index]):
        size = lengths[number]
        place = bisect.bisect_left(rooms, size)
        if place == len(rooms):
            row, left = len(rows), room
            rows.append([])
        else:
            left = rooms[place]
            row = with_room[left].pop()
            if not with_room[left]:
                del with_room[left], rooms[place]
        rows[row].append(number)
        left -= size
        if left:
            if left not in with_room:
                bisect.insort(rooms, left)
            with_room.setdefault(left, []).append(row)
    return rows


class PackedDataset(Dataset[dict[str, torch.Tensor]]):
    """A dataset whose rows are documents of another one, put together by best fit. Each document is in one row; those
    of less than two tokens, in which nothing is predicted, are in none.

    A row has `input_ids`, `position_ids` and `labels`, each of `length` int64 numbers. What is padding at its end has
    no labels. In a loop of your own ask `why_documents_mix(model)` first, and call the model with
    `model(**batch, use_cache=False)` and no attention mask: with a mask, or a cache (the default of most configs),
    models of transformers do not look for documents.

    Args:
        dataset: of documents that are tokenized: mappings with `input_ids`, and `labels` if these are others.
        length: of a row, in tokens.
        collator: makes a batch of a list of one document, with `input_ids`, and maybe `labels` and an
            `attention_mask` of what is no padding. None takes the document as it is.
        pad_id: the id of padding; any will do, since nothing sees it.

    Attributes:
        rows: for each row the numbers of its documents.
        tokens: in all rows, without padding.
        arranged_by: what the rows depend on, for checkpoints.

    Raises:
        ConfigError: it is a stream, a document is longer than a row, or the documents have no lengths.
    """

    def __init__(
        self,
        dataset: Any,
        length: int,
        *,
        collator: Callable[[list[Any]], Any] | None = None,
        pad_id: int = 0,
    ) -> None:
        self._dataset, self._length, self._collator, self._pad_id = dataset, length, collator, pad_id
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise ConfigError(
                "packing: a stream has no lengths by which documents could be put together: give a dataset that has a "
                "length (datasets.Dataset.from_generator makes one), or pack the stream before"
            )
        lengths, _ = lengths_of(dataset, _IDS) or (None, None)
        if lengths is None:
            raise ConfigError(f"packing: documents must be mappings with {_IDS!r} of one dimension")
        longest = max(lengths, default=0)
        if longest > length:
            raise ConfigError(
                f"packing={length}: {sum(size > length for size in lengths)} of {len(lengths)} documents are longer, "
                f"the longest, number {lengths.index(longest)}, has {longest} tokens. Cut or split them, or take "
                f"packing={longest}"
            )
        # Nothing is predicted in a document of one token.
        self.rows = best_fit([size if size > 1 else 0 for size in lengths], length)
        self.tokens = sum(lengths[number] for row in self.rows for number in row)
        self.arranged_by = (length, zlib.crc32(repr(self.rows).encode()))

    def __str__(self) -> str:
        documents, tokens = sum(map(len, self.rows)), len(self.rows) * self._length
        waste = 1 - self.tokens / max(1, tokens)
        return (
            f"{documents} documents in {len(self.rows)} rows of {self._length} tokens, of which {waste:.1%} is padding"
        )

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        documents = [self._document(number) for number in self.rows[index]]
        ids, labels = (torch.cat(parts) for parts in zip(*documents, strict=True))
        positions = torch.cat([torch.arange(len(document)) for document, _ in documents])
        missing = self._length - len(ids)
        if missing < 0:
            raise ConfigError(
                f"packing: the collator made the documents {self.rows[index]} {-missing} tokens longer than a row of "
                f"{self._length}; make them as long before, or take a larger packing="
            )
        filled = {_IDS: (ids, self._pad_id), "position_ids": (positions, 0), _LABELS: (labels, _IGNORED)}
        return {name: torch.cat([part, part.new_full((missing,), fill)]) for name, (part, fill) in filled.items()}

    def _document(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The ids and labels of a document."""
        sample = self._dataset[number]
        batch = sample if self._collator is None else self._collator([sample])
        values = {name: value for name, value in batch.items() if value is not None}
        unknown = sorted(set(values) - {_IDS, _MASK, _LABELS})
        if unknown:
            raise ConfigError(
                f"packing: document {number} has {', '.join(unknown)}, too. Only {_IDS}, {_MASK} and {_LABELS} can be "
                "put together: leave out the others"
            )
        parts = {name: torch.as_tensor(value, dtype=torch.int64) for name, value in values.items()}
        several = [name for name, part in parts.items() if not part.ndim or part.numel() != part.shape[-1]]
        if several:
            raise ConfigError(
                f"packing: the collator made {', '.join(several)} of the shape {tuple(parts[several[0]].shape)} of "
                f"document {number}: it must be one row"
            )
        parts = {name: part.flatten() for name, part in parts.items()}
        ids = parts[_IDS]
        labels = parts.get(_LABELS, ids).clone()
        mask = parts.get(_MASK, torch.ones_like(ids)) != 0
        if labels.shape != ids.shape or mask.shape != ids.shape:
            raise ConfigError(
                f"packing: the labels or the attention mask of document {number} have another length than its "
                f"{len(ids)} tokens"
            )
        seen = mask.nonzero().flatten()
        if len(seen) and int(seen[-1] - seen[0]) + 1 != len(seen):
            raise ConfigError(f"packing: the attention mask of document {number} hides tokens in its middle")
        ids, labels = ids[mask], labels[mask]
        labels[:1] = _IGNORED
        return ids, labels


def why_documents_mix(module: torch.nn.Module) -> str:
    """Why the documents of a row may see each other in models of transformers, in words; empty if they do not.

    Args:
        module: has models of transformers, or is one. What else it has is the user's.
    """
    for part in module.modules():
        path = type(part).__module__.split(".")
        if path[:2] == ["transformers", "models"] and path[2] not in KEEPING_DOCUMENTS_APART:
            return f"models of the family {path[2]!r} do not keep the documents of a row apart, or were not compared"
        config = getattr(part, "config", None)
        if getattr(config, "output_router_logits", False):
            return "its loss on the router (output_router_logits) sees padding"
        if re.search("'rope_type': '(dynamic|longrope)'", str(getattr(config, "rope_parameters", ""))):
            return "its rotary positions (dynamic, longrope) depend on the longest document of a batch"
        attention = getattr(config, "_attn_implementation", None)
        if attention not in (None, "eager", "sdpa") or getattr(config, "is_causal", True) is False:
            return f"attention other than causal 'eager' or 'sdpa' was not compared (attn_implementation={attention!r})"
    return ""
