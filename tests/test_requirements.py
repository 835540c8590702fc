"""Importing an adapter without its framework says which extra to install."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib

import pytest

from tests.architecture import ROOT


@pytest.mark.parametrize(
    ("package", "missing", "extra"),
    [
        ("hf_trainer", "transformers", "xla-adapters[hf]"),
        ("hf_trainer", "accelerate", "xla-adapters[hf]"),
        ("hf_trainer.trl", "trl", "xla-adapters[ecosystem]"),
        ("hf_trainer.sentence_transformers", "sentence_transformers", "xla-adapters[ecosystem]"),
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


def test_the_versions_that_are_named_are_those_of_the_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["ecosystem"]
    for module, library in (("trl", "trl"), ("sentence_transformers", "sentence-transformers")):
        said = re.search(r'="[\w-]+ ([\d.]+)"\)', (ROOT / "hf_trainer" / f"{module}.py").read_text())
        (wanted,) = (extra for extra in extras if extra.startswith(library))
        assert said is not None
        assert re.search(r"[=>]=([\d]+\.[\d]+)", wanted)[1] == said[1]  # type: ignore[index]
