"""Batches of few shapes: lengths in buckets, batches formed within them, and a last batch as large as the others.

Each shape of a batch is a program to compile. A `ShapePolicy` says how many there may be; `Shapes` is what it gives for
the lengths of some data.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeGuard, cast, get_args

import numpy
import torch

from xla_adapters.config import check_choice
from xla_adapters.data.batches import BucketBatches, BucketSampler
from xla_adapters.errors import ConfigError
from xla_adapters.utils.host_random import host_random_numbers_kept

logger = logging.getLogger("xla_adapters")

LastBatch = Literal["pad", "keep", "drop"]
# Samples of a stream by which its buckets are chosen.
_STREAM_SAMPLES = 1000
# More different lengths are rounded up to a grid of so many steps before buckets are chosen.
_GRID = 4096
# At most, if only a share of padding is given.
_MOST_BUCKETS = 8
# Of the picture of lengths, at most.
_BARS = 40
_IGNORED = -100
# What padding is, by the names of transformers' models and collators.
_FILL: Mapping[str, float] = {
    "attention_mask": 0,
    "token_type_ids": 0,
    "mm_token_type_ids": 0,
    "position_ids": 0,
    "special_tokens_mask": 1,
    "labels": _IGNORED,
    "decoder_attention_mask": 0,
    "input_values": 0.0,
    "input_features": 0.0,
}
_IDS, _MASK, _LABELS = ("input_ids", "decoder_input_ids"), "attention_mask", "labels"
# Names that have the length of the labels where that is another one than that of the inputs.
_OF_LABELS = (_LABELS, "decoder_input_ids", "decoder_attention_mask")
# Families of transformers (folders of `transformers.models`) whose results do not depend on what the attention mask
# masks: tests/data/test_shapes.py compares each (Whisper, whose labels alone are padded, is in the trainer's tests).
# Others have convolutions, pools or windows that see it.
NOT_SEEING_PADDING = frozenset(
    """albert bart bert blenderbot bloom camembert codegen cohere cohere2 deberta deberta_v2 distilbert electra ernie
    eurobert falcon gemma gemma2 gemma3 glm glm4 gpt2 gpt_neo gpt_neox gptj granite layoutlm llama m2m_100 mamba marian
    mbart megatron_bert mistral mixtral modernbert mpnet mpt mt5 nemotron nomic_bert olmo olmo2 opt pegasus phi phi3
    qwen2 qwen2_moe qwen3 roberta smollm3 stablelm starcoder2 t5 umt5 whisper xlm_roberta""".split()  # noqa: SIM905 (a list has a line for each)
)
# Class labels, one for each row: -100 does not count. Positions of answers: those behind the end do not.
_CLASSES, _POSITIONS = (_LABELS,), ("start_positions", "end_positions")


@dataclass(frozen=True, kw_only=True)
class ShapePolicy:
    """How many shapes the batches of a training have.

    Args:
        buckets: how many lengths batches may have, or these lengths. By a number they are chosen so that the least is
            padded. None takes the fewest, at most 8, with which at most the share `max_waste` of all elements is
            padding.
        max_waste: see `buckets`.
        pad_to_multiple_of: lengths are rounded up to a multiple of it.
        last_batch: what happens with a batch of fewer rows at the end of an epoch: `"pad"` adds rows that do not count,
            where it is known that they do not; `"keep"` leaves it, which is a shape more; `"drop"` leaves it out of the
            training.
        length_of: what has a length in samples and batches: a name in a mapping, as `"input_ids"`, `"input_values"`,
            `"input_features"` (frames first), or `"labels"` for inputs of one length whose labels vary. The length is
            the first dimension of a sample, and the second of a batch.
        fill: the value of padding in entries of a batch, by name, where it is not known or not `Shapes.padded`'s. A
            value for `"labels"` promises that a loss of your own leaves out such labels, and what the attention mask
            masks. Without that promise batches of such losses keep their lengths.
        tokens_per_batch: the number of elements, padding included, that a batch of the training may have; shorter
            buckets get more rows, and each at least one (one for each device that divides them). In `hf_trainer`, in
            place of its batch size; elsewhere give your `DataLoader` a `Shapes.batch_sampler`.
        packing: the length, in tokens, of rows into which the documents of a causal language model's training are put
            together (see `PackedDataset`). The other options then are for the evaluation. In `hf_trainer`; elsewhere
            make a `PackedDataset`.

    Raises:
        ConfigError: a value is not valid, or two options contradict each other.
    """

    buckets: int | Sequence[int] | None = None
    max_waste: float = 0.1
    pad_to_multiple_of: int = 1
    last_batch: LastBatch = "pad"
    length_of: str = "input_ids"
    fill: Mapping[str, float] = field(default_factory=dict)
    tokens_per_batch: int | None = None
    packing: int | None = None

    def __post_init__(self) -> None:
        check_choice("last_batch", self.last_batch, get_args(LastBatch))
        if self.buckets is not None:
            counts = [self.buckets] if _is_count(self.buckets) else self.buckets
            if (
                not isinstance(counts, Sequence)
                or isinstance(counts, str)
                or not counts
                or not all(map(_is_count, counts))
            ):
                raise ConfigError(
                    f"buckets={self.buckets!r} is not a valid value; valid values: None, how many lengths there may be "
                    "(an integer >= 1), or a list of lengths"
                )
            if self.max_waste != ShapePolicy.max_waste:
                raise ConfigError(f"buckets={self.buckets!r} and max_waste={self.max_waste!r} both decide: give one")
            if not _is_count(self.buckets):
                # JSON and YAML have lists only.
                object.__setattr__(self, "buckets", tuple(sorted(set(counts))))
        if not _is_count(self.pad_to_multiple_of):
            raise ConfigError(f"pad_to_multiple_of={self.pad_to_multiple_of!r}: give an integer >= 1")
        for name, what in (("packing", "the length of a row"), ("tokens_per_batch", "the size of a batch")):
            number = getattr(self, name)
            if number is not None and not _is_count(number):
                raise ConfigError(f"{name}={number!r}: give {what} in tokens, an integer >= 1")
        if self.packing is not None and self.tokens_per_batch is not None:
            raise ConfigError(
                f"packing={self.packing!r} and tokens_per_batch={self.tokens_per_batch!r} contradict each other: rows "
                "of documents have one length, so give a batch size"
            )
        if not isinstance(self.max_waste, (int, float)) or not 0 <= self.max_waste < 1:
            raise ConfigError(f"max_waste={self.max_waste!r}: give a share of all elements, from 0 to below 1")

    @classmethod
    def resolve(cls, given: ShapePolicy | Mapping[str, Any] | str | None) -> ShapePolicy | None:
        """A policy from what users give: `"auto"`, a policy, its options, or these as JSON; None for none.

        Raises:
            ConfigError: it is something else, or an option is unknown or not valid.
        """
        if given is None or isinstance(given, cls):
            return given
        options: Any = {} if given == "auto" else given
        if isinstance(given, str) and given.lstrip().startswith("{"):
            try:
                options = json.loads(given)
            except json.JSONDecodeError as error:
                raise ConfigError(f"shapes={given!r} is no JSON: {error}") from error
        names = [item.name for item in fields(cls)]
        if not isinstance(options, Mapping):
            raise ConfigError(
                f"shapes={given!r} is not a valid value; valid values: 'auto', a ShapePolicy, or its options: "
                f"{', '.join(names)}"
            )
        unknown = sorted(set(options) - set(names))
        if unknown:
            raise ConfigError(f"shapes: unknown option(s) {', '.join(unknown)}; valid options: {', '.join(names)}")
        return cls(**options)

    def fit(
        self,
        lengths: Sequence[int],
        label_lengths: Sequence[int] | None = None,
        *,
        rows: int = 1,
        limit: int | None = None,
    ) -> Shapes:
        """The shapes for samples of these lengths.

        Args:
            lengths: of each sample.
            label_lengths: of the labels of each sample, if these have a length of their own (summaries, transcripts).
            rows: samples in a batch, if batches are formed within buckets (`BucketSampler`). With `tokens_per_batch`
                the number of samples in a batch is a multiple of it (the number of devices that divide it, say).
            limit: the largest length that the model takes, which rounding up must not exceed.

        Raises:
            ConfigError: there are no lengths, or a sample is longer than the last of the buckets that were given.
        """
        sizes = numpy.asarray(lengths, dtype=numpy.int64)
        if not len(sizes):
            raise ConfigError("there are no samples to choose buckets by")
        rounded = _rounded(sizes, self.pad_to_multiple_of)
        if limit is not None:
            # Longer samples stay as they are: the model says what is wrong with them.
            rounded = numpy.maximum(numpy.minimum(rounded, limit), sizes)
        bounds = self._bounds(rounded, sizes, rows)
        if bounds[-1] < sizes.max():
            raise ConfigError(
                f"buckets={self.buckets!r}: the longest sample has {sizes.max()} elements ({self.length_of!r}); add a "
                "bucket for it, or cut it"
            )
        places = numpy.searchsorted(bounds, sizes)
        rows_of = [rows] * len(bounds)
        if self.tokens_per_batch is not None:
            rows_of = [max(rows, self.tokens_per_batch // max(1, bound) // rows * rows) for bound in bounds]
        in_each = _in_buckets(places, rows_of)
        label_bounds: tuple[int, ...] = ()
        if label_lengths is not None:
            labels = numpy.asarray(label_lengths, dtype=numpy.int64)
            longest = [max(labels[places == place], default=0) for place in range(len(bounds))]
            # Samples of shorter buckets fill up batches of longer ones.
            label_bounds = tuple(int(bound) for bound in numpy.maximum.accumulate(longest))
        return Shapes(
            policy=self,
            bounds=tuple(int(bound) for bound in bounds),
            label_bounds=label_bounds,
            waste=1 - float(sizes.sum()) / max(1, int((in_each * numpy.asarray(bounds)).sum())),
            waste_of_one=1 - float(sizes.mean() / max(1, sizes.max())),
            padded_samples=tuple(in_each.tolist()),
            rows_of=tuple(rows_of),
            lengths=sizes,
        )

    def _bounds(self, lengths: Any, sizes: Any, rows: int) -> list[int]:
        if isinstance(self.buckets, tuple):
            return [int(bound) for bound in _rounded(numpy.asarray(self.buckets), self.pad_to_multiple_of)]
        if self.buckets is not None:
            return optimal_bounds(lengths, cast(int, self.buckets), rows, self.pad_to_multiple_of)
        found: list[int] = []
        for number in range(1, _MOST_BUCKETS + 1):
            found = optimal_bounds(lengths, number, rows, self.pad_to_multiple_of)
            in_each = _in_buckets(numpy.searchsorted(found, lengths), [rows] * len(found))
            if sizes.sum() >= (1 - self.max_waste) * (in_each * numpy.asarray(found)).sum():
                break
        return found


def optimal_bounds(lengths: Any, number: int, rows: int = 1, multiple: int = 1) -> list[int]:
    """The bounds of buckets with which the least is padded, by dynamic programming; ascending.

    Args:
        lengths: of the samples.
        number: of buckets, at most.
        rows: samples in a batch: see `BucketSampler`.
        multiple: of which all lengths are multiples.
    """
    sizes, counts = numpy.unique(numpy.asarray(lengths, dtype=numpy.int64), return_counts=True)
    if len(sizes) > _GRID:
        step = int(_rounded(-(-int(sizes[-1]) // _GRID), multiple))
        # No sample of the grid's last step is longer than the longest.
        sizes, counts = numpy.unique(
            numpy.repeat(numpy.minimum(_rounded(sizes, step), sizes[-1]), counts), return_counts=True
        )
    number = min(number, len(sizes))
    # Of samples in buckets below each size.
    before = int(counts.sum()) - _in_batches(numpy.append(numpy.cumsum(counts[::-1])[::-1], 0), rows)
    # Of the samples up to each size: the least number of elements after padding, and where their last bucket begins.
    best = before[1:] * sizes
    begins = []
    for _ in range(number - 1):
        begin = numpy.zeros(len(sizes), dtype=numpy.int64)
        least = best.copy()
        for last in range(1, len(sizes)):
            costs = best[:last] + (before[last + 1] - before[1 : last + 1]) * sizes[last]
            place = int(costs.argmin())
            if costs[place] < least[last]:
                least[last], begin[last] = costs[place], place + 1
        begins.append(begin)
        best = least
    found, last = [], len(sizes) - 1
    for begin in reversed(begins):
        if begin[last]:
            found.append(int(sizes[last]))
            last = int(begin[last]) - 1
    return [int(sizes[last]), *found[::-1]]


def _in_batches(longest: Any, rows: int) -> Any:
    """How many samples the batches have that contain so many of the longest ones: whole batches, at most all."""
    return numpy.minimum(_rounded(longest, rows), longest[0])


def _in_buckets(places: Any, rows_of: Sequence[int]) -> Any:
    """How many samples are padded to the length of each bucket, with batches within buckets.

    Args:
        places: of the samples, the numbers of their buckets.
        rows_of: samples in a batch of each bucket.
    """
    counts = numpy.bincount(places, minlength=len(rows_of))
    in_each, taken = numpy.zeros_like(counts), 0
    for place in range(len(counts) - 1, -1, -1):
        # Those of longer buckets have taken some of this one to fill up their last batch.
        left = max(0, int(counts[place]) - taken)
        taken = max(0, taken - int(counts[place]))
        if left:
            whole = min(int(_rounded(left, rows_of[place])), left + int(counts[:place].sum()))
            in_each[place], taken = whole, whole - left
    return in_each


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """The shapes of the batches of some data.

    Attributes:
        policy: what they come from.
        bounds: the lengths, ascending.
        label_bounds: the lengths of labels that have one of their own, one for each of `bounds`; else empty.
        waste: the share of padding if samples of one bucket are put together.
        waste_of_one: the share of padding if all samples were as long as the longest.
        padded_samples: how many samples are padded to each of `bounds`.
        rows_of: samples in a batch of each of `bounds`, if batches are formed within buckets; else 1.
        lengths: of each sample; none if they were not looked at.
    """

    policy: ShapePolicy
    bounds: tuple[int, ...]
    label_bounds: tuple[int, ...] = ()
    waste: float = 0.0
    waste_of_one: float = 0.0
    padded_samples: tuple[int, ...] = ()
    rows_of: tuple[int, ...] = ()
    lengths: Any = field(default=(), repr=False, compare=False)

    @classmethod
    def given(cls, policy: ShapePolicy) -> Shapes:
        """The lengths that a policy lists, for samples of which none was looked at."""
        assert isinstance(policy.buckets, tuple)
        bounds = _rounded(numpy.asarray(policy.buckets), policy.pad_to_multiple_of).tolist()
        return cls(policy=policy, bounds=tuple(dict.fromkeys(bounds)))

    @property
    def used(self) -> int:
        """How many of `bounds` batches have."""
        return sum(count > 0 for count in self.padded_samples) if self.padded_samples else len(self.bounds)

    def __str__(self) -> str:
        listed = ", ".join(map(str, self.bounds))
        if self.policy.tokens_per_batch is not None and self.rows_of:
            pairs = zip(self.rows_of, self.bounds, strict=True)
            listed = "rows x length: " + ", ".join(f"{rows} x {bound}" for rows, bound in pairs)
        count = f"{self.used} length{'s' * (self.used != 1)}"
        return (
            f"{count} of {self.policy.length_of} ({listed}): {self.waste:.0%} is padding "
            f"({self.waste_of_one:.0%} if all were as long as the longest)"
        )

    def as_values(self, of: str) -> dict[str, Any]:
        """Plain values, for a report.

        Args:
            of: what has these shapes, in words.
        """
        sizes, counts = numpy.unique(_rounded(self.lengths, -(-max(self.bounds) // _BARS)), return_counts=True)
        places = numpy.searchsorted(self.bounds, self.lengths)
        # Samples of shorter buckets fill up batches of longer ones.
        longest_first = self.lengths[numpy.argsort(-places, kind="stable")]
        ends = numpy.cumsum(self.padded_samples[::-1])
        in_buckets = numpy.split(longest_first, ends[:-1])[::-1]
        return {
            **{"of": of, "name": self.policy.length_of, "waste": self.waste, "waste_of_one": self.waste_of_one},
            "buckets": [
                {"length": bound, "samples": len(part), "elements": int(part.sum()), "padded": len(part) * bound}
                for bound, part in zip(self.bounds, in_buckets, strict=True)
            ],
            "lengths": [list(pair) for pair in zip(sizes.tolist(), counts.tolist(), strict=True)],
        }

    def place(self, length: int) -> int | None:
        """The number of the bucket of a length; None if it is longer than all."""
        return next((place for place, bound in enumerate(self.bounds) if length <= bound), None)

    def sampler(
        self, lengths: Sequence[int], rows: int, *, seed: int = 0, shuffle: bool = True, drop_last: bool = False
    ) -> BucketSampler:
        """A sampler with which each `rows` successive samples have lengths of one bucket.

        Args:
            lengths: of each sample.
            rows: samples in a batch, of all processes.
            seed: of the order.
            shuffle: whether the order is random.
            drop_last: whether a last batch of fewer rows is left out.
        """
        rows_of = [rows] * len(self.bounds)
        return BucketSampler(self.bounds, rows_of, lengths, seed=seed, shuffle=shuffle, drop_last=drop_last)

    def batch_sampler(
        self, lengths: Sequence[int], *, seed: int = 0, shuffle: bool = True, drop_last: bool = False
    ) -> BucketBatches:
        """Batches of one bucket each, with as many rows as `rows_of` says: see `tokens_per_batch`.

        Args:
            lengths: of each sample.
            seed: of the order.
            shuffle: whether the order is random.
            drop_last: whether a last batch of fewer rows is left out.

        Raises:
            ConfigError: the policy has no `tokens_per_batch`, or a sample is longer than the last bucket.
        """
        if self.policy.tokens_per_batch is None or not self.rows_of:
            raise ConfigError(
                "batch_sampler: the rows of a batch are not known. Give tokens_per_batch to the ShapePolicy, and fit it"
            )
        if max(lengths, default=0) > self.bounds[-1]:
            raise ConfigError(
                f"batch_sampler: a sample of {max(lengths)} is longer than the last bucket, {self.bounds[-1]}"
            )
        order = BucketSampler(self.bounds, self.rows_of, lengths, seed=seed, shuffle=shuffle, drop_last=drop_last)
        return BucketBatches(order, drop_last=drop_last)

    def phase(self, batch: Any) -> str:
        """The length of a batch in words, for the name of its phase; empty if it is no bound, or the only one."""
        size = _length(batch, self.policy.length_of)
        return f", {size} long" if len(self.bounds) > 1 and size in self.bounds else ""

    def padded(self, batch: Any, pad_id: int | None = None) -> tuple[Any, str]:
        """Pads a batch to the length of its bucket.

        Tensors on the host whose second dimension has the length of `policy.length_of` are extended: token ids by the
        id of padding, masks by 0, labels by -100, others by `policy.fill`. The attention mask then says what is
        padding, so that batches without one are left as they are.

        Args:
            batch: a mapping.
            pad_id: the id of padding; None if nobody knows.

        Returns:
            The batch and an empty text; or the batch unchanged, and why it cannot be padded.
        """
        size = _length(batch, self.policy.length_of)
        if size is None:
            return batch, f"it is no mapping with {self.policy.length_of!r}, a tensor of rows and lengths"
        if set(_POSITIONS) & set(batch):
            return batch, "its labels are positions, and a choice among all of them sees padding, too"
        if not _is_on_host(batch[self.policy.length_of]):
            return batch, "it was on the device before a step took it"
        place = self.place(size)
        if place is None:
            return batch, f"it has a length of {size}, more than the last bucket ({self.bounds[-1]})"
        bounds = {name: (size, self.bounds[place]) for name, value in batch.items() if _has_length(value, size)}
        own = _length(batch, _LABELS)
        if own is not None and batch[_LABELS].is_floating_point():
            # Of several classes for each sample.
            own, _ = None, bounds.pop(_LABELS, None)
        if self.label_bounds and own is not None and own <= self.label_bounds[place]:
            own_bound = (own, self.label_bounds[place])
            bounds |= {name: own_bound for name in _OF_LABELS if _length(batch, name) == own}
        elif own is not None and own != size:
            return batch, "its labels have another length than the inputs, for which no bucket is known"
        bounds = {name: bound for name, bound in bounds.items() if bound[0] != bound[1]}
        if not bounds:
            return batch, ""
        if _length(batch, _MASK) != size and not set(bounds) <= set(_OF_LABELS):
            return batch, f"it has no {_MASK!r} of rows and lengths, so that the model cannot tell what is padding"
        known = {**_FILL, **self._ids(batch, pad_id, token_level=own == size), **self.policy.fill}
        unknown = sorted(set(bounds) - set(known))
        if unknown:
            what = ", ".join(unknown)
            return (
                batch,
                f"nobody knows what padding is in {what}: give fill={{{unknown[0]!r}: ...}} of the ShapePolicy",
            )
        extended = {name: _extended(batch[name], bound[1], known[name]) for name, bound in bounds.items()}
        return _with(batch, extended), ""

    def _ids(self, batch: Any, pad_id: int | None, *, token_level: bool) -> dict[str, float]:
        """What padding is in token ids; nothing if it decides something, and nobody knows it."""
        if pad_id is None:
            ids, mask = batch.get(_IDS[0]), batch.get(_MASK)
            has_both = _is_on_host(ids) and _is_on_host(mask) and ids.shape == mask.shape
            seen = ids[mask == 0].unique() if has_both else torch.empty(0)
            # Heads that classify whole samples look for the last token that is no padding.
            pad_id = int(seen[0]) if len(seen) == 1 else 0 if token_level else None
        return {} if pad_id is None else dict.fromkeys(_IDS, pad_id)


# ---- lengths --------------------------------------------------------------------------------------


def lengths_of(dataset: Any, name: str) -> tuple[list[int], list[int] | None] | None:
    """The lengths of a dataset's samples, and those of their labels if these differ; None if samples have no such name.

    Of a stream, of its first samples. Random generators of the host are restored afterwards.

    Args:
        dataset: of mappings.
        name: what has the length.

    Raises:
        ConfigError: it is a stream that cannot be read twice.
    """
    with host_random_numbers_kept():
        lengths, labels = [], []
        for sample in _samples_of(dataset, name):
            size = _sample_length(sample, name)
            if size is None:
                return None
            lengths.append(size)
            labels.append(_sample_length(sample, _LABELS))
    differ = any(label not in (None, size) for size, label in zip(lengths, labels, strict=True))
    return lengths, [label or 0 for label in labels] if differ else None


def _samples_of(dataset: Any, name: str) -> Iterator[Any]:
    columns = getattr(dataset, "column_names", None) or ()
    if isinstance(dataset, Mapping) or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        if not hasattr(dataset, "take"):
            raise ConfigError(
                f"shapes: the lengths of a stream of the class {type(dataset).__name__} are not known before it is "
                "read. Give them: ShapePolicy(buckets=[64, 128, ...])"
            )
        yield from dataset.take(_STREAM_SAMPLES)
    elif name in columns and hasattr(dataset, "select_columns") and dataset.format["type"] != "custom":
        # Of the package datasets: in Arrow's memory, without the columns that do not count.
        wanted = [column for column in (name, _LABELS) if column in columns]
        for table in dataset.select_columns(wanted).with_format("numpy").iter(_STREAM_SAMPLES):
            for row in range(len(table[name])):
                yield {column: table[column][row] for column in wanted}
    else:
        yield from (dataset[index] for index in range(len(dataset)))


def _sample_length(sample: Any, name: str) -> int | None:
    value = sample.get(name) if isinstance(sample, Mapping) else None
    if isinstance(value, (list, tuple)):
        first = value[0] if value else 0
        has_parts = isinstance(first, (list, tuple)) and not (first and isinstance(first[0], float))
        return None if has_parts else len(value)
    if not isinstance(value, (torch.Tensor, numpy.ndarray)):
        return None
    # Frames have features, which are no whole numbers; tokens in two dimensions are several texts.
    is_one = value.ndim == 1 or (value.ndim == 2 and "float" in str(value.dtype))
    return int(value.shape[0]) if is_one else None


def why_own_loss_may_count(policy: ShapePolicy) -> str:
    """Why a loss of the user's may depend on padding, in words; empty if the policy promises that it does not."""
    if _LABELS in policy.fill:
        return ""
    return (
        "its loss is your own code: give fill={'labels': -100} if it leaves out labels of -100, and what the attention "
        "mask masks"
    )


