"""Buckets, samplers and padding: what they promise, on the host."""

from __future__ import annotations

import itertools
import random
import re
from typing import Any

import datasets
import pytest
import torch
import transformers

from tests.tiny_models import config_of
from xla_adapters.data.shapes import (
    NOT_SEEING_PADDING,
    ShapePolicy,
    lengths_of,
    optimal_bounds,
    why_padding_may_count,
    with_rows,
)
from xla_adapters.errors import ConfigError


def _padded(lengths: list[int], bounds: Any, rows: int = 1) -> int:
    """The longest samples first, in batches; each is padded to the bound of its longest."""
    ordered = sorted(lengths, reverse=True)
    batches = [ordered[begin : begin + rows] for begin in range(0, len(ordered), rows)]
    return sum(len(batch) * next(bound for bound in bounds if bound >= batch[0]) for batch in batches)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("seed", range(20))
def test_bounds_are_the_best_of_all(seed: int, rows: int) -> None:
    numbers = random.Random(seed)
    lengths = [numbers.randint(1, 14) for _ in range(numbers.randint(1, 30))]
    number = numbers.randint(1, 6)
    sizes = sorted(set(lengths))
    all_bounds = (
        (*chosen, sizes[-1])
        for count in range(min(number, len(sizes)))
        for chosen in itertools.combinations(sizes[:-1], count)
    )
    found = optimal_bounds(lengths, number, rows)
    assert len(found) <= number
    assert _padded(lengths, found, rows) == min(_padded(lengths, bounds, rows) for bounds in all_bounds)
    shapes = ShapePolicy(buckets=number).fit(lengths, rows=rows)
    assert shapes.waste == pytest.approx(1 - sum(lengths) / _padded(lengths, found, rows))


