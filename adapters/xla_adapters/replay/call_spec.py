"""`CallSpec`: the description of one call of a step, for capturing and replaying it. `batch_reason`: of its batch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from xla_adapters.replay.attribute_changes import Owner
from xla_adapters.replay.guards import nothing_exempt
from xla_adapters.replay.safety.trusted import is_trusted
from xla_adapters.replay.tensor_places import CallTensors
from xla_adapters.utils.nested_values import is_simple, own_attributes


@dataclass(frozen=True, kw_only=True)
class CallSpec:
    """What must be known of a call of a step to capture it, and to replay it later.

    Attributes:
        key: calls with different keys get executables of their own; all values hashable.
        batch: tensors on the device that the step only reads, in the same order each time.
        extras: further tensors that the step may update in place (a sum of losses, say), in the same order each time.
        modules: to guard in addition to those whose forward runs.
        set_modes: called before each replay to put modules into train or eval mode, as the step does.
        deadline: after how many traced calls the values to compare get a transfer to the host of their own.
        reason: why the step cannot be replayed, None if it can; ignored under `step_replay=True`.
        attribute_owners: returns the objects whose attributes the step may reassign (default: none).
        watched: returns values, by name, that must be equal before and after the step (default: none).
        exempt: returns the names of a module's attributes that need no guard.
        constants: tensors that the step reads and never writes.
        change: what the user code reads that has changed since the call before; None if nothing.
        keeps_numbers: whether all numbers that a known library reads in the step are among what it returns, and the
            library decides and computes on the host by nothing else that may change.
        look_again: analyses the user code again, after a change that its own guards cannot see.
        strict: whether side effects and unknown optimizers are refused; set by `StepProgram`.
        tensors: `batch` and `extras` together.
    """

    key: tuple[Hashable, ...] = ()
    batch: Sequence[torch.Tensor] = ()
    extras: Sequence[torch.Tensor] = ()
    modules: Sequence[torch.nn.Module] = ()
    set_modes: Callable[[], object] | None = None
    deadline: int = 0
    reason: str | None = None
    attribute_owners: Callable[[], Sequence[Owner]] = tuple
    watched: Callable[[], Mapping[str, object]] = dict
    exempt: Callable[[torch.nn.Module], Collection[str]] = nothing_exempt
    constants: Sequence[torch.Tensor] = ()
    change: str | None = None
    keeps_numbers: bool = False
    look_again: Callable[[], object] = tuple
    strict: bool = True
    tensors: CallTensors = field(init=False)

    def owners(self) -> list[Owner]:
        """The objects whose attributes the step may set: `attribute_owners`, and modules that may store one."""
        attribute_owners = self.attribute_owners()
        known = {id(owner.object) for owner in attribute_owners}
        modules = {id(module): module for root in self.modules for module in root.modules()}
        stored = (Owner(module, only_tensors=True) for name, module in modules.items() if name not in known)
        return [*attribute_owners, *stored]

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensors", CallTensors(self.batch, self.extras))


def batch_reason(value: Any) -> str | None:
    """Why steps with such a batch are traced, in words; None if they can be replayed.

    A batch may consist of tensors, constants, Python's own containers, named tuples without methods, and the batch
    classes of trusted packages. These may have attributes that can be compared: they are part of the call's key.
    """
    if isinstance(value, torch.Tensor):
        if type(value) is not torch.Tensor:
            return f"the batch holds a {type(value).__name__}"
        attribute = next(iter(vars(value)), None)
        return None if attribute is None else f"a tensor of the batch has a Python attribute, {attribute!r}"
    kind = type(value)
    if kind in (list, tuple) or _is_plain_named_tuple(kind):
        return _first(value)
    if kind in (dict, OrderedDict) or (isinstance(value, Mapping) and is_trusted(kind)):
        own = next((name for name, item in own_attributes(value).items() if not is_simple(item)), None)
        if own is not None:
            return f"the batch has a Python attribute, {own!r}, which cannot be compared"
        keys = next((key for key in value if type(key) not in (str, int)), None)
        return _first(value.values()) if keys is None else f"the batch has a key that is a {type(keys).__name__}"
    if is_simple(value):
        return None
    return f"the batch holds a {kind.__name__}, which cannot be compared with that of another step"


def _first(values: Iterable[Any]) -> str | None:
    return next((reason for value in values if (reason := batch_reason(value)) is not None), None)


def _is_plain_named_tuple(kind: type) -> bool:
    """Whether a class is a named tuple without methods or bases of its own."""
    fields = getattr(kind, "_fields", None)
    if kind.__mro__ != (kind, tuple, object) or fields is None:
        return False
    own = {name for name in vars(kind) if not name.startswith("_")}
    special = (
        vars(kind).get(name) for name in ("__getattr__", "__getattribute__", "__getitem__", "__iter__", "__eq__")
    )
    return own == set(fields) and not any(special)
