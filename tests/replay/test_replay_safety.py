"""The analysis of a step's code by itself: what it lets pass, what it refuses, what it guards. Nothing is traced."""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import math
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from xla_adapters import replay_safe
from xla_adapters.replay import safety
from xla_adapters.replay.safety import MODULE_CALLS, Analysis, Batch, FrameworkModel, Value, Verdict, analyze, nothing

_FRAMEWORK = FrameworkModel(calls=MODULE_CALLS, properties=dict.fromkeys(("device", "dtype"), nothing))
_META = torch.device("meta")


def _verdict(function: Callable[..., Any], arguments: int = 1) -> Verdict:
    def examine(analysis: Analysis) -> None:
        analysis.check_returned(analysis.examine(function, [Value((Batch(),))] * arguments))

    return analyze(examine, _FRAMEWORK)


class _Kind(enum.Enum):
    TRAIN = "train"
    TEST = "test"


class _Talking(enum.Enum):
    ONE = 1

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


@dataclasses.dataclass
class _Stage:
    warm: bool = True
    scale: float = 0.5


class _Helper:
    def __init__(self) -> None:
        self.model, self.kind, self.stage = nn.Linear(4, 2, device=_META), _Kind.TRAIN, _Stage()
        self.weights, self.table, self.stages = [0.5, 1.0], {"a": 1.0}, [_Stage()]

    def loss(self, batch: Any) -> torch.Tensor:
        return self.model(batch).sum() * self.stage.scale

    @property
    def doubled(self) -> float:
        return 2.0


class _WithGetattr:
    def __getattr__(self, name: str) -> float:
        return 1.0


