"""Tensors in nested values."""

from __future__ import annotations

from collections import UserDict, namedtuple
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from xla_adapters.utils.nested_values import as_dicts, identity, replaced, tensors_in

Pair = namedtuple("Pair", "first second")


def test_every_tensor_is_found_and_replaced() -> None:
    one, two = torch.zeros(1), torch.ones(2)
    value = {"a": [one, 3], "b": Pair(two, UserDict(c=one)), "d": MappingProxyType({"e": (two, "text")})}
    assert list(map(id, tensors_in(value))) == [id(one), id(two), id(one), id(two)]
    copy = replaced(value, lambda tensor: tensor.numel(), lambda leaf: str(leaf))
    assert copy == {"a": [1, "3"], "b": Pair(2, UserDict(c=1)), "d": {"e": (2, "text")}}
    assert type(copy["b"]) is Pair
    assert type(copy["b"].second) is UserDict
    assert value["a"][0] is one


def test_a_state_dict_keeps_the_versions_of_its_modules() -> None:
    state = nn.BatchNorm1d(2).state_dict()
    copy = replaced(state, lambda tensor: tensor.clone())
    assert copy._metadata == state._metadata
    assert type(copy) is type(state)


def test_mappings_become_dicts() -> None:
    inner: Any = UserDict(a=1)
    assert as_dicts(([inner], inner)) == ([{"a": 1}], {"a": 1})


def test_tied_tensors_have_one_identity() -> None:
    weight = torch.zeros(4, 2)
    assert identity(weight) == identity(weight[:]) != identity(weight[1:])
    assert identity(weight) != identity(weight.view(2, 4))
    assert identity(weight) != identity(weight.clone())