def why_padding_may_count(module: torch.nn.Module, pad_id: int | None = None) -> str:
    """Why the results of models of transformers may depend on padding, in words; empty if they do not.

    Args:
        module: has models of transformers, or is one. What else it has is the user's.
        pad_id: the id of padding; None if nobody knows.
    """
    for part in module.modules():
        path = type(part).__module__.split(".")
        if path[:2] == ["transformers", "models"] and path[2] not in NOT_SEEING_PADDING:
            return (
                f"models of the family {path[2]!r} may see padding in spite of the attention mask, or were not compared"
            )
        if path[:2] == ["transformers", "models"] and type(part).__name__.endswith("ForSequenceClassification"):
            own = getattr(getattr(part, "config", None), "pad_token_id", None)
            if own is None or pad_id not in (None, own):
                return (
                    f"{type(part).__name__} may classify by the last token that is no padding: set its "
                    "config.pad_token_id to that of the tokenizer"
                )
    return ""


class ShapeNotices:
    """What an adapter tells of shapes: lines before a training, and warnings, once each.

    Attributes:
        announced: the shapes that were announced, as `Shapes.as_values`.
    """

    def __init__(self) -> None:
        self._said: set[str] = set()
        self.announced: list[dict[str, Any]] = []

    def announce(self, shapes: Shapes, of: str) -> None:
        """Says on stderr which shapes the batches of something have."""
        what = "graph of each kind of step" if shapes.used == 1 else "graphs of each kind of step, one for each length"
        print(f"shapes of the {of}: {shapes}; {shapes.used} {what}", file=sys.stderr)
        self.announced.append(shapes.as_values(of))

    def without_lengths(self, policy: ShapePolicy) -> None:
        """Warns if options on lengths have no effect, since samples have none."""
        if policy != ShapePolicy(last_batch=policy.last_batch):
            self.warn(
                f"{policy} has no effect on lengths: samples are no mappings with {policy.length_of!r} of one "
                "dimension; length_of= names what has a length"
            )

    def warn(self, text: str) -> None:
        """Warns, unless it has before."""
        if text not in self._said:
            self._said.add(text)
            logger.warning("shapes: %s", text)