class _Meta(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return True


class _Instance(metaclass=_Meta):
    pass


class _AttrDict(dict[str, float]):
    __getattr__ = dict.__getitem__


class _Slot:
    def __get__(self, owner: Any, kind: Any = None) -> float:
        return 1.0

    def __set__(self, owner: Any, value: float) -> None:
        pass


class _WithDescriptor:
    slot = _Slot()


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.heads = nn.Linear(4, 4), nn.ModuleDict({"a": nn.Linear(4, 2)})
        self.layers, self.slope = nn.ModuleList([nn.Linear(4, 4)]), np.float32(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.leaky_relu(layer(self.inner(x)), self.slope)
        return sum(head(x).mean() for head in self.heads.values())  # type: ignore[return-value]


class _Counting(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = 1
        return x


class _Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


_helper = _Helper()
_model, _scaled, _counting = (nn.Linear(4, 2, device=_META), _Scaled().to(_META), _Counting())
_weights = torch.ones(2, device=_META)
_adamw, _own = torch.optim.AdamW(_model.parameters()), type("Own", (torch.optim.SGD,), {})(_model.parameters(), lr=0.1)
_history: list[float] = []
_attributes, _getattr, _described = _AttrDict(a=1.0), _WithGetattr(), _WithDescriptor()
_functions = {"relu": F.relu, "own": lambda x: x * 2}
_namespace = types.SimpleNamespace(noise=0.5)


@replay_safe
def _promised(x: torch.Tensor) -> torch.Tensor:
    print("left out")
    return x


def _train(b: Any) -> Any:
    loss = F.cross_entropy(_model(b["x"]), b["y"], weight=_weights)
    loss.backward()
    nn.utils.clip_grad_norm_(_model.parameters(), 1.0)
    _adamw.step()
    _adamw.zero_grad()
    return {"loss": loss.detach(), "kind": _helper.kind.value}


def _branches(b: Any) -> Any:
    if _helper.stage.warm and _helper.kind is _Kind.TRAIN:
        return b.sum() * math.sqrt(2)
    print("never")
    return None


def _loops(b: Any) -> Any:
    total = 0.0
    for weight, (name, value) in zip(_helper.weights, _helper.table.items(), strict=False):
        total = total + weight * value * len(name)
    with torch.no_grad():
        parts = [part.mean() for part in torch.chunk(b, 2) if part.ndim > 0]
    return sum(parts) + total


def _scale_of(stage: _Stage) -> float:
    return stage.scale


_SAFE: list[Callable[..., Any]] = [
    _train,
    _branches,
    _loops,
    _helper.loss,
    lambda b: _scaled(b),
    lambda b: _functions["relu"](b) + _functions["own"](b),
    lambda b: _promised(b) * _namespace.noise,
    lambda b: nn.CrossEntropyLoss(label_smoothing=0.1)(b, b),
    lambda b: {**b, "more": b["x"].shape[0]},
    lambda b: isinstance(b, torch.Tensor),
    lambda b: f"{_helper.kind.value}_loss",
    lambda b: getattr(_helper, "weights")[0] * b,  # noqa: B009 (what people write with a name from elsewhere)
]


@pytest.mark.parametrize("function", _SAFE, ids=lambda function: function.__qualname__)
def test_what_may_be_left_out(function: Callable[..., Any]) -> None:
    verdict = _verdict(function)
    assert verdict.reason is None
    assert verdict.guards.changed() is None


class _Storing:
    """Has a `__setattr__` of its own."""

    def __init__(self) -> None:
        vars(self)["table"] = torch.ones(2, device=_META)

    def __setattr__(self, name: str, value: Any) -> None:
        _history.append(1.0)


class _Moving:
    def __init__(self) -> None:
        self.table = torch.ones(2, device=_META)


_storing, _moving = _Storing(), _Moving()


def _moves(b: Any) -> Any:
    _moving.table = _moving.table.to(_META)
    return b * _moving.table


def _moves_the_batch(b: Any) -> None:
    b.x = b.x.to(_META)


def _moves_by_code_of_its_own(b: Any) -> None:
    _storing.table = _storing.table.to(_META)


def _moves_no_tensor(b: Any) -> None:
    _helper.table = _helper.table.to(_META)


def test_a_tensor_may_be_moved_where_it_is() -> None:
    assert _verdict(_moves).reason is None


_REFUSED: list[tuple[str, Callable[..., Any]]] = [
    ("it calls _Stage", lambda b: b * (0.1 if _helper.stages == [_Stage()] else 1.0)),
    ("it computes with a list", lambda b: b * (0.1 if _helper.stages else 1.0)),
    ("it computes with a _Stage", lambda b: b * (_helper.stage == 1)),
    ("it computes with a _Talking", lambda b: b * (_Talking.ONE == 1)),
    ("it hands a list", lambda b: b * any(_helper.stages)),
    ("it uses map", lambda b: sum(map(_scale_of, _helper.stages)) * b),
    ("it uses filter", lambda b: len(list(filter(None, _helper.stages))) * b),
    ("an expression that is not followed", lambda b: sorted(b, key=lambda item: item)),
    ("it reads the property", lambda b: b * _helper.doubled),
    ("by a __getattr__ of its own", lambda b: b * _getattr.scale),
    ("which is not there", lambda b: b * _attributes.a),
    ("by a descriptor", lambda b: b * _described.slot),
    ("it hands _Instance", lambda b: isinstance(b, _Instance)),
    ("it sets self.calls", lambda b: _counting(b)),
    ("it sets b.x", _moves_the_batch),
    ("it sets _storing.table", _moves_by_code_of_its_own),
    ("it sets _helper.table", _moves_no_tensor),
    ("it uses Own", lambda b: _own.step()),
    ("it changes a list", lambda b: _history.append(b)),
    ("it uses print", lambda b: print(b)),
    ("it calls b.noisy()", lambda b: b.noisy()),
    ("it changes the batch", lambda b: b.pop("x")),
    ("it calls functools.partial", lambda b: functools.partial(F.relu)(b)),
    ("it returns", lambda b: _helper.stages),
    ("it calls b.register_hook", lambda b: b.register_hook(F.relu)),
    ("it calls b.item()", lambda b: b.item()),
]


def test_what_is_refused_with_the_reason() -> None:
    for reason, function in _REFUSED:
        found = _verdict(function).reason
        assert found is not None, reason
        assert reason in found, (reason, found)


def test_every_use_of_what_varies_is_refused() -> None:
    varying = Value((safety.Varying("batch_idx"),))

    def used(b: Any, index: int) -> Any:
        return b * index

    def tested(b: Any, index: int) -> Any:
        return b if index % 2 == 0 else -b

    def handed_on(b: Any, index: int) -> Any:
        return tested(b, index)

    def returned(b: Any, index: int) -> Any:
        return [index]

    def unused(b: Any, index: int) -> Any:
        return b

    for function in (used, tested, handed_on, returned, unused):

        def examine(analysis: Analysis, function: Callable[..., Any] = function) -> None:
            analysis.check_returned(analysis.examine(function, [Value((Batch(),)), varying]))

        reason = analyze(examine, _FRAMEWORK).reason
        assert (reason is None) == (function is unused), (function.__name__, reason)
        assert reason is None or "batch_idx, which differs from step to step" in reason


def test_what_is_read_is_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(b: Any) -> Any:
        return _loops(b) + _helper.stage.scale * _namespace.noise + _model(b).sum() * _weights.sum()

    changes: list[Callable[[], None]] = [
        lambda: monkeypatch.setattr(_helper.stage, "scale", 0.25),
        lambda: monkeypatch.setitem(_helper.table, "a", 2.0),
        lambda: monkeypatch.setattr(_helper, "weights", [0.5, 1.0, 1.0]),
        lambda: monkeypatch.setattr(_namespace, "noise", 1),
        lambda: monkeypatch.setattr(_helper, "stage", _Stage(scale=0.1)),
        lambda: monkeypatch.setitem(globals(), "_weights", torch.ones(2, device=_META)),
        lambda: monkeypatch.setattr(_loops, "__code__", _branches.__code__),
        lambda: monkeypatch.setattr(_Stage, "scale", property(lambda self: 0.1)),
        lambda: monkeypatch.setitem(globals(), "_loops", _branches),
    ]
    for change in changes:
        verdict = _verdict(function)
        assert verdict.reason is None
        assert list(map(id, verdict.tensors)) == [id(_weights)]
        change()
        assert verdict.guards.changed() is not None
        monkeypatch.undo()
        assert verdict.guards.changed() is None


def test_containers_are_compared_though_they_stay_the_same_object() -> None:
    table = {"rates": [0.1, 0.2], "kinds": (1, 2)}
    verdict = _verdict(lambda b: b * table["rates"][0])
    assert verdict.guards.changed() is None
    table["rates"].append(0.3)  # type: ignore[attr-defined]
    assert verdict.guards.changed() is not None


def test_code_that_was_written_to_after_it_was_loaded(tmp_path: Path) -> None:
    program = (
        "import sys, os, time; sys.path.insert(0, '.')\n"
        "from xla_adapters.replay.safety import *\n"
        "import written\n"
        "def reason(): return analyze(lambda a: a.examine(written.step), FrameworkModel()).reason\n"
        "os.utime('written.py', (time.time() - 100,) * 2)\n"
        "import xla_adapters.replay.safety.analysis as analysis\n"
        "assert reason() is None, reason()\n"
        "analysis._source_of.cache_clear()\n"
        "os.utime('written.py', (time.time() + 100,) * 2)\n"
        "assert 'written to' in reason(), reason()\n"
    )
    (tmp_path / "written.py").write_text("def step(b=None):\n    return b\n")
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_package_knows_nothing_of_xla() -> None:
    folder = Path(str(safety.__file__)).parent
    for file in folder.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.startswith(("torch_xla", "xla_adapters.runtime")) for name in names), file
