"""The benchmark of plans for TPUs: its targets and ratios, of rows that are given."""

from __future__ import annotations

import argparse
import json
import re
from importlib import util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import preflight, report, zoo
from benchmarks.preflight import Row, table_of, targets
from tests.isolation import isolated


def _row(plan: str, sent: float | None, *, chosen: bool = False, model: str = "m", **options: Any) -> Row:
    values = {"fits": True, "memory": 100.0, "predicted_memory": 100.0, **options}
    return Row(model=model, topology="v5e:2x4", plan=plan, mesh="data=8", chosen=chosen, sent=sent, **values)


def _targets(rows: list[Row]) -> dict[str, tuple[Any, bool]]:
    made = report.Report("preflight", settings={})
    targets(made, rows)
    return {item.name: (item.value, item.met) for item in made.targets}


def test_ours_is_compared_with_the_template_that_fits_and_sends_least() -> None:
    rows = [
        _row("planner", 8.0, chosen=True),
        _row("fsdp", 10.0),
        _row("tp", 4.0, fits=False),
        _row("dp", 40.0, chosen=True, model="other"),
        _row("fsdp", 20.0, model="other"),
    ]
    found = _targets(rows)
    assert found["sent, ours : best template that fits, geometric mean"] == (pytest.approx((0.8 * 2.0) ** 0.5), False)
    assert found["the same, the worst"] == (2.0, False)
    assert found["cells where something fits and ours does not"] == (0, True)


def test_a_cell_where_only_a_template_fits_is_counted() -> None:
    rows = [_row("planner", 8.0, chosen=True, fits=False), _row("fsdp", 10.0)]
    assert _targets(rows)["cells where something fits and ours does not"] == (1, False)


@pytest.mark.parametrize(("predicted", "near"), [(109.0, 1.0), (91.0, 1.0), (111.0, 0.5), (88.0, 0.5)])
def test_memory_is_near_within_a_tenth_of_what_is_compiled(predicted: float, near: float) -> None:
    rows = [_row("dp", 1.0, predicted_memory=predicted), _row("fsdp", 1.0), _row("tp", None, memory=None)]
    value, met = _targets(rows)["memory predicted within 10%, of all"]
    assert value == near
    assert met == (near >= 0.9)


def test_the_table_marks_what_was_chosen_and_says_why_something_is_missing() -> None:
    text = table_of([_row("planner", 2e6, chosen=True), _row("dp", None, fits=False, remark="more than a device has")])
    assert "planner *" in text
    assert "more than a device has" in text


def test_a_model_that_fits_nowhere_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise preflight.ConfigError("too little memory")

    monkeypatch.setattr(preflight, "make_plan", refuse)
    options = argparse.Namespace(layers=1, dtype="float32", top=1)
    (row,) = preflight.rows_of("gpt2", options, "v5e:2x4", None)  # type: ignore[arg-type]
    assert not row.fits
    assert row.remark == "too little memory"


@pytest.mark.slow
@pytest.mark.skipif(
    util.find_spec("libtpu") is None or util.find_spec("pypjrt") is None,
    reason='libtpu or pypjrt is not installed: pip install "xla-adapters[preflight]"',
)
def test_tiny_architectures_compile() -> None:
    arguments = ["--architectures", "DistilBERT,ResNet", "--topologies", "v5e:2x2", "--check"]
    assert preflight.main(arguments) == 0


def test_an_architecture_that_cannot_be_traced_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("this model reads")

    monkeypatch.setattr(preflight, "traced", refuse)
    options = SimpleNamespace(bf16=False, timeout=60)
    (row,) = preflight.rows_of_tiny(zoo.named("GPT-2")[0], options, "v5e:2x2", None)
    assert not row.fits
    assert "this model reads" in table_of([row])


@isolated
def test_predictions_are_a_table_of_models_and_slices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--predict", "--layers", "2", "--models", "gpt2,whisper", "--topologies", "v5e:2x2,v6e:2x2"]
    rows = ["--rows-each", "1", "--gradient-checkpointing", "--json", str(tmp_path / "found.json")]
    assert preflight.main([*command, *rows]) == 0
    head, _, gpt2, whisper = capsys.readouterr().out.splitlines()[:4]
    assert head == "| model | v5e:2x2 | v6e:2x2 |"
    assert re.fullmatch(r"\| gpt2 (\| (planner|dp|fsdp|tp|2d) \dx\d, \d+\.\d GB ){2}\|", gpt2)
    assert whisper.startswith("| whisper | ")
    cells = json.loads((tmp_path / "found.json").read_text())["results"]["cells"]
    assert [cell["rows"] for cell in cells] == [4] * 4


@isolated
def test_where_no_plan_fits_the_least_memory_is_said() -> None:
    options = argparse.Namespace(layers=2, dtype="float32", rows_each=4096, gradient_checkpointing=False)
    found = preflight.predicted("gpt2", "v5e:1x1", options)
    assert found.plan is None
    assert str(found) == f"no ({found.memory / 1e9:.1f} GB)"
    assert found.memory > 16e9
