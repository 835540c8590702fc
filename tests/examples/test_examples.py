"""Each example runs, at a small size."""

from __future__ import annotations

import math
from pathlib import Path

from tests.isolation import isolated


@isolated(timeout=400)
def test_byte_lm(tmp_path: Path) -> None:
    from examples import byte_lm

    small = ["--steps", "8", "--batch", "4", "--block", "32", "--width", "32", "--layers", "1"]
    metrics = byte_lm.main([*small, "--characters", "60000", "--output-dir", str(tmp_path)])
    assert metrics["eval_loss"] < math.log(384)
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-4", "checkpoint-8"}


@isolated(timeout=400)
def test_lightning_gpt_goes_on_from_where_it_stopped(tmp_path: Path) -> None:
    from examples import lightning_gpt

    small = ["--batch", "4", "--block", "32", "--width", "32", "--layers", "1", "--characters", "60000"]
    small += ["--save-every", "2", "--output-dir"]
    whole = lightning_gpt.main([*small, str(tmp_path / "whole"), "--steps", "4"])
    lightning_gpt.main([*small, str(tmp_path / "parts"), "--steps", "2"])
    resumed = lightning_gpt.main([*small, str(tmp_path / "parts"), "--steps", "4", "--resume"])
    assert resumed["steps"] == whole["steps"] == 4
    assert resumed["loss"] == whole["loss"]