# ---- rows -----------------------------------------------------------------------------------------


def with_rows(batch: Any, rows: int) -> tuple[Any, str]:
    """A batch with more rows, for losses that leave out rows whose labels are -100; and why it is not extended.

    The further rows are copies of the last one with other labels, since numbers that no sample has (an attention mask
    of zeros, say) may give NaNs.

    Args:
        batch: a mapping of tensors on the host.
        rows: how many it gets.
    """
    if not isinstance(batch, Mapping) or not batch:
        return batch, "it is no mapping"
    given = {name: value for name, value in batch.items() if value is not None}
    count = next((value.shape[0] for value in given.values() if _is_on_host(value) and value.ndim), 0)
    if not count or any(not _is_on_host(value) or not value.ndim or len(value) != count for value in given.values()):
        return batch, "not all of it are tensors with one entry for each row"
    ignored = dict.fromkeys(_CLASSES, _IGNORED)
    if set(_POSITIONS) & set(given):
        ignored |= dict.fromkeys(_POSITIONS, _length(batch, "input_ids") or 0)
    extended = {}
    for name, value in given.items():
        more = value[-1:].expand(rows - count, *value.shape[1:])
        if name in ignored:
            if value.is_floating_point():
                return batch, f"its {name} are no classes"
            more = torch.full_like(more, ignored[name])
        extended[name] = torch.cat([value, more])
    return _with(batch, extended), ""


# ---- tensors --------------------------------------------------------------------------------------


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _rounded(lengths: Any, multiple: int) -> Any:
    return -(-lengths // multiple) * multiple


def _is_on_host(value: Any) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.device.type == "cpu"


def _has_length(value: Any, size: int) -> bool:
    return _is_on_host(value) and value.ndim >= 2 and value.shape[1] == size


def _length(batch: Any, name: str) -> int | None:
    """The length of what has this name in a batch: the second of two dimensions, or of three if it has features."""
    value = batch.get(name) if isinstance(batch, Mapping) else None
    if not isinstance(value, torch.Tensor):
        return None
    return int(value.shape[1]) if value.ndim == 2 or (value.ndim == 3 and value.is_floating_point()) else None


def _extended(value: torch.Tensor, size: int, fill: float) -> torch.Tensor:
    more = value.new_full((value.shape[0], size - value.shape[1], *value.shape[2:]), fill)
    return torch.cat([value, more], dim=1)


def _with(batch: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """A batch of the same class with other tensors."""
    copied = batch.copy() if hasattr(batch, "copy") else dict(batch)
    for name, value in tensors.items():
        copied[name] = value
    return copied
