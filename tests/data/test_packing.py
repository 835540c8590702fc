"""Packed rows: no document is lost, cut, or sees another one."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import transformers
from torch.utils.data import DataLoader, IterableDataset, default_collate

import xla_adapters
from tests.isolation import isolated
from tests.tiny_models import config_of
from xla_adapters.data.packing import (
    KEEPING_DOCUMENTS_APART,
    PackedDataset,
    best_fit,
    why_documents_mix,
)
from xla_adapters.data.shapes import NOT_SEEING_PADDING, ShapePolicy
from xla_adapters.errors import ConfigError


@pytest.mark.parametrize("seed", range(20))
def test_documents_are_put_into_the_fullest_row_with_room(seed: int) -> None:
    numbers = random.Random(seed)
    lengths = [numbers.randint(0, 20) for _ in range(numbers.randint(0, 60))]
    expected: list[list[int]] = []
    for size, number in sorted(((size, number) for number, size in enumerate(lengths) if size), key=lambda it: -it[0]):
        rooms = [20 - sum(lengths[index] for index in row) for row in expected]
        fitting = [room for room in rooms if room >= size]
        if fitting:
            expected[rooms.index(min(fitting))].append(number)
        else:
            expected.append([number])
    found = best_fit(lengths, 20)
    assert sorted(number for row in found for number in row) == [number for number, size in enumerate(lengths) if size]
    assert all(sum(lengths[index] for index in row) <= 20 for row in found)
    # Which of equally full rows it is does not matter.
    fills = [sorted(sum(lengths[index] for index in row) for row in rows) for rows in (found, expected)]
    assert fills[0] == fills[1]


def test_rows() -> None:
    data = [{"input_ids": list(range(10, 10 + size))} for size in (3, 5, 2, 1, 4, 0)]
    packed = PackedDataset(data, 8, pad_id=7)
    # Nothing is predicted in those of one token and of none: a row of them would have no labels.
    assert packed.rows == [[1, 0], [4, 2]]
    row = packed[1]
    assert row["input_ids"].tolist() == [10, 11, 12, 13, 10, 11, 7, 7]
    assert row["position_ids"].tolist() == [0, 1, 2, 3, 0, 1, 0, 0]
    assert row["labels"].tolist() == [-100, 11, 12, 13, -100, 11, -100, -100]
    assert str(packed) == "4 documents in 2 rows of 8 tokens, of which 12.5% is padding"
    batch = next(iter(DataLoader(packed, batch_size=2, shuffle=False)))
    assert {name: tuple(value.shape) for name, value in batch.items()} == {
        "input_ids": (2, 8),
        "position_ids": (2, 8),
        "labels": (2, 8),
    }


def test_a_collator_makes_each_document() -> None:
    """Its padding, to either side, is left out."""

    def collate(samples: list[Any]) -> dict[str, torch.Tensor]:
        ids = samples[0]["text"]
        left = [0] * (ids[0] % 2)
        right = [0] * (4 - len(left))
        return {
            "input_ids": torch.tensor([[*left, *ids, *right]]),
            "attention_mask": torch.tensor([[*left, *([1] * len(ids)), *right]]),
            "labels": torch.tensor([[*[-100] * len(left), *(2 * token for token in ids), *[-100] * len(right)]]),
        }

    data = [{"input_ids": [5, 6, 7], "text": [5, 6, 7]}, {"input_ids": [8, 9], "text": [8, 9]}]
    row = PackedDataset(data, 6, collator=collate)[0]
    assert row["input_ids"].tolist() == [5, 6, 7, 8, 9, 0]
    assert row["labels"].tolist() == [-100, 12, 14, -100, 18, -100]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([{"input_ids": [1, 2]}])


def test_what_cannot_be_packed() -> None:
    documents = [{"input_ids": [1] * size} for size in (3, 9, 12)]
    with pytest.raises(ConfigError, match=r"2 of 3 documents are longer, the longest, number 2, has 12 tokens"):
        PackedDataset(documents, 8)
    with pytest.raises(ConfigError, match="a stream has no lengths"):
        PackedDataset(Stream(), 8)
    with pytest.raises(ConfigError, match="must be mappings with 'input_ids'"):
        PackedDataset(["a text"], 8)
    with pytest.raises(ConfigError, match="document 0 has token_type_ids, too"):
        PackedDataset([{"input_ids": [1, 2], "token_type_ids": [0, 0]}], 8)[0]
    with pytest.raises(ConfigError, match="document 0 have another length than its 2 tokens"):
        PackedDataset([{"input_ids": [1, 2], "labels": [1]}], 8)[0]
    with pytest.raises(ConfigError, match="hides tokens in its middle"):
        PackedDataset([{"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}], 8)[0]
    with pytest.raises(ConfigError, match="1 tokens longer than a row of 2"):
        PackedDataset([{"input_ids": [1, 1]}], 2, collator=lambda _: {"input_ids": [[1, 2, 3]]})[0]
    with pytest.raises(ConfigError, match=r"made input_ids of the shape \(2, 2\) of document 0"):
        PackedDataset([{"input_ids": [1] * 4}], 8, collator=lambda _: {"input_ids": [[1, 2], [3, 4]]})[0]
    with pytest.raises(ConfigError, match="give the length of a row in tokens"):
        ShapePolicy(packing=0)


@pytest.mark.isolated
@pytest.mark.parametrize("family", sorted(KEEPING_DOCUMENTS_APART))
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_no_document_sees_another(family: str, attention: str) -> None:
    """Each has the logits that it has alone, whatever else is in its row; and the loss is that of all documents."""
    assert family in NOT_SEEING_PADDING
    config = config_of(family)
    config.use_cache = False
    torch.manual_seed(0)
    try:
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    except ValueError:
        assert attention == "sdpa"
        return
    assert why_documents_mix(model) == ""
    for parameter in model.parameters():
        # Small weights hide differences.
        parameter.data.mul_(4 if parameter.ndim > 1 else 1)
    numbers = torch.Generator().manual_seed(0)
    documents = [{"input_ids": torch.randint(3, 64, (size,), generator=numbers)} for size in (7, 2, 12, 4)]
    packed = PackedDataset(documents, 15)
    assert len(packed) == 2
    with torch.no_grad():
        results = model(**default_collate([packed[0], packed[1]]))
        alone = [model(input_ids=document["input_ids"][None]).logits[0] for document in documents]
    scale = max(float(logits.abs().max()) for logits in alone)
    losses = []
    for row, logits in zip(packed.rows, results.logits, strict=True):
        begin = 0
        for number in row:
            size = len(alone[number])
            torch.testing.assert_close(logits[begin : begin + size], alone[number], atol=2e-4 * max(1, scale), rtol=0)
            losses.append(torch.log_softmax(alone[number], -1)[:-1].gather(1, documents[number]["input_ids"][1:, None]))
            begin += size
    assert float(results.loss) == pytest.approx(-float(torch.cat(losses).mean()), abs=5e-5, rel=5e-5)


@pytest.mark.isolated
@pytest.mark.parametrize("family", ["opt", "bloom", "mamba", "falcon"])
def test_families_that_mix_documents_are_refused(family: str) -> None:
    model = transformers.AutoModelForCausalLM.from_config(config_of(family))
    assert f"models of the family {family!r}" in why_documents_mix(model)


@pytest.mark.isolated
def test_losses_that_see_padding_are_refused() -> None:
    config = config_of("mixtral")
    config.output_router_logits = True
    assert "output_router_logits" in why_documents_mix(transformers.AutoModelForCausalLM.from_config(config))


@pytest.mark.isolated
def test_positions_that_depend_on_the_longest_document_are_refused() -> None:
    dynamic, longrope = config_of("llama"), config_of("phi3")
    dynamic.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 4.0, "partial_rotary_factor": 1.0}
    longrope.rope_parameters = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
    longrope.rope_parameters["original_max_position_embeddings"] = longrope.original_max_position_embeddings = 8
    for config in (dynamic, longrope):
        model = transformers.AutoModelForCausalLM.from_config(config)
        assert "depend on the longest document" in why_documents_mix(model)


@isolated
def test_a_loop_of_ones_own_trains_as_on_the_cpu_one_by_one() -> None:
    numbers = torch.Generator().manual_seed(0)
    sizes = torch.randint(2, 12, (40,), generator=numbers).tolist()
    documents = [{"input_ids": torch.randint(3, 64, (size,), generator=numbers)} for size in sizes]
    packed = PackedDataset(documents, 16)
    config = config_of("llama")
    assert config.use_cache

    def made(device: str) -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config).to(device)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    model, optimizer = made("cpu")
    expected = []
    for begin in range(0, len(packed) - 1, 2):
        losses = []
        for document in (documents[number] for row in packed.rows[begin : begin + 2] for number in row):
            ids = document["input_ids"][None]
            losses.append(torch.log_softmax(model(ids).logits[0, :-1], -1).gather(1, ids[0, 1:, None]))
        loss = -torch.cat(losses).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(float(loss))

    xla_adapters.initialize()
    # It compiles two tiny graphs.
    assert xla_adapters.get_runtime().replay_works
    model, optimizer = made("xla")

    @xla_adapters.CompiledStep
    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    batches = list(DataLoader(packed, batch_size=2, drop_last=True))
    assert len(batches) >= 8
    with xla_adapters.count() as counts:
        losses = [step(batch) for batch in batches]
    assert [float(loss) for loss in losses] == pytest.approx(expected, abs=1e-5)
    assert (counts.compiles, counts.executions) == (1, len(batches))
