"""What the proof makes of a step's source, nothing being run."""

from __future__ import annotations

import functools
import importlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.isolation import isolated
from xla_adapters import CompiledStep
from xla_adapters.replay.effects import Proof
from xla_adapters.replay.outside import OF_MODULES, Batch, Knowledge, Unproven, Value
from xla_adapters.replay.sources import source_of


def _prove(function: Callable[..., Any], *arguments: Value) -> None:
    Proof(Knowledge(packages=None, calls=OF_MODULES)).examine(function, [Value((Batch(),)), *arguments])


def _keeps_what_varies(inputs: Any, number: int) -> Any:
    found = {}
    found["number"] = number
    return inputs * 2 if found["number"] % 2 else inputs


def _slices_what_varies(inputs: Any, number: int) -> Any:
    found: list[int] = []
    found[:] = [number]
    return inputs * 2 if found[0] else inputs


@isolated
def test_what_varies_does_not_hide_in_containers() -> None:
    for function in (_keeps_what_varies, _slices_what_varies):
        with pytest.raises(Unproven, match="it looks at the number"):
            _prove(function, Value((), "the number"))


class _Loader:
    """Modules of one's own, written to a file and imported."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def write(self, name: str, text: str, *, seconds: int = 0) -> None:
        path = self.folder / f"{name}.py"
        path.write_text(text)
        moment = time.time() + seconds
        os.utime(path, (moment, moment))

    def load(self, name: str, text: str) -> Any:
        self.write(name, text)
        importlib.invalidate_caches()
        sys.path.insert(0, str(self.folder))
        try:
            return importlib.import_module(name)
        finally:
            sys.path.remove(str(self.folder))
            del sys.modules[name]


_TRACED = "LOG = []\ndef step(inputs):\n    LOG.append(1)\n    return inputs\n"


@isolated
def test_files_that_were_edited_since_they_were_loaded() -> None:
    with tempfile.TemporaryDirectory() as folder:
        loader = _Loader(folder)
        module = loader.load("edited_before", _TRACED)
        loader.write("edited_before", _TRACED.replace("LOG.append(1)", "pass"), seconds=5)
        with pytest.raises(Unproven, match="was edited after step was loaded"):
            _prove(module.step)
        module = loader.load("edited_behind", _TRACED)
        for seconds in (0, 5):
            # What was read before the edit is what runs.
            with pytest.raises(Unproven, match="append"):
                _prove(module.step)
            loader.write("edited_behind", _TRACED.replace("LOG.append(1)", "pass"), seconds=seconds + 5)
        # Its code is equal to that of another file, and is still its own.
        assert "copied.py" in source_of(loader.load("copied", _TRACED).step)[1]
        plain = _TRACED.replace("LOG.append(1)", "pass")
        module = loader.load("edited_elsewhere", plain)
        loader.write("edited_elsewhere", plain + "\n\nOTHER = 1\n", seconds=5)
        _prove(module.step)


@isolated
def test_text_at_the_margin_and_code_that_nests_too_deeply() -> None:
    with tempfile.TemporaryDirectory() as folder:
        loader = _Loader(folder)
        text = 'class Own:\n    def step(self, inputs):\n        """\nAt the margin.\n"""\n        return inputs\n'
        _prove(loader.load("at_the_margin", text).Own().step)
        deep = loader.load("deep", f"def step(inputs):\n    return {' + '.join(['inputs'] * 900)}\n")
        with pytest.raises(RecursionError):
            _prove(deep.step)
        compiled = CompiledStep(deep.step)
        compiled(torch.ones(2))
        assert any("nests too deeply" in reason for reason in compiled.reasons), compiled.reasons


class _Mangled:
    def __init__(self) -> None:
        self.__scale = 2.0

    def step(self, inputs: Any) -> Any:
        return inputs * self.__scale


def _bound_later(inputs: Any) -> Any:
    for index in range(3):
        if index:
            inputs = inputs + former  # noqa: F821
        former = inputs * 2  # noqa: F841
    return inputs


def _importing(inputs: Any) -> Any:
    import math
    from math import pi

    return inputs * math.e * pi


class _Head(nn.TransformerEncoderLayer):
    def __init__(self) -> None:
        super().__init__(4, 2, 8)
        self.act = functools.partial(nn.functional.gelu, approximate="tanh")

    def extra_repr(self) -> str:
        return f"of {type(self).__name__}"

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        print("saved")
        return super().state_dict(*arguments, **options)

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.norm1.eval()
        return self

    def _ff_block(self, x: torch.Tensor) -> torch.Tensor:
        return super()._ff_block(x) * 1.0


_head = _Head()


def _uses_a_head(inputs: Any) -> Any:
    return _head.act(_head(inputs))


@isolated
def test_code_without_effects() -> None:
    for function in (_Mangled().step, _bound_later, _importing, _uses_a_head):
        _prove(function)
