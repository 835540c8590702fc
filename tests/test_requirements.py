"""Importing an adapter without its framework says which extra to install."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("package", "missing", "extra"),
    [
        ("hf_trainer", "transformers", "xla-adapters[hf]"),
        ("hf_trainer", "accelerate", "xla-adapters[hf]"),
        ("lightning_strategy", "lightning", "xla-adapters[lightning]"),
    ],
)
def test_the_extra_is_named(package: str, missing: str, extra: str) -> None:
    hidden = (
        "import importlib.util as util; found = util.find_spec; "
        f"util.find_spec = lambda name, *more: None if name == {missing!r} else found(name, *more); "
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{hidden}import {package}"], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 1
    assert f"pip install '{extra}'" in done.stderr.splitlines()[-1]
