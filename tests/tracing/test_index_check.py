"""Indices of the batch that are out of range: an error in the step that traces them, and before a replay."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import xla_adapters
from tests.device import DEVICE, ON_TORCH_TPU
from tests.support import update
from xla_adapters import XLAConfig
from xla_adapters.errors import IndexRangeError
from xla_adapters.replay.compiled_step import CompiledStep

pytestmark = pytest.mark.isolated

ROWS = 10


def _embed(weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return functional.embedding(ids, weight)


def _flat(weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return functional.embedding(ids.view(-1)[1:], weight)


def _item(weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return weight[ids]


def _select(weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return weight.index_select(0, ids.flatten())


def _gather(weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return weight.gather(0, ids)


def _entropy(weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    shifted = functional.pad(ids, (0, 1), value=-100)[..., 1:].contiguous()
    return functional.cross_entropy(weight.sum(1).expand(shifted.numel(), -1), shifted.view(-1), reduction="none")


def _step(lookup: Callable[..., torch.Tensor], replay: Any = "auto") -> tuple[CompiledStep[Any], nn.Parameter]:
    xla_adapters.initialize()
    weight = nn.Parameter(torch.ones(ROWS, 4, device=DEVICE))
    optimizer = torch.optim.SGD([weight], 0.1)

    def train(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return update(lookup(weight, batch["ids"]).square().mean(), optimizer)

    return CompiledStep(train, config=XLAConfig(step_replay=replay)), weight


def _batch(number: int, bad: int | None = None) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, ROWS, (2, 4), generator=torch.Generator().manual_seed(number))
    if bad is not None:
        ids[1, 2] = bad
    return {"ids": ids}


def _refused(step: CompiledStep[Any], batch: dict[str, torch.Tensor]) -> str:
    """The message. The error itself would keep what the step has computed."""
    said = ""
    try:
        step(batch)
    except IndexRangeError as error:
        said = str(error)
    assert said
    return said


@pytest.mark.parametrize("lookup", [_embed, _flat, _item, _select, _gather, _entropy])
def test_a_traced_and_a_replayed_step_name_the_index(lookup: Callable[..., torch.Tensor]) -> None:
    step, weight = _step(lookup)
    said = _refused(step, _batch(0, bad=ROWS))
    assert re.search(rf"ids\[1, 2\] is 10, and .* takes -?\d+ to 9.*here(.|\n)*in {lookup.__name__}", said), said
    assert torch.equal(weight.cpu(), torch.ones(ROWS, 4))
    with xla_adapters.count() as counts:
        for number in range(6):
            step(_batch(number))
    assert counts.compiles == 1, step.reasons
    assert step.replays > 0
    replays, before = step.replays, weight.detach().cpu().clone()
    assert "ids[1, 2] is -11" in _refused(step, _batch(7, bad=-ROWS - 1))
    assert torch.equal(weight.cpu(), before)
    # The next batches are replayed again, without another compile; a bad one is found again.
    with xla_adapters.count() as counts:
        for number in range(8, 14):
            step(_batch(number))
        _refused(step, _batch(14, bad=ROWS))
    # With torch_xla this loss, traced again after replays, is another graph; so it is in a verification.
    assert counts.compiles == (lookup is _entropy and not ON_TORCH_TPU)
    assert step.replays > replays


def _clamped(weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return functional.embedding(ids.clamp(0, ROWS - 1), weight)


def _changed(weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    ids = ids.clone()
    ids[ids >= ROWS] = 0
    return functional.embedding(ids, weight)


def _where(weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return functional.embedding(torch.where(ids < ROWS, ids, 0), weight)


def _first_columns(weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return functional.embedding(ids[:, :2], weight)


@pytest.mark.parametrize("lookup", [_clamped, _changed, _where, _first_columns])
def test_no_false_alarm(lookup: Callable[..., torch.Tensor]) -> None:
    step, _ = _step(lookup)
    for number in range(6):
        step(_batch(number))
    replays = step.replays
    with xla_adapters.count() as counts:
        for number in range(6, 16):
            step(_batch(number, bad=ROWS + 7))
    assert counts.compiles == 0
    # At most one batch is traced for it, and what a new capture needs.
    assert step.replays >= replays + 5 or lookup is _changed


def test_ignored_labels_and_a_batch_that_is_changed_on_the_device() -> None:
    step, _ = _step(_entropy)
    for number in range(6):
        step(_batch(number, bad=-100))
    assert step.replays > 0
    weight = torch.ones(ROWS, 4, device=DEVICE)
    ids = _batch(0, bad=ROWS)["ids"]

    def corrected(batch: torch.Tensor) -> torch.Tensor:
        batch.clamp_(0, ROWS - 1)
        return functional.embedding(batch, weight).sum()

    assert CompiledStep(corrected)(ids).item() == 2 * 4 * 4


def _padded(weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return functional.embedding(torch.where(ids < 0, 0, ids), weight)


def test_padding_that_the_step_removes_hides_no_other_value() -> None:
    step, _ = _step(_padded)
    for number in range(4):
        step(_batch(number))
    for number in range(4, 14):
        step(_batch(number, bad=-1))
    replays = step.replays
    assert replays >= 8
    assert "ids[1, 2] is 13" in _refused(step, _batch(14, bad=ROWS + 3))
    with xla_adapters.count() as counts:
        for number in range(15, 21):
            step(_batch(number, bad=-1))
    assert counts.compiles == 0
    assert step.replays > replays


@pytest.mark.parametrize("lookup", [_embed, _item, _entropy])
@pytest.mark.parametrize("first", [3, 6])
def test_a_batch_of_the_host_after_batches_of_the_device(lookup: Callable[..., torch.Tensor], first: int) -> None:
    """The host knows nothing of what the user copied to the device, so it must look at what comes later."""
    step, weight = _step(lookup)
    for number in range(first):
        step({"ids": _batch(number)["ids"].to(DEVICE)})
    before = weight.detach().cpu().clone()
    assert "is 10, and" in _refused(step, _batch(7, bad=ROWS))
    assert torch.equal(weight.cpu(), before)
    with xla_adapters.count() as counts:
        for number in range(8, 14):
            step(_batch(number))
        replays = step.replays
        # Both kinds are known now.
        for number in range(14, 18):
            batch = _batch(number)
            step(batch if number % 2 else {"ids": batch["ids"].to(DEVICE)})
    assert counts.compiles <= (lookup is _entropy)
    assert step.replays == replays + 4
    _refused(step, _batch(18, bad=ROWS))


def test_a_table_becomes_smaller_between_batches_of_two_kinds() -> None:
    """Batches of the host are compared with the table of now, not with that of the last batch of the host."""
    xla_adapters.initialize()
    table = nn.Embedding(ROWS, 4).to(DEVICE)
    step = CompiledStep(lambda batch: table(batch["ids"]).sum())
    for number in range(6):
        step({"ids": _batch(number)["ids"] % 4})
    replays = step.replays
    assert replays > 0, step.reasons
    table.weight = nn.Parameter(torch.ones(ROWS - 4, 4, device=DEVICE))
    for number in range(6):
        step({"ids": (_batch(number)["ids"] % 4).to(DEVICE)})
    assert step.replays > replays, step.reasons
    assert f"is {ROWS - 4}, and" in _refused(step, {"ids": torch.full((2, 4), ROWS - 4)})


def _shifted(weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return functional.embedding(ids + 5, weight)


def _sum_of_rows(weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return functional.embedding(ids[0] + ids[1], weight)


def _positions(weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    present = ids.ne(0).long()
    return functional.embedding(present.cumsum(1) * present + ROWS - 4, weight)


def _masked(weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    ids = ids.clone()
    ids[ids == 3] = 0
    return functional.embedding(ids, weight)


def _in_place(weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return functional.embedding(ids.clone().add_(5), weight)


def _to_the_right(weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    moved = ids.new_zeros(ids.shape)
    moved[:, 1:] = ids[:, :-1]
    return functional.embedding(moved.roll(1, 0), weight)


_GOOD, _BAD = [[0, 9, 2, 3], [4, 5, 0, 1]], [[0, 10, 2, 3], [4, 5, 0, 1]]
_COMPUTED = {
    "written by a mask": (_masked, _GOOD, _BAD),
    "written in place": (_in_place, [[0, 1, 2, 3], [4, 4, 0, 1]], [[0, 1, 2, 3], [4, 5, 0, 1]]),
    "moved": (_to_the_right, _GOOD, _BAD),
    "shifted": (_shifted, [[0, 1, 2, 3], [4, 4, 0, 1]], [[0, 1, 2, 3], [4, 5, 0, 1]]),
    "a sum": (_sum_of_rows, [[0, 9, 2, 3], [4, 0, 3, 1]], [[0, 9, 2, 3], [4, 1, 3, 1]]),
    "positions": (_positions, [[1, 1, 0, 1], [1, 0, 0, 1]], [[1, 1, 1, 1], [1, 0, 0, 1]]),
}


@pytest.mark.parametrize(("lookup", "good", "bad"), _COMPUTED.values(), ids=_COMPUTED)
def test_indices_that_are_computed_from_the_batch(
    lookup: Callable[..., torch.Tensor], good: list[list[int]], bad: list[list[int]]
) -> None:
    """All values of the bad batch are in range themselves. Steps that write in place are traced."""
    _find(lookup, good, bad, replays=0 if lookup in (_masked, _in_place, _to_the_right) else 2)


def _find(lookup: Callable[..., torch.Tensor], good: Any, bad: Any, *, replays: int, replay: Any = "auto") -> None:
    step, weight = _step(lookup, replay)
    for _ in range(5):
        step({"ids": torch.tensor(good)})
    assert step.replays >= replays, step.reasons
    before = weight.detach().cpu().clone()
    assert "is 10, and" in _refused(step, {"ids": torch.tensor(bad)})
    assert torch.equal(weight.cpu(), before)


def _set(weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    rows = weight.new_zeros(ROWS, 4)
    rows[ids[0]] = weight[:4]
    return rows


_OPERATORS: dict[str, Callable[..., torch.Tensor]] = {
    "index_add": lambda w, ids: w.new_zeros(ROWS, 4).index_add(0, ids[0], w[:4]),
    "index_add_": lambda w, ids: w.new_zeros(ROWS, 4).index_add_(0, ids[0], w[:4]),
    "index_copy": lambda w, ids: w.new_zeros(ROWS, 4).index_copy(0, ids[0], w[:4]),
    "index_fill": lambda w, ids: w.index_fill(0, ids[0], 2.0),
    "index_put": lambda w, ids: w.new_zeros(ROWS, 4).index_put((ids[0],), w[:4]),
    "scatter": lambda w, ids: w.new_zeros(ROWS, 4).scatter(0, ids.view(-1, 1).expand_as(w[:8]), w[:8]),
    "scatter_add": lambda w, ids: w.new_zeros(ROWS, 4).scatter_add_(0, ids.view(-1, 1).expand_as(w[:8]), w[:8]),
    "a set row": _set,
    "two indices": lambda w, ids: w.expand(3, ROWS, 4)[1:, ids[0]],
    "take": lambda w, ids: w[:, 0].contiguous().take(ids),
    "take_along_dim": lambda w, ids: torch.take_along_dim(w, ids, 0),
    "embedding_bag": lambda w, ids: functional.embedding_bag(ids, w),
    "multi_margin_loss": lambda w, ids: functional.multi_margin_loss(w.t(), ids[0]),
}


@pytest.mark.skipif(ON_TORCH_TPU, reason="torch_tpu lacks some of these operators")
@pytest.mark.parametrize("name", _OPERATORS)
def test_each_operator_that_takes_an_index(name: str) -> None:
    in_place = name in ("a set row", "index_add_", "scatter_add")
    _find(_OPERATORS[name], _GOOD, _BAD, replays=0 if in_place else 2, replay=True)


@pytest.mark.skipif(ON_TORCH_TPU, reason="torch_tpu has no CTC")
@pytest.mark.parametrize("kind", ["tensors", "numbers", "eager"])
def test_lengths_of_ctc_that_do_not_fit(kind: str) -> None:
    """As on the CPU, where torch refuses each of them."""
    xla_adapters.initialize()
    scores, targets = torch.zeros(6, 2, 5), torch.ones(2, 3, dtype=torch.int64)
    good: dict[str, Any] = {"frames": [6, 5], "labels": [3, 2], "blank": 0}

    def loss(frames: Any, labels: Any, blank: int, device: str) -> torch.Tensor:
        if kind != "numbers":
            frames, labels = torch.tensor(frames), torch.tensor(labels)
        if kind == "eager":
            frames, labels = frames.to(device), labels.to(device)

        def compute(scores: Any, targets: Any, frames: Any, labels: Any) -> torch.Tensor:
            return functional.ctc_loss(scores, targets, frames, labels, blank=blank)

        given = scores.to(device).log_softmax(-1), targets.to(device), frames, labels
        return compute(*given) if kind == "eager" or device == "cpu" else CompiledStep(compute)(*given)

    torch.testing.assert_close(loss(**good, device=DEVICE).cpu(), loss(**good, device="cpu"))
    for bad in ({"frames": [7, 5]}, {"frames": [-1, 5]}, {"labels": [4, 2]}, {"labels": [-1, 2]}, {"blank": 5}):
        for device in ("cpu", DEVICE):
            with pytest.raises((RuntimeError, IndexRangeError), match=r"length|blank|ctc_loss"):
                loss(**{**good, **bad}, device=device)


def test_indices_that_are_computed_from_two_tensors_of_the_batch() -> None:
    xla_adapters.initialize()
    weight = torch.ones(ROWS, 4, device=DEVICE)
    step = CompiledStep(lambda batch: functional.embedding(batch["rows"] + batch["more"], weight).sum())
    rows = torch.tensor([0, 9, 4])
    for _ in range(5):
        step({"rows": rows, "more": torch.tensor([9, 0, 5])})
    assert step.replays >= 2, step.reasons
    assert "is 10, and" in _refused(step, {"rows": rows, "more": torch.tensor([9, 0, 6])})
    step({"rows": torch.tensor([5, 5, 5]), "more": torch.tensor([0, 0, 0])})


def _positions(weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return functional.embedding(torch.arange(ids.shape[1], device=ids.device)[None], weight)


def _positions_after_others(weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return weight[torch.arange(3, 3 + ids.shape[1], device=ids.device).expand(2, -1)]


def _kinds(weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return functional.embedding(torch.ones_like(ids) * ids.shape[1], weight)


@pytest.mark.parametrize("bad", [False, True])
def test_a_bad_index_in_a_transform(bad: bool) -> None:
    """Of ids that the host computes: a transform would wrap what it computes there."""
    xla_adapters.initialize()
    weight, scale = torch.ones(ROWS, 4).to(DEVICE), torch.ones(4).to(DEVICE)
    gradient = None
    with pytest.raises(IndexRangeError) if bad else nullcontext():
        with xla_adapters.step():
            ids = _batch(0, ROWS if bad else None)["ids"].to(DEVICE)
            gradient = torch.func.grad(lambda scale: (weight[ids[:, 1:]] * scale).sum())(scale)
    assert (gradient is None) == bad
    assert gradient is None or gradient.cpu().tolist() == [6.0] * 4


def test_positions_in_a_transform_are_looked_up() -> None:
    xla_adapters.initialize()

    def found(device: str) -> torch.Tensor:
        def total(weight: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
            positions = torch.arange(3, device=device)
            return (functional.embedding(positions, weight) * table[positions]).sum()

        weight, table = torch.ones(ROWS, 4).to(device), torch.arange(4.0 * ROWS).reshape(ROWS, 4).to(device)
        with nullcontext() if device == "cpu" else xla_adapters.step():
            result: torch.Tensor = torch.func.grad(total)(weight, table)
        return result.cpu()

    torch.testing.assert_close(found(DEVICE), found("cpu"))


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(("lookup", "most"), [(_positions, 10), (_positions_after_others, 7), (_kinds, 9)])
def test_indices_that_shapes_determine(lookup: Callable[..., torch.Tensor], most: int, on_device: bool) -> None:
    """As the positions of a sequence that is longer than the model allows."""
    step, weight = _step(lookup)

    def batch(columns: int) -> dict[str, torch.Tensor]:
        ids = torch.ones(2, columns, dtype=torch.int64)
        return {"ids": ids.to(DEVICE) if on_device else ids}

    for _ in range(4):
        step(batch(4))
    step(batch(most))
    before = weight.detach().cpu()
    said = _refused(step, batch(most + 1))
    assert "an index that is computed from shapes, such as a position, is 10" in said
    assert "test_index_check.py" in said
    assert weight.detach().cpu().equal(before)
    step(batch(4))
    assert not weight.detach().cpu().equal(before)