def test_many_different_lengths_cost_little_more_than_the_best() -> None:
    numbers = random.Random(0)
    lengths = [int(numbers.lognormvariate(9, 1)) + 1 for _ in range(20_000)]
    found = optimal_bounds(lengths, 4)
    assert found[-1] == max(lengths)
    # One step of the grid at most for each sample.
    step = -(-max(lengths) // 4096)
    assert _padded(lengths, found) <= _padded(lengths, [bound + step for bound in found])
    assert len(set(lengths)) > 4096


def test_the_fewest_buckets_with_little_padding() -> None:
    lengths = [10] * 50 + [100] * 50
    assert ShapePolicy().fit(lengths).bounds == (10, 100)
    assert ShapePolicy(max_waste=0.5).fit(lengths).bounds == (100,)
    assert ShapePolicy(pad_to_multiple_of=8).fit(lengths).bounds == (16, 104)
    assert ShapePolicy(pad_to_multiple_of=8).fit(lengths, limit=100).bounds == (16, 100)


def test_lengths_of_labels_grow_with_the_buckets() -> None:
    shapes = ShapePolicy(buckets=[4, 8, 12]).fit([3, 4, 8, 7], [9, 2, 5, 1])
    assert shapes.bounds == (4, 8, 12)
    assert shapes.label_bounds == (9, 9, 9)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("count", [1, 40, 43])
def test_batches_are_of_one_bucket_and_nothing_is_lost(count: int, shuffle: bool) -> None:
    numbers = random.Random(count)
    lengths = [numbers.randint(1, 50) for _ in range(count)]
    shapes = ShapePolicy(buckets=3).fit(lengths)
    sampler = shapes.sampler(lengths, 4, seed=3, shuffle=shuffle)
    order = list(sampler)
    assert sorted(order) == list(range(count))
    assert list(sampler) == order
    batches = [order[begin : begin + 4] for begin in range(0, count, 4)]
    places = [{shapes.place(lengths[index]) for index in batch} for batch in batches[: count // 4]]
    # Where a bucket does not divide, one batch has samples of two.
    assert sum(len(found) > 1 for found in places) <= 2
    sampler.set_epoch(1)
    assert (list(sampler) != order) == (shuffle and count > 1)
    dropping = shapes.sampler(lengths, 4, seed=3, shuffle=shuffle, drop_last=True)
    assert len(list(dropping)) == len(dropping) == count - count % 4


@pytest.mark.parametrize("multiple", [1, 3])
@pytest.mark.parametrize("seed", range(6))
def test_batches_of_as_many_tokens(seed: int, multiple: int) -> None:
    numbers = random.Random(seed)
    lengths = [numbers.randint(1, 50) for _ in range(numbers.randint(1, 200))]
    shapes = ShapePolicy(buckets=4, tokens_per_batch=120).fit(lengths, rows=multiple)
    assert shapes.rows_of == tuple(max(multiple, 120 // bound // multiple * multiple) for bound in shapes.bounds)
    found = shapes.batch_sampler(lengths, seed=seed)
    batches = list(found)
    assert len(batches) == len(found)
    assert sorted(itertools.chain(*batches)) == list(range(len(lengths)))
    places = [shapes.place(max(lengths[index] for index in batch)) for batch in batches]
    rows = [shapes.rows_of[place] for place in places if place is not None]
    # All but the last are whole.
    assert [len(batch) for batch in batches[:-1]] == rows[:-1]
    assert len(batches[-1]) <= rows[-1]
    padded = [sum(len(batch) for batch, at in zip(batches, places, strict=True) if at == place) for place in range(4)]
    assert shapes.padded_samples == tuple(padded[: len(shapes.bounds)])
    assert list(found) == batches
    found.set_epoch(1)
    assert sorted(itertools.chain(*found)) == list(range(len(lengths)))
    assert (list(found) != batches) == (len(lengths) > 1)
    dropping = shapes.batch_sampler(lengths, seed=seed, drop_last=True)
    assert [len(batch) for batch in dropping] == [len(batch) for batch in batches if len(batch) in shapes.rows_of][
        : len(dropping)
    ]
    assert len(batches) - len(dropping) == (len(batches[-1]) < rows[-1])


def _batch(length: int, rows: int = 2) -> dict[str, torch.Tensor]:
    ids = torch.arange(1, rows * length + 1).reshape(rows, length)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def test_what_is_put_behind() -> None:
    shapes = ShapePolicy(buckets=[4, 8]).fit([3])
    batch, reason = shapes.padded({**_batch(5), "token_type_ids": torch.ones(2, 5, dtype=torch.long)}, 9)
    assert reason == ""
    assert batch["input_ids"][0].tolist() == [1, 2, 3, 4, 5, 9, 9, 9]
    assert batch["labels"][0].tolist() == [1, 2, 3, 4, 5, -100, -100, -100]
    assert batch["attention_mask"].sum() == 10
    assert batch["token_type_ids"].sum() == 10
    assert shapes.phase(batch) == ", 8 long"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"attention_mask": None}, "it has no 'attention_mask'"),
        ({"bbox": torch.zeros(2, 5, 4)}, r"fill=\{'bbox': ...\}"),
        ({"labels": torch.zeros(2, dtype=torch.long)}, "padding is in input_ids"),
        ({"labels": torch.zeros(2, 3, dtype=torch.long)}, "its labels have another length"),
        ({"input_ids": torch.zeros(2, 3, 5, dtype=torch.long)}, "a tensor of rows and lengths"),
        ({"input_ids": torch.zeros(2, 9, dtype=torch.long)}, "more than the last bucket"),
    ],
)
def test_what_is_not_known_is_left(change: dict[str, Any], told: str) -> None:
    shapes = ShapePolicy(buckets=[4, 8]).fit([3])
    batch = {name: value for name, value in {**_batch(5), **change}.items() if value is not None}
    left, reason = shapes.padded(batch)
    assert left is batch
    assert re.search(told, reason)


def test_the_batch_itself_tells_the_id_of_padding() -> None:
    shapes = ShapePolicy(buckets=[4, 8]).fit([3])
    batch = {**_batch(5), "labels": torch.zeros(2, dtype=torch.long)}
    batch["attention_mask"][0, -1] = 0
    batch["input_ids"][0, -1] = 77
    assert shapes.padded(batch)[0]["input_ids"][1].tolist() == [6, 7, 8, 9, 10, 77, 77, 77]


def test_frames_with_features() -> None:
    policy = ShapePolicy(buckets=[4, 8], length_of="input_features")
    samples = [{"input_features": torch.ones(length, 3), "labels": [1, 2]} for length in (2, 7, 5)]
    found = lengths_of(samples, policy.length_of)
    assert found == ([2, 7, 5], [2, 2, 2])
    shapes = policy.fit(*found)
    given = {
        "input_features": torch.ones(2, 5, 3),
        "attention_mask": torch.ones(2, 5),
        "labels": torch.ones(2, 2).long(),
    }
    batch, reason = shapes.padded(given)
    assert reason == ""
    assert batch["input_features"].shape == (2, 8, 3)
    assert batch["input_features"].sum() == 30
    assert batch["attention_mask"].sum() == 10
    assert batch["labels"] is given["labels"]
    assert shapes.phase(batch) == ", 8 long"
    # Tokens in two dimensions are several texts.
    assert lengths_of([{"input_ids": [[1, 2], [3, 4]]}], "input_ids") is None
    assert lengths_of([{"input_features": [[1.0, 2.0], [3.0, 4.0]]}], policy.length_of) == ([2], None)


def test_rows_that_do_not_count() -> None:
    batch, reason = with_rows(_batch(3), 4)
    assert reason == ""
    assert batch["labels"].tolist()[2:] == [[-100] * 3] * 2
    assert torch.equal(batch["input_ids"][3], batch["input_ids"][1])
    for odd in ([1], {"labels": torch.zeros(2)}, {"x": torch.zeros(2), "flag": True}, {"x": torch.tensor(1)}):
        left, reason = with_rows(odd, 4)
        assert left is odd
        assert reason


def test_lengths_of_arrow_data_and_of_what_transforms_make() -> None:
    data = datasets.Dataset.from_dict({"input_ids": [[1, 2], [3], [4, 5, 6]], "labels": [[1], [2, 3], [4]]})
    assert lengths_of(data, "input_ids") == ([2, 1, 3], [1, 2, 1])
    assert lengths_of(data, "input_values") is None
    text = datasets.Dataset.from_dict({"text": ["a b", "c"]})
    text.set_transform(lambda rows: {"input_ids": [row.split() for row in rows["text"]]})
    assert lengths_of(text, "input_ids") == ([2, 1], None)
    stream = data.to_iterable_dataset()
    assert lengths_of(stream, "input_ids") == ([2, 1, 3], [1, 2, 1])


def test_policies_that_contradict_themselves() -> None:
    for options in (
        {"buckets": []},
        {"buckets": [4, 0]},
        {"max_waste": 1.5},
        {"pad_to_multiple_of": 0},
        {"buckets": "8"},
    ):
        with pytest.raises(ConfigError):
            ShapePolicy(**options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="both decide"):
        ShapePolicy(buckets=3, max_waste=0.2)
    with pytest.raises(ConfigError, match="the longest sample has 9"):
        ShapePolicy(buckets=[4, 8]).fit([9])
    with pytest.raises(ConfigError, match="is no JSON"):
        ShapePolicy.resolve("{buckets: 3}")
    assert ShapePolicy.resolve('{"buckets": [8, 4]}') == ShapePolicy(buckets=(4, 8))


# ---- models ----------------------------------------------------------------------------------------

_HEADS = ("CausalLM", "MaskedLM", "SequenceClassification", "TokenClassification", "Seq2SeqLM")


@pytest.mark.isolated
@pytest.mark.parametrize("family", sorted(NOT_SEEING_PADDING - {"whisper"}))
def test_models_that_do_not_see_padding(family: str) -> None:
    config = config_of(family)
    of_pairs = getattr(config, "is_encoder_decoder", False)
    heads = [getattr(transformers, f"AutoModelFor{head}") for head in _HEADS]
    heads = [head for head in heads if type(config) in head._model_mapping and not (of_pairs and head is heads[0])]
    assert heads
    ids = torch.randint(3, 64, (3, 11), generator=torch.Generator().manual_seed(0))
    ids[1, 7:], ids[2, 10:] = 0, 0
    mask = (ids != 0).long()
    # Some classify by it.
    ids[:, 5] = 2
    for head in heads:
        torch.manual_seed(0)
        model = head.from_config(config).eval()
        assert why_padding_may_count(model) == ""
        for parameter in model.parameters():
            # Small weights hide differences.
            parameter.data.mul_(4 if parameter.ndim > 1 else 1)
        labels = {
            "CausalLM": ids,
            "MaskedLM": ids,
            "TokenClassification": ids % 3,
            "Seq2SeqLM": ids[:, :7].clamp(min=3),
        }
        given = labels.get(head.__name__.removeprefix("AutoModelFor"), torch.tensor([0, 1, 2]))
        if given.shape == ids.shape:
            given = given.masked_fill(mask == 0, -100)
        shapes = ShapePolicy(buckets=[20]).fit([11], [12] if given.shape == (3, 7) else None)
        plain = {"input_ids": ids, "attention_mask": mask, "labels": given}
        batch, reason = shapes.padded(plain, 0)
        assert reason == ""
        with torch.no_grad():
            expected, actual = model(**plain), model(**batch)
        torch.testing.assert_close(actual.loss, expected.loss, atol=5e-5, rtol=5e-5)
        logits = actual.logits[:, : expected.logits.shape[1]] if expected.logits.ndim == 3 else actual.logits
        counts = mask.bool() if given.shape == ids.shape else slice(None)
        scale = float(expected.logits.abs().max())
        torch.testing.assert_close(logits[counts], expected.logits[counts], atol=2e-4 * max(1, scale), rtol=0)


@pytest.mark.isolated
def test_models_that_may_see_it() -> None:
    funnel = transformers.FunnelConfig(vocab_size=40, block_sizes=[1, 1], d_model=16, n_head=2, d_head=8, d_inner=32)
    assert "'funnel'" in why_padding_may_count(transformers.FunnelForTokenClassification(funnel))
    classifier = transformers.GPT2ForSequenceClassification(config_of("gpt2"))
    assert why_padding_may_count(torch.nn.Sequential(classifier)) == ""
    assert "config.pad_token_id" in why_padding_may_count(classifier, 7)
    classifier.config.pad_token_id = None
    assert "config.pad_token_id" in why_padding_may_count(classifier)
    assert why_padding_may_count(torch.nn.Linear(2, 2)) == ""
