"""How a few operators of each kind are told apart, and what a row and the targets make of it."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks import report
from benchmarks.operators import __main__ as operators
from benchmarks.operators import cases, measure
from benchmarks.operators.cases import Case, Sample, calls_of, choose
from benchmarks.operators.measure import LIMIT, Found, Row, failed, measure_sample, row_of
from tests.isolation import isolated


def _found(operator: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Found:
    sample = Sample(call, args, kwargs)
    calls = calls_of(sample)
    backward = operator in calls.backward and operator not in calls.forward
    return measure_sample(operator, Case(0, 0, backward, calls.differentiates), sample, "here")


def _values() -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()


@isolated
def test_each_kind_is_told_from_the_others() -> None:
    own = _found("exp", torch.exp, _values())
    assert (own.forward, own.backward, own.why) == ("in the graph", "in the graph", None)
    assert own.difference is not None
    assert own.difference <= LIMIT
    other = _found("isinf", torch.isinf, _values())
    assert (other.forward, other.backward) == ("by decomposition", None)
    assert "abs" in other.kernels
    backward = _found("embedding_dense_backward", torch.nn.functional.embedding, torch.arange(3), _values())
    assert backward.backward == "in the graph"
    dynamic = _found("nonzero", torch.nonzero, _values())
    assert dynamic.forward == "on the host"
    assert "nonzero" in str(dynamic.why)
    host = _found("linalg_eig", torch.linalg.eigvals, torch.eye(3))
    assert host.forward == "on the host"
    assert "linalg_eig" in str(host.why)
    in_backward = _found("relu", _HostInBackward.apply, _values())
    assert (in_backward.forward, in_backward.backward) == ("in the graph", "on the host")


class _HostInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.relu()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * torch.linalg.eigvals(gradients[0][:, :3]).real.sum()


def _wrong(value: torch.Tensor, by: float) -> torch.Tensor:
    return value.exp() * (1 + by if value.device.type == "xla" else 1)


def _raises(value: torch.Tensor) -> torch.Tensor:
    if value.device.type == "xla":
        raise RuntimeError("no kernel\nand more")
    return value.exp()


@isolated
def test_what_differs_or_fails_is_said() -> None:
    slightly = _found("exp", functools.partial(_wrong, by=1e-3), _values())
    assert slightly.difference == pytest.approx(1e-3, rel=0.05)
    assert "in place of" in str(slightly.why)
    assert row_of("exp", [slightly]).differs
    missing = _found("exp", functools.partial(_wrong, by=float("nan")), _values())
    assert missing.difference == float("inf")
    shape = _found("exp", lambda x: x.exp()[: 2 if x.device.type == "xla" else 3], _values().detach())
    assert shape.difference == float("inf")
    fails = _found("exp", _raises, _values())
    assert (fails.forward, fails.why) == ("fails", "RuntimeError: no kernel")


@isolated
def test_random_operators_are_compared_by_shape() -> None:
    found = _found("rand", torch.rand, (3, 4), device=torch.device("cpu"))
    assert (found.difference, found.why) == (None, None)
    assert cases.without_values("rand") == "random"
    assert cases.without_values("exp") is None
    wrong = _found("rand", lambda n, device: torch.rand(n + (device.type == "xla"), device=device), 3, device="cpu")
    assert wrong.difference == float("inf")


def test_a_process_that_dies_costs_one_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails_once(name: str, case: Case) -> Found:
        if name == "exp":
            os.kill(os.getpid(), signal.SIGKILL)
        return Found("here", forward="in the graph", difference=0.0)

    monkeypatch.setattr(measure, "measure", fails_once)
    found = list(measure.rows({name: [Case(0, 0, False, False)] for name in ("abs", "exp", "log")}, 60))
    assert [(row.operator, row.how) for row in found] == [
        ("abs", "in the graph"),
        ("exp", "fails"),
        ("log", "in the graph"),
    ]
    assert "signal 9" in found[1].notes[0]


@isolated
def test_samples_call_their_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("expecttest")
    chosen = [source for source in cases.sources() if "exp" in source.operators or source.direct]
    monkeypatch.setattr(cases, "sources", lambda: chosen)
    found = choose(["exp", "sym_size", "no such operator"])
    assert all(found[name] for name in ("exp", "sym_size"))
    assert found["no such operator"] == []
    for case in found["exp"]:
        source = chosen[case.source]
        assert "exp" in calls_of(list(source.samples())[case.sample]).forward


def test_the_worst_sample_decides_and_targets_count_every_operator() -> None:
    good, wrong = Found("a", "in the graph", "in the graph", None, 1e-7), Found("a", "in the graph", None, "x", 1e-3)
    host = Found("a", "in the graph", "on the host", "HostOperatorError: why")
    rows = [
        row_of("abs", [good]),
        row_of("acos", [good, wrong]),
        row_of("add", [good, host]),
        failed("amax", "died", 2),
        row_of("any", []),
    ]
    assert [row.how for row in rows] == ["in the graph", "in the graph", "on the host", "fails", None]
    made = report.Report("operators")
    operators.add_targets(made, rows)
    assert [(target.value, target.met) for target in made.targets] == [(2 / 5, False), (1, False), (1, False)]
    text = measure.table_of(rows)
    assert "add: HostOperatorError: why (1 of 2 samples)" in text
    assert text.count("MISSED") == 3
    assert "| any | 0 | - | - | - | not tried |" in measure.markdown(rows)
    everything = report.Report("operators")
    operators.add_targets(everything, [Row("abs", 1, forward="in the graph", difference=0.0)])
    assert all(target.met for target in everything.targets)


def test_a_name_that_is_no_core_operator_lists_those_that_are() -> None:
    assert operators.named("exp, log") == ["exp", "log"]
    with pytest.raises(ValueError, match="convolution_backward"):
        operators.named("expp")
