"""Importing an adapter without its framework says which extra to install."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tomllib

import pytest

from hf_trainer import _requirements
from tests.architecture import ROOT


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


@pytest.mark.parametrize(
    ("module", "said"), [("trl", "TRL 1.16"), ("sentence_transformers", "sentence-transformers 6.2")]
)
def test_the_extra_of_a_library_is_named(module: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_requirements, "find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, f"hf_trainer.{module}", raising=False)
    with pytest.raises(ImportError) as raised:
        importlib.import_module(f"hf_trainer.{module}")
    assert str(raised.value) == (
        f"hf_trainer.{module} needs {said}; install it with: pip install 'xla-adapters[ecosystem]'"
    )


def test_the_versions_that_are_named_are_those_of_the_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["ecosystem"]
    for module, library in (("trl", "trl"), ("sentence_transformers", "sentence-transformers")):
        said = re.search(r'="[\w-]+ ([\d.]+)"\)', (ROOT / "hf_trainer" / f"{module}.py").read_text())
        (wanted,) = (extra for extra in extras if extra.startswith(library))
        assert said is not None
        assert re.search(r"[=>]=([\d]+\.[\d]+)", wanted)[1] == said[1]  # type: ignore[index]
