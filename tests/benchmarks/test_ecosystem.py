"""A selection of the table of trainers and models, and what a row says of its runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks import report

for _library in ("diffusers", "lightning", "peft", "sentence_transformers", "timm", "torch_geometric", "trl"):
    pytest.importorskip(_library)

from benchmarks.ecosystem import __main__ as ecosystem  # noqa: E402 (needs these libraries)
from benchmarks.ecosystem import cell, table, with_lightning  # noqa: E402
from benchmarks.zoo import Model  # noqa: E402
from xla_adapters.errors import GraphBreakError, TensorReadError  # noqa: E402

_WHOLE = (
    "Seq2SeqTrainer x seq2seq (T5)",
    "PEFT DoRA x decoder (Llama)",
    "TRL DPO x decoder",
    "sentence-transformers x encoder, ranking loss",
    "Lightning x timm ViT",
    "Fabric x PyG GCN",
)


class Reading(nn.Module):
    """Reads a value in the middle of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.layer(x)
        return {"loss": hidden.square().mean() * (2 if hidden.sum().item() > 0 else 3)}


def _rows(path: Path) -> dict[str, Any]:
    rows = json.loads(path.read_text())["results"]["rows"]
    return {f"{row['trainer']} x {row['model']}": row for row in rows}


def _use(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    cells = [one for one in table.cells() if one.name in names]
    assert len(cells) == len(names)
    monkeypatch.setattr(ecosystem, "cells", lambda: cells)


@pytest.mark.slow
def test_a_cell_of_each_library_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _use(monkeypatch, *_WHOLE)
    path = tmp_path / "e.json"
    assert ecosystem.main(["--check", "--json", str(path)]) == 0
    rows = _rows(path)
    assert set(rows) == set(_WHOLE)
    for name, row in rows.items():
        assert (row["executions"], row["error"], row["refused"]) == (1, None, None), name
        assert row["loss_difference"] <= cell.LOSS_LIMIT, name
        assert row["weight_difference"] <= cell.WEIGHT_LIMIT, name


@pytest.mark.parametrize(("flag", "name"), [("--architectures", "gpt-2"), ("--bf16", "llama")])
def test_an_architecture_trains(flag: str, name: str, tmp_path: Path) -> None:
    """Of Llama under autocast attention has float32 queries and keys, and bfloat16 values."""
    path = tmp_path / "a.json"
    assert ecosystem.main([flag, "--only", name, "--check", "--json", str(path)]) == 0
    (row,) = _rows(path).values()
    assert row["compiles"] == row["executions"] == 1
    limits = (1e-5, cell.BF16_LIMIT) if flag == "--bf16" else (0, 1e-5)
    assert limits[0] <= row["loss_difference"] <= limits[1]


def test_a_cell_that_is_refused_trains_in_pieces_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reads = Model("reads", Reading, lambda generator: {"x": torch.randn(4, 2, generator=generator)})
    monkeypatch.setattr(ecosystem, "cells", lambda: with_lightning.fabric((reads,)))
    path = tmp_path / "e.json"
    assert ecosystem.main(["--check", "--json", str(path)]) == 1
    row = _rows(path)["Fabric x reads"]
    assert row["refused"].startswith("TensorReadError: ")
    assert "test_ecosystem.py:" in row["refused"]
    assert row["error"] is None
    assert row["executions"] > 1
    assert row["equal"]
    assert row["refused"] in capsys.readouterr().out


def _trained(**changes: Any) -> cell.Trained:
    values: dict[str, Any] = {
        "losses": [1.0] * cell.STEPS,
        "weights": {"weight": np.array([1.0, 2.0], np.float32)},
        "executions": [1] * cell.STEPS,
    }
    return cell.Trained(**{**values, **changes})


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, None),
        ({"executions": [1, 1, 3, 1, 1, 1]}, "3 executions in a step"),
        ({"losses": [1.0] * 5 + [1.1]}, "differs from the CPU by 0.1"),
        ({"losses": [1.0] * 5 + [float("nan")]}, "differs from the CPU by nan"),
        ({"losses": [1.0]}, "differs from the CPU by None"),
        ({"weights": {"weight": np.array([1.0, 2.5], np.float32)}}, "0.5 (weights)"),
        ({"weights": {}}, "None (weights)"),
    ],
)
def test_a_row_says_what_is_wrong(change: dict[str, Any], why: str | None) -> None:
    row = cell.Row("trainer", "model")
    row.take(_trained(**change), _trained(executions=[]))
    assert row.single_execution is ("executions" not in change)
    assert row.why is None if why is None else why in str(row.why)


def test_a_refusal_is_one_line_without_folders_of_the_machine() -> None:
    error = TensorReadError("tensor read in it: .item()\n  where: /a/b/site-packages/library/file.py:7 in f\n")

    def refuse(_: Any) -> cell.Trained:
        raise error

    found = cell._outcome_of(refuse, "error")
    assert found == cell.Refused("TensorReadError: tensor read in it: .item() (at library/file.py:7 in f)")


def test_targets_come_from_the_rows() -> None:
    good, crashed, refused = (cell.Row("t", name) for name in ("good", "crashed", "refused"))
    for row in (good, refused):
        row.take(_trained(), _trained())
    crashed.error = "ValueError: it broke"
    refused.refused = f"{GraphBreakError.__name__}: a boolean index"
    made = report.Report("ecosystem")
    ecosystem.add_targets(made, [good, crashed, refused])
    assert [(target.value, target.met) for target in made.targets] == [
        (1 / 3, False),
        (1, False),
        (2, False),
        (0, True),
    ]
    text = cell.table_of([good, crashed, refused])
    assert "t x crashed: crashed: ValueError: it broke" in text
    assert "t x refused: GraphBreakError: a boolean index" in text
    assert "| t | good | 0 | 1 | 0e+00 | 0e+00 | no | yes |" in cell.markdown([good])


def test_a_name_that_matches_no_cell_lists_those_that_are() -> None:
    with pytest.raises(ValueError, match="Lightning x timm ViT"):
        ecosystem.named("nothing like it", table.cells())
