"""`torch.func.linearize` calls the tracer through `eager_transforms.lazy_dynamo_disallow`, and takes a graph of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._functorch import eager_transforms


def test_it_calls_the_tracer_through_this_function(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def disallow(function: Callable[..., Any]) -> Any:
        asked.append(function)
        if function is not eager_transforms.make_fx:
            return function

        def trace(tangents_of: Callable[..., Any]) -> Callable[..., Any]:
            graph = torch.fx.Graph()
            graph.output(graph.call_function(lambda tangent: [tangents_of((tangent,))], (graph.placeholder("t"),)))
            return lambda tangents: torch.fx.GraphModule({}, graph)

        return trace

    monkeypatch.setattr(eager_transforms, "lazy_dynamo_disallow", disallow)
    value, tangent_of = torch.func.linearize(torch.square, torch.full((2,), 3.0))
    assert asked == [eager_transforms.make_fx, eager_transforms.const_fold.split_const_subgraphs]
    assert value.tolist() == [9.0, 9.0]
    assert tangent_of(torch.ones(2)).tolist() == [6.0, 6.0]
