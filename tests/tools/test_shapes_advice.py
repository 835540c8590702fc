"""`xla-adapters shapes`: what it times of a script, and how many lengths it recommends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from xla_adapters.cli import main
from xla_adapters.data.shapes import ShapePolicy
from xla_adapters.tools.shapes_advice import ShapesAdvice, _line_through, costs_of

_HF = """
import tempfile
import torch
from transformers import TrainingArguments
from hf_trainer import Trainer
from tests.hf_trainer.test_shapes import padded, text_samples
from tests.tiny_models import tiny

args = TrainingArguments(
    tempfile.mkdtemp(), num_train_epochs=7, per_device_train_batch_size=4, report_to="none", max_steps={max_steps}
)
Trainer(tiny("llama"), args, train_dataset=text_samples(80, "tokens"), data_collator=padded).train()
"""
_LIGHTNING = """
import lightning as L
import torch
from torch.utils.data import DataLoader
from lightning_strategy import XLAEagerStrategy
from tests.hf_trainer.test_shapes import padded, text_samples
from tests.tiny_models import tiny


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = tiny("llama")

    def training_step(self, batch, number):
        return self.model(**batch).loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


loader = DataLoader(text_samples(80, "tokens"), batch_size=4, shuffle=True, collate_fn=padded)
L.Trainer(strategy=XLAEagerStrategy({options}), max_epochs=3, logger=False, enable_checkpointing=False).fit(
    Module(), loader
)
"""


def _advice(tmp_path: Path, script: str, *options: str) -> int:
    file = tmp_path / "train.py"
    file.write_text(script)
    return main(["shapes", "--timeout", "200", *options, str(file)])


@pytest.mark.parametrize(
    ("script", "epochs"),
    [
        pytest.param(_HF.format(max_steps=-1), 7, marks=pytest.mark.long),
        (_HF.format(max_steps=50), 50 * 4 / 80),
        (_LIGHTNING.format(options="shapes={'fill': {'labels': -100}, 'buckets': [12, 24]}"), 3),
    ],
    ids=["hf", "hf, steps", "lightning"],
)
@pytest.mark.slow
def test_a_script(script: str, epochs: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _advice(tmp_path, script, "--json", str(tmp_path / "found.json")) == 0
    text = capsys.readouterr().out
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["epochs"] == epochs
    # Timed were two lengths, not those of the script.
    assert len(found["seconds_per_step"]) == 2
    assert found["compile_seconds"] > 0
    assert found["costs"][0]["bounds"] == [24]
    assert f"shapes={{'buckets': {found['recommended']}}}" in text


@pytest.mark.parametrize(
    ("script", "told"),
    [
        (_LIGHTNING.format(options=""), "no trainer of hf_trainer or lightning_strategy has chosen lengths in it"),
        (_LIGHTNING.format(options="shapes='auto'"), "its loss is your own code"),
        ("raise ValueError('no data')\n", "failed: ValueError: no data ("),
        pytest.param("raise SystemExit(3)\n", "failed: it ended with the exit status 3", marks=pytest.mark.long),
    ],
    ids=["no shapes", "no promise", "error", "exit"],
)
@pytest.mark.slow
def test_scripts_without_advice(script: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _advice(tmp_path, script) == 2
    assert told in capsys.readouterr().err


def test_costs() -> None:
    lengths = [10] * 8 + [100] * 8
    shapes = ShapePolicy(buckets=2).fit(lengths, rows=4)
    costs = costs_of(shapes, 4, 3, 5.0, lambda length: 0.1 * length)
    # More lengths than the data has change nothing.
    assert [(cost.bounds, cost.compiling) for cost in costs] == [((100,), 5.0), ((10, 100), 10.0)]
    assert [cost.stepping for cost in costs] == pytest.approx([3 * 4 * 10.0, 3 * 2 * 11.0])
    assert [cost.waste for cost in costs] == pytest.approx([0.45, 0])


@pytest.mark.parametrize(("compile_seconds", "best"), [(1.0, 2), (100.0, 1)])
def test_a_compile_that_costs_more_than_padding(compile_seconds: float, best: int) -> None:
    shapes = ShapePolicy(buckets=2).fit([10] * 8 + [100] * 8, rows=4)
    advice = ShapesAdvice(
        command="train.py",
        device="1 x cpu",
        epochs=3,
        compile_seconds=compile_seconds,
        seconds_per_step={10: 1.0, 100: 10.0},
        costs=costs_of(shapes, 4, 3, compile_seconds, lambda length: 0.1 * length),
    )
    assert len(advice.best.bounds) == best == advice.as_values()["recommended"]


def test_a_step_takes_at_least_the_share_of_its_length() -> None:
    seconds = _line_through({95: 0.21, 256: 0.79})
    assert seconds(95) == pytest.approx(0.21)
    assert seconds(256) == pytest.approx(0.79)
    assert seconds(38) == pytest.approx(0.21 * 38 / 95)
    constant = _line_through({10: 1.0, 100: 2.0})
    assert constant(1) == pytest.approx(0.9)
    assert _line_through({10: 1.0})(100) == 1.0


def test_as_good_with_fewer_is_better() -> None:
    shapes = ShapePolicy(buckets=3).fit([98, 99, 100] * 8, rows=8)
    costs = costs_of(shapes, 8, 1, 0.0, lambda length: float(length))
    advice = ShapesAdvice(
        command="", device="", epochs=1, compile_seconds=0.0, seconds_per_step={100: 1.0}, costs=costs
    )
    assert len(costs) == 3
    assert advice.best.bounds == (100,)
