"""Importing an adapter says which extra to install where its framework is missing, and which version was not tested."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tomllib
import warnings

import pytest

from hf_trainer import _requirements
from tests.architecture import ROOT
from xla_adapters.errors import LibraryVersionWarning
from xla_adapters.utils import patching

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


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


@pytest.mark.parametrize(("module", "said"), [("trl", "TRL"), ("sentence_transformers", "sentence-transformers")])
def test_the_extra_of_a_library_is_named(module: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_requirements, "find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, f"hf_trainer.{module}", raising=False)
    with pytest.raises(ImportError) as raised:
        importlib.import_module(f"hf_trainer.{module}")
    assert str(raised.value) == (
        f"hf_trainer.{module} needs {said}; install it with: pip install 'xla-adapters[ecosystem]'"
    )


@pytest.mark.parametrize(
    ("extra", "library", "untested"),
    [
        ("hf", "transformers", "5.0.3"),
        ("lightning", "lightning", "2.9.1"),
        ("ecosystem", "sentence_transformers", "1.0"),
    ],
)
def test_a_version_that_was_not_tested_is_named(
    extra: str, library: str, untested: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = library.replace("_", "-")
    (line,) = (line for line in EXTRAS[extra] if line.startswith(f"{name}>="))
    stated = [f'{line}; extra == "{extra}"', f'{name}==1.1; extra == "other"']
    monkeypatch.setattr(patching, "requires", lambda _: stated)
    monkeypatch.setattr(patching, "version", lambda _: untested)
    with pytest.warns(LibraryVersionWarning) as warned:
        patching.warn_of_untested(extra, [library])
    (one,) = warned
    assert f"{name} {untested} is installed; xla-adapters was tested with " in str(one.message)
    assert {*line.removeprefix(name).split(",")} == {*re.findall(r"[<>=]+[\d.]*\d", str(one.message))}
    assert f"pip install 'xla-adapters[{extra}]'" in str(one.message)


def test_nothing_is_said_of_the_versions_that_are_installed_here() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for extra, libraries in (("hf", ("transformers", "accelerate")), ("lightning", ("lightning",))):
            patching.warn_of_untested(extra, libraries)
