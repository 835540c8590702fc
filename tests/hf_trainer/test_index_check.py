"""Tokens and labels that are out of range are found before the device clamps them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import TrainerCallback

import hf_trainer
from tests.hf_trainer.scenarios import VOCABULARY, arguments, assert_parity, gpt2, token_samples
from tests.tiny_models import tiny
from xla_adapters.errors import IndexRangeError

pytestmark = pytest.mark.isolated

BAD = VOCABULARY + 3


def _rows(count: int, entry: str, at: int, value: int = BAD) -> list[dict[str, Any]]:
    rows = token_samples(count)
    rows[at][entry][5] = value
    return rows


class _InOrder(hf_trainer.Trainer):
    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)  # type: ignore[arg-type]


@pytest.mark.parametrize("entry", ["input_ids", "labels"])
@pytest.mark.parametrize("at", [1, 25], ids=["traced", "replayed"])
def test_a_token_out_of_range(entry: str, at: int) -> None:
    done: list[int] = []

    class Counts(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            done.append(state.global_step)

    data = _rows(32, entry, at)
    trainer = _InOrder(gpt2(), arguments(max_steps=8), train_dataset=data, callbacks=[Counts()])
    with pytest.raises(IndexRangeError, match=rf"{entry}\[1, 5\] is {BAD}, and .* takes 0 to {VOCABULARY - 1}"):
        trainer.train()
    assert len(done) == at // 4
    with pytest.raises(IndexRangeError, match=rf"{entry}\[1, 5\]"):
        trainer.evaluate(data[at - 1 : at + 3])


def test_a_class_out_of_range() -> None:
    rows = [{"input_ids": row["input_ids"], "labels": 3} for row in token_samples(8)]
    with pytest.raises(IndexRangeError, match=r"labels\[0\] is 3, and cross_entropy takes 0 to 2, or -100"):
        hf_trainer.Trainer(tiny("bert", num_labels=3), arguments(), train_dataset=rows).train()


def test_ignored_labels_are_no_mistake() -> None:
    run = assert_parity(gpt2, _rows(32, "labels", 20, value=-100), args={"max_steps": 8})
    run.assert_one_graph(8)
