"""Which code of a step may be left out by a replay, told from its source."""

from __future__ import annotations

import functools
import random
import time
from collections import OrderedDict, deque
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from types import SimpleNamespace
from typing import Any, TypedDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.isolation import isolated
from xla_adapters.replay.effects import Proof
from xla_adapters.replay.outside import Batch, Knowledge, Unproven, Value

SCALE = 0.5
SEEN: list[Any] = []
_KNOWLEDGE = Knowledge(packages=("torch.",))


@dataclass
class Pair:
    left: torch.Tensor
    right: torch.Tensor


class Named(TypedDict):
    left: torch.Tensor
    right: torch.Tensor


class ByAttribute(dict[str, Any]):
    __getattr__ = dict.__getitem__


class Noting(dict[str, Any]):
    def __setitem__(self, name: str, value: Any) -> None:
        SEEN.append(name)
        super().__setitem__(name, value)


class Counter:
    calls = 0

    def count(self) -> None:
        self.calls += 1

    def look(self) -> int:
        return self.calls


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.linear(x) * scale if self.training else self.linear(x)


class Noisy(Block):
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        print(x.shape)
        return super().forward(x, scale)


def counted(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        SEEN.append(1)
        return function(*args, **kwargs)

    return wrapper


def grown(x: torch.Tensor, seen: list[Any] = []) -> torch.Tensor:  # noqa: B006
    seen.append(x)
    return x


class Model(nn.Module):
    """Its methods are the steps under test."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.noisy = Noisy()
        self.wrapped = nn.Sequential(nn.ReLU(), Noisy())
        self.history: list[float] = []
        self.weights = {"a": 0.3, "b": 0.7}
        self.counter = Counter()
        self.rate = 0.1

    # ---- safe --------------------------------------------------------------------------------------

    def safe_plain(self, batch: Any, index: int) -> Any:
        x, y = batch
        for block in self.blocks:
            x = F.relu(block(x, scale=SCALE))
        total = sum(weight * x.mean() for weight in self.weights.values())
        parts = [total, F.mse_loss(x, y)]
        parts.append(x.norm() * self.rate)
        if x.shape[0] > 2 and self.training:
            total = total + torch.stack(parts).sum()
        return {"loss": total, "pair": Pair(x, y)}

    def safe_helpers(self, batch: Any, index: int) -> Any:
        def inner(value: torch.Tensor, power: int = 2) -> torch.Tensor:
            return value**power

        with torch.no_grad():
            target = self._shared(batch["x"], index)
        return inner(self._shared(batch["x"], index) - target, power=3).mean()

    @torch.no_grad()
    def safe_decorated(self, batch: Any, index: int) -> Any:
        return self.blocks[0](batch["x"]).mean()

    def safe_super(self, batch: Any, index: int) -> Any:
        return sorted([block(batch["x"]).mean() for block in self.blocks], key=lambda loss: 0)[self.counter.look()]

    def _shared(self, x: torch.Tensor, index: int) -> torch.Tensor:
        return self.blocks[-1](x)

    # ---- not safe ----------------------------------------------------------------------------------

    def sets_attribute(self, batch: Any, index: int) -> Any:
        self.last = batch["x"].mean()
        return self.last

    def sets_in_helper(self, batch: Any, index: int) -> Any:
        self.counter.count()
        return batch["x"].mean()

    def grows_list(self, batch: Any, index: int) -> Any:
        kept = self.history
        kept.append(1.0)
        return batch["x"].mean()

    def grows_list_in_place(self, batch: Any, index: int) -> Any:
        kept = self.history or []
        kept += [1.0]
        return batch["x"].mean()

    def grows_inside_list(self, batch: Any, index: int) -> Any:
        [self.history][0].append(1.0)
        return batch["x"].mean()

    def grows_through_dict(self, batch: Any, index: int) -> Any:
        kept: dict[str, Any] = {}
        kept.setdefault("x", self.history).append(2.0)
        return batch["x"].mean()

    def grows_through_a_kept_one(self, batch: Any, index: int) -> Any:
        kept: dict[str, Any] = {}
        kept["x"] = self.history
        kept["x"].append(2.0)
        return batch["x"].mean()

    def grows_default(self, batch: Any, index: int) -> Any:
        return grown(batch["x"]).mean()

    def safe_containers(self, batch: Any, index: int) -> Any:
        loss = batch["x"].mean() * self.rate
        named = Named(left=loss, right=loss * 2)
        ordered = OrderedDict(left=loss, right=named["right"])
        recent = deque([loss, ordered["left"]], maxlen=2)
        total = sum(chain(recent, islice(recent, 1)))
        for left, right in zip_longest(recent, recent):
            total = total + left * right
        return SimpleNamespace(loss=ByAttribute(left=total).left).loss

    def keeps_a_list_in_a_namespace(self, batch: Any, index: int) -> Any:
        SimpleNamespace(log=self.history).log.append(1)
        return batch["x"].mean()

    def keeps_a_list_in_a_dictionary(self, batch: Any, index: int) -> Any:
        ByAttribute(log=self.history).log.append(1)
        return batch["x"].mean()

    def finds_another_module_of_that_name(self, batch: Any, index: int) -> Any:
        return SimpleNamespace(linear=self.noisy).linear(batch["x"]).mean()

    def makes_a_dictionary_of_its_own(self, batch: Any, index: int) -> Any:
        found = Noting()
        found["x"] = batch["x"].mean()
        return found["x"]

    def chains_what_is_changed(self, batch: Any, index: int) -> Any:
        for kept in chain([self.history]):
            kept.append(1)
        return batch["x"].mean()

    def sets_item(self, batch: Any, index: int) -> Any:
        self.weights["a"] = 0.5
        return batch["x"].mean()

    def grows_global(self, batch: Any, index: int) -> Any:
        SEEN.append(2)
        return batch["x"].mean()

    def prints(self, batch: Any, index: int) -> Any:
        loss = batch["x"].mean()
        print("loss", loss)
        return loss

    def prints_in_a_submodule(self, batch: Any, index: int) -> Any:
        return self.noisy(batch["x"]).mean()

    def prints_in_a_known_container(self, batch: Any, index: int) -> Any:
        return self.wrapped(batch["x"]).mean()

    def prints_in_a_lambda(self, batch: Any, index: int) -> Any:
        batch["x"].register_hook(lambda grad: print(grad))
        return batch["x"].mean()

    def hands_on_a_method(self, batch: Any, index: int) -> Any:
        return sum(map(self.grows_list, batch["x"]))

    def looks_at_the_index(self, batch: Any, index: int) -> Any:
        return batch["x"].mean() * (2 if index % 10 == 0 else 1)

    def looks_at_the_index_in_a_helper(self, batch: Any, index: int) -> Any:
        return self._by_index(batch["x"], index)

    def _by_index(self, x: torch.Tensor, number: int) -> torch.Tensor:
        return x[number]

    def formats_the_index(self, batch: Any, index: int) -> Any:
        name = f"loss {index}"
        return {name: batch["x"].mean()}

    def takes_the_time(self, batch: Any, index: int) -> Any:
        return batch["x"].mean() * time.time()

    def draws(self, batch: Any, index: int) -> Any:
        return batch["x"].mean() * random.random()

    def changes_the_batch(self, batch: Any, index: int) -> Any:
        labels = batch.pop("y")
        return F.mse_loss(batch["x"], labels)

    def sets_the_batch(self, batch: Any, index: int) -> Any:
        batch["z"] = batch["x"] * 2
        return batch["z"].mean()

    @counted
    def decorated(self, batch: Any, index: int) -> Any:
        return batch["x"].mean()

    def global_statement(self, batch: Any, index: int) -> Any:
        global SCALE
        SCALE = 1.0
        return batch["x"].mean()

    def freezes(self, batch: Any, index: int) -> Any:
        self.blocks[0].requires_grad_(False)
        return batch["x"].mean()

    def builds_from_outside(self, batch: Any, index: int) -> Any:
        setattr(self, "rate", 0.2)  # noqa: B010
        return batch["x"].mean()

    def generator(self, batch: Any, index: int) -> Any:
        yield batch["x"].mean()


def _examine(name: str) -> Proof:
    proof = Proof(_KNOWLEDGE)
    model = Model()
    proof.examine(getattr(model, name), [Value((Batch(),)), Value((), "index")])
    proof.model = model  # type: ignore[attr-defined]
    return proof


_UNSAFE = {
    "sets_attribute": "it sets self.last",
    "sets_in_helper": "calls",
    "grows_list": "it changes a list",
    "grows_list_in_place": "it changes a list",
    "grows_inside_list": "it changes a list",
    "grows_through_dict": "puts a list",
    "grows_through_a_kept_one": "puts a list",
    "grows_default": "it changes a list",
    "keeps_a_list_in_a_namespace": "it reads SimpleNamespace",
    "keeps_a_list_in_a_dictionary": "it reads ByAttribute",
    "finds_another_module_of_that_name": "it puts a module into SimpleNamespace",
    "makes_a_dictionary_of_its_own": "it calls Noting",
    "chains_what_is_changed": "it changes a list",
    "sets_item": "it changes a dict",
    "grows_global": "it changes a list",
    "prints": "it calls print",
    "prints_in_a_submodule": "it calls print",
    "prints_in_a_known_container": "it calls print",
    "prints_in_a_lambda": "it calls print",
    "hands_on_a_method": "it changes a list",
    "looks_at_the_index": "it looks at index",
    "looks_at_the_index_in_a_helper": "it looks at index",
    "formats_the_index": "it looks at index",
    "takes_the_time": "it calls time.time",
    "draws": "it calls random.random",
    "changes_the_batch": "it changes the batch",
    "sets_the_batch": "it changes the batch",
    "decorated": "it changes a list",
    "global_statement": "global",
    "freezes": "it calls",
    "builds_from_outside": "it calls setattr",
    "generator": "yield",
}


@isolated
@pytest.mark.parametrize("name", ["safe_plain", "safe_helpers", "safe_decorated", "safe_super", "safe_containers"])
def test_without_effects(name: str) -> None:
    assert _examine(name).facts


@isolated
def test_every_other_method_is_refused_with_the_line() -> None:
    names = {name for name in vars(Model) if not name.startswith(("_", "safe_"))}
    assert names == set(_UNSAFE)
    for name, reason in _UNSAFE.items():
        with pytest.raises(Unproven, match=r"test_replay_effects\.py:\d+") as caught:
            _examine(name)
        assert reason in str(caught.value) or name == "sets_in_helper", (name, caught.value)


@isolated
def test_what_the_code_reads_is_held_against_its_present_value() -> None:
    global SCALE
    proof = _examine("safe_plain")
    model: Any = proof.model  # type: ignore[attr-defined]

    def changes() -> list[str]:
        return [change for fact in proof.facts if (change := fact.changed())]

    assert changes() == []
    model.rate = 0.2
    assert changes() == ["self.rate changed"]
    model.rate = 0.1
    model.weights["a"] = 1.0
    assert any("weights" in change for change in changes())
    model.weights["a"] = 0.3
    assert changes() == []
    SCALE = 2.0
    assert changes() == ["SCALE changed"]
