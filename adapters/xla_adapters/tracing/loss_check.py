"""Checks what a step returns as its loss, before autograd or arithmetic fails on it with a message about neither."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from xla_adapters.errors import LossError
from xla_adapters.utils.location import Location


def check_loss(loss: object, function: Callable[..., Any]) -> None:
    """Raises if a loss is not a tensor with one element.

    Args:
        loss: what the function returned as the loss.
        function: of the user, for the message.

    Raises:
        LossError: with what was returned, and the function's file and line.
    """
    if isinstance(loss, torch.Tensor):
        if loss.numel() == 1:
            return
        found = f"a tensor of the shape {list(loss.shape)}"
        advice = "Reduce it to one number: loss.mean()"
    else:
        found = "None" if loss is None else f"a {type(loss).__name__}"
        advice = "Return the loss as a tensor with one element"
        if loss is None:
            advice += "; a model of transformers computes it if the batch has labels"
    raise LossError(f"the loss that {_described(function)} returns is {found}. {advice}")


def _described(function: Callable[..., Any]) -> str:
    plain: Any = inspect.unwrap(function)
    plain = getattr(plain, "__func__", plain)
    name, code = getattr(plain, "__qualname__", type(plain).__qualname__), getattr(plain, "__code__", None)
    if code is None:
        return name
    place = Location(filename=code.co_filename, lineno=code.co_firstlineno, function=name, is_user_code=True)
    return f"{name} ({place.place})"
