"""A glance at modules notices whatever their facts would call a change."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from xla_adapters.replay.facts import ModuleFacts, all_related, facts_of
from xla_adapters.replay.glance import Glance


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(width=4, names=["a"], extra={})
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.1))
        self.sizes, self.table, self.pair, self.nothing = [1, 2], {"a": 1}, ([1],), ()
        self.plain = torch.ones(2)
        self.layers[0].weight.register_hook(lambda grad: grad)
        self.layers[0].weight.decay = 0.1  # type: ignore[assignment]


def _of(model: Any) -> tuple[list[ModuleFacts], Glance]:
    found = facts_of([model], set(), all_related)
    return found, Glance(found)


def _rename(model: Any) -> None:
    model.layers._modules["9"] = model.layers._modules.pop("2")


_CHANGES: list[Callable[[Any], object]] = [
    lambda model: model.eval(),
    lambda model: setattr(model.layers[2], "p", 0.2),
    lambda model: setattr(model, "forward", lambda inputs: inputs),
    lambda model: model.sizes.append(3),
    lambda model: model.table.update(b=2),
    lambda model: model.pair[0].append(2),
    lambda model: setattr(model, "plain", torch.ones(2)),
    lambda model: setattr(model, "sizes", None),
    lambda model: delattr(model, "nothing"),
    lambda model: setattr(model.config, "width", 8),
    lambda model: model.config.names.append("b"),
    lambda model: model.config.extra.update(a=1),
    lambda model: model.layers.append(nn.ReLU()),
    lambda model: setattr(model.layers, "0", nn.Linear(4, 4)),
    lambda model: setattr(model.layers[0], "weight", nn.Parameter(torch.ones(4, 4))),
    lambda model: model.layers[0].register_parameter("more", nn.Parameter(torch.ones(4))),
    lambda model: setattr(model.layers[0], "_parameters", {}),
    lambda model: model.layers[0].weight.requires_grad_(False),
    lambda model: setattr(model.layers[0].weight, "data", torch.ones(4, 5)),
    lambda model: setattr(model.layers[0].weight, "decay", 0.2),
    lambda model: setattr(model.layers[0].bias, "decay", 0.2),
    lambda model: model.layers[0].weight.register_hook(lambda grad: grad),
    lambda model: model.layers[0].bias.register_hook(lambda grad: grad),
    lambda model: model.layers[0].bias.register_post_accumulate_grad_hook(lambda parameter: None),
    lambda model: setattr(model.layers[1], "running_mean", torch.zeros(4)),
    lambda model: model.layers[1].running_mean.resize_(5),
    lambda model: model.layers[1].register_forward_hook(lambda *arguments: None),
    lambda model: model.layers[1].register_full_backward_hook(lambda *arguments: None),
    lambda model: model.to(torch.float64),
]


@pytest.mark.parametrize("number", range(len(_CHANGES)))
def test_changes_are_noticed(number: int) -> None:
    model = _Model()
    facts, glance = _of(model)
    assert not glance.touched()
    assert not any(fact.changed() for fact in facts)
    _CHANGES[number](model)
    assert any(fact.changed() for fact in facts)
    assert glance.touched()


@pytest.mark.parametrize("change", [_rename, lambda model: setattr(model, "table", {"a": 1})])
def test_what_is_touched_need_not_be_a_change(change: Callable[[Any], object]) -> None:
    model = _Model()
    facts, glance = _of(model)
    change(model)
    assert glance.touched()
    assert not any(fact.changed() for fact in facts)


def test_attributes_that_the_step_binds_anew_are_left_out() -> None:
    model = _Model()
    norm: Any = model.layers[1]
    glance = Glance(facts_of([model], {(id(norm), "running_mean"), (id(model), "plain")}, all_related))
    norm.running_mean, model.plain = torch.ones(4), torch.zeros(2)
    assert not glance.touched()
    norm.running_var = torch.ones(4)
    assert glance.touched()
