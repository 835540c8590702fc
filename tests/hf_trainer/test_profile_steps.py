"""`profile_steps` in the Trainer: files in the output folder, also after an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from tests.hf_trainer.scenarios import arguments, gpt2, ours, token_samples
from tests.isolation import isolated
from xla_adapters import XLAConfig, get_runtime


class _Fails(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 4:
            raise KeyError("by the user")


def _sizes(folder: Path) -> list[int]:
    return [path.stat().st_size for path in (folder / "xla-profile").rglob("*") if path.is_file()]


@isolated
def test_a_profile_lies_in_the_output_folder(tmp_path: Path) -> None:
    args = arguments(str(tmp_path), max_steps=8)
    run = ours(gpt2(), token_samples(40), args=args, xla_args=XLAConfig(profile_steps=(3, 6)))
    assert [step.executions for step in run.steps] == [1] * 8
    assert len(_sizes(tmp_path)) == 2
    assert all(_sizes(tmp_path))


@isolated
def test_an_error_between_two_profiled_steps_leaves_no_open_profile(tmp_path: Path) -> None:
    args = arguments(str(tmp_path), max_steps=8)
    options = {"xla_args": XLAConfig(profile_steps=(3, 6)), "callbacks": [_Fails()]}
    with pytest.raises(KeyError, match="by the user"):
        ours(gpt2(), token_samples(40), args=args, **options)
    assert len(_sizes(tmp_path)) == 2
    device = get_runtime().device
    assert device.start_profile(str(tmp_path / "next"))
    device.stop_profile()
