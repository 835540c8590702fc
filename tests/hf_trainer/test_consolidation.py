"""Consolidated weights have the names in the model, not those in the files of transformers, which reads both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hf_trainer.sharded_models import MODELS, model
from tests.isolation import isolated
from xla_adapters.sharding.state import consolidate, model_state, save_state


@pytest.mark.parametrize("name", MODELS)
@isolated
def test_from_pretrained_reads_them(name: str, tmp_path: Path) -> None:
    saved: Any = model(name)
    save_state({"model": model_state(saved)}, tmp_path / "parts")
    saved.config.save_pretrained(tmp_path / "whole")
    consolidate(tmp_path / "parts", tmp_path / "whole")
    loaded: Any = type(saved).from_pretrained(tmp_path / "whole")
    for key, value in saved.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value), key
