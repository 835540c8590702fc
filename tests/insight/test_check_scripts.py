"""`xla-adapters check` on scripts as newcomers write them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from xla_adapters.tools import check_runner as runner

_SCRIPTS = Path(__file__).with_name("scripts")
_HF_OPTIONS = "--output_dir out --do_train --do_eval --per_device_train_batch_size 8 --dataloader_num_workers 2"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (f"stock_trainer.py {_HF_OPTIONS} --hidden_size 16", [("last batch", 74)]),
        ("stock_lightning.py --workers 2", []),
        ("stock_fabric.py", []),
        ("-m package.train --epochs 3", []),
        ("stock_sft.py", []),
        (
            "three_faults.py --lr 0.01",
            [("graph break", 33), ("host operator", 31), ("host operator", 34), ("last batch", 27), ("on a TPU", 31)],
        ),
    ],
)
def test_a_script(
    command: str, expected: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # The scripts import each other's neighbours, use argparse and HfArgumentParser, and have workers.
    shutil.copytree(_SCRIPTS, tmp_path / "scripts")
    monkeypatch.chdir(tmp_path / "scripts")
    before = sorted(path for path in tmp_path.rglob("*") if "__pycache__" not in str(path))
    report = runner.check_script(command.split())
    text = report.text()
    assert not report.failure, text
    assert report.facts.done == 8, text
    assert [(item.kind, item.place.line) for item in report.findings if item.is_problem] == expected, text
    assert sorted(path for path in tmp_path.rglob("*") if "__pycache__" not in str(path)) == before
