"""How a line writes what a call gets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from xla_adapters.utils.location import argument_text


@pytest.mark.parametrize(
    ("line", "function", "index", "text"),
    [
        ("x = batch['image'].float()", torch.Tensor.float, 0, "batch['image']"),
        ("x = self.scale.mul(other[0])", torch.Tensor.mul, 1, "other[0]"),
        ("x = torch.where(mask, 0, x)", torch.where, 2, "x"),
        ("x = F.relu(hidden)", torch.nn.functional.relu, 0, "hidden"),
        ("x = a.float() + b.float()", torch.Tensor.float, 0, ""),
        ("x = model(", torch.nn.functional.linear, 0, ""),
        ("x = torch.relu(hidden)", torch.relu, 1, ""),
        ("x = a @ b", torch.Tensor.__matmul__, 0, ""),
    ],
)
def test_what_a_call_gets(line: str, function: Callable[..., Any], index: int, text: str, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(f"import torch\n    {line}\n")
    assert argument_text(str(file), 2, function, index) == text
