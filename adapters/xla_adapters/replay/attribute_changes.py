"""`AttributesBefore`: attributes of objects that a step sets, such as a metric's state or a counter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from xla_adapters.replay.tensor_places import CannotReplay
from xla_adapters.utils.nested_values import is_simple
from xla_adapters.utils.torch_modes import device_type

_ABSENT = object()


@dataclass(frozen=True)
class Owner:
    """An object whose attributes a step may set.

    Attributes:
        object: it has a `__dict__`.
        names: the attributes that may be set; all if not given.
        sets: attributes that are set whenever others change, even if to the value they have.
        only_tensors: whether it is a module whose forward may store tensors; its other attributes are guarded.
    """

    object: Any
    names: tuple[str, ...] | None = None
    sets: tuple[str, ...] = ()
    only_tensors: bool = False

    def attributes(self) -> dict[str, Any]:
        """The present attributes."""
        own = vars(self.object)
        if self.only_tensors:
            return {name: value for name, value in own.items() if _is_on_device(value)}
        return dict(own) if self.names is None else {name: own[name] for name in self.names if name in own}


@dataclass
class AttributeChange:
    """A plain attribute (no tensor) that a call of a step changed.

    Attributes:
        owner, name: the object and its attribute.
        before, now: the values before and after the call.
        adds: True if each call adds the same amount, False if each sets the same value; None if both are possible.
        stays: whether it did not change, though others of its owner did: the call may have set it to the same value.
    """

    owner: Any
    name: str
    before: Any
    now: Any
    adds: bool | None = False
    stays: bool = False

    def agree(self, other: AttributeChange) -> bool:
        """Determines `adds` from the change of the call before; returns False if the two changes do not agree."""
        if self.owner is not other.owner or self.name != other.name or self.stays is not other.stays:
            return False
        sets = type(self.now) is type(other.now) and self.now == other.now
        adds = (
            all(type(value) is int for value in (self.before, self.now, other.before, other.now))
            and self.now - self.before == other.now - other.before
        )
        if self.before == self.now or other.before == other.now:
            adds = False
        self.adds = None if sets and adds else adds
        return sets or adds

    def reason_to_trace(self) -> str | None:
        """Why the value after the next call cannot be known, in words; None if it can."""
        present = vars(self.owner).get(self.name, _ABSENT)
        fixed = self.stays or self.adds is None
        if (fixed and present != self.before) or (self.adds and type(present) is not int):
            return f"{type(self.owner).__name__}.{self.name} is {present!r:.40}, and was {self.before!r:.40}"
        return None

    def apply(self) -> None:
        """Changes the attribute as a call of the step does."""
        own = vars(self.owner)
        own[self.name] = own[self.name] + (self.now - self.before) if self.adds else self.now


class AttributesBefore:
    """The attributes of objects before a step.

    Args:
        owners: the objects.
    """

    def __init__(self, owners: Iterable[Owner]) -> None:
        self._before = {
            id(owner.object): (owner, {name: _copy(value) for name, value in owner.attributes().items()})
            for owner in owners
        }

    def tensors(self) -> Iterator[tuple[Any, str, torch.Tensor]]:
        """The attributes that are tensors and that a step may read: owner, name and tensor."""
        for owner, attributes in self._before.values():
            for name, value in attributes.items():
                if isinstance(value, torch.Tensor) and not owner.only_tensors:
                    yield owner.object, name, value

    def changes(self, owners: Iterable[Owner]) -> tuple[list[tuple[Any, str]], list[AttributeChange]]:
        """The attributes that the step has set.

        Args:
            owners: the objects after the step; some may be new.

        Returns:
            The owners and names of attributes that are other tensors now, and the changes of plain attributes.

        Raises:
            CannotReplay: an attribute changed in a way that a replay cannot repeat.
        """
        tensors: list[tuple[Any, str]] = []
        plain: list[AttributeChange] = []
        for owner in owners:
            known, before = self._before.get(id(owner.object), (None, {}))
            found, unchanged = len(tensors) + len(plain), {}
            now = owner.attributes()
            if not owner.only_tensors and not before.keys() <= now.keys():
                raise CannotReplay(f"the step removes an attribute of {type(owner.object).__name__}")
            for name, value in now.items():
                old = before.get(name, _ABSENT)
                if _is_same(old, value):
                    unchanged[name] = value
                    continue
                if _is_on_device(value):
                    tensors.append((owner.object, name))
                elif known is None:
                    # Its owner was made in the step; the next call has another signature.
                    continue
                elif is_simple(value) and not isinstance(value, torch.Tensor):
                    plain.append(AttributeChange(owner.object, name, old, value))
                else:
                    kind = type(value).__name__
                    raise CannotReplay(f"the step changes {type(owner.object).__name__}.{name}, a {kind}")
            if known is not None and len(tensors) + len(plain) > found:
                for name, value in unchanged.items():
                    if name in owner.sets:
                        plain.append(AttributeChange(owner.object, name, value, value))
                    elif is_simple(value) and not isinstance(value, torch.Tensor):
                        plain.append(AttributeChange(owner.object, name, value, value, stays=True))
        return tensors, plain


def _is_on_device(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == device_type()


def _copy(value: Any) -> Any:
    return type(value)(value) if type(value) in (list, dict, set) else value


def _is_same(before: Any, now: Any) -> bool:
    if before is now:
        return True
    if isinstance(before, torch.Tensor) or isinstance(now, torch.Tensor) or type(before) is not type(now):
        return False
    if type(now) in (list, tuple):
        return len(before) == len(now) and all(map(_is_same, before, now))
    if type(now) is dict:
        return before.keys() == now.keys() and all(_is_same(before[key], item) for key, item in now.items())
    return bool(before == now)
