"""`profile_steps` of the strategies: files below `default_root_dir`, also after an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_strategy import XLAEagerStrategy
from tests.isolation import isolated
from tests.lightning_strategy.scenarios import Classifier, fit
from xla_adapters import XLAConfig, get_runtime


class _Fails(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 3:
            raise KeyError("by the user")
        return super().training_step(batch, batch_idx)


def _sizes(folder: Path) -> list[int]:
    return [path.stat().st_size for path in (folder / "xla-profile").rglob("*") if path.is_file()]


@isolated
def test_a_profile_lies_in_the_root_folder(tmp_path: Path) -> None:
    strategy = XLAEagerStrategy(config=XLAConfig(profile_steps=(2, 4)))
    ours = fit(Classifier, strategy, max_epochs=1, default_root_dir=tmp_path)
    assert ours.counters.executions == 6
    assert len(_sizes(tmp_path)) == 2
    assert all(_sizes(tmp_path))


@isolated
def test_an_error_in_a_profiled_step_leaves_no_open_profile(tmp_path: Path) -> None:
    strategy = XLAEagerStrategy(config=XLAConfig(profile_steps=(2, 5)))
    with pytest.raises(KeyError, match="by the user"):
        fit(_Fails, strategy, max_epochs=1, default_root_dir=tmp_path)
    assert len(_sizes(tmp_path)) == 2
    device = get_runtime().device
    assert device.start_profile(str(tmp_path / "next"))
    device.stop_profile()
