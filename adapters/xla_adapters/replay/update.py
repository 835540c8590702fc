"""`UpdateRecipe`: the host's part of an optimizer's update, computed without its tensors.

AdamW's bias corrections, learning rates, decay: an optimizer computes Python numbers and hands them to
operators, where they become inputs of the graph. To replay a step these numbers are needed anew. The
optimizer's own `step` is run for them on stand-ins without data, one for each kind of parameter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from numbers import Real
from operator import is_
from typing import Any

import torch
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop
from torch.overrides import TorchFunctionMode

from xla_adapters.compiling import as_if_compiling
from xla_adapters.errors import MODEL_FAILURES, XLAAdapterError
from xla_adapters.optimizers import stand_in_for
from xla_adapters.packed_state import watch
from xla_adapters.replay.errors import CannotReplay
from xla_adapters.replay.foresight import Foresight, Update
from xla_adapters.replay.host_counts import HostCounts
from xla_adapters.replay.host_state import OwnStep, addition_to_step, copied, is_container, same, step_of

# Their numbers do not depend on the shapes of the parameters: one stand-in serves all shapes.
_ANY_SHAPE = (ASGD, NAdam, RAdam, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, RMSprop, Rprop)
_SIMPLE = (bool, int, float, str, type(None))
# The attributes that a stand-in has of its own.
_APART = ("param_groups", "state")


class _Listener(TorchFunctionMode):
    """Notes the operators on stand-ins and the numbers they are given.

    Args:
        skipped: operators that need not compute: any stand-in serves as their result.
    """

    def __init__(self, skipped: set[Callable[..., Any]]) -> None:
        super().__init__()
        self.numbers: list[float] = []
        self.operators: list[Callable[..., Any]] = []
        self.computing: set[Callable[..., Any]] = set()
        self._skipped = skipped

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        met = None
        if getattr(func, "__name__", "") not in ("__get__", "__set__"):
            numbers: list[float] = []
            met = _listen((*args, *kwargs.values()), numbers)
            if met is not None:
                self.operators.append(func)
                self.numbers.extend(numbers)
                if func in self._skipped:
                    return met
        result = func(*args, **kwargs)
        if met is not None and isinstance(result, torch.Tensor):
            self.computing.add(func)
        return result


def _listen(values: Iterable[Any], numbers: list[float]) -> torch.Tensor | None:
    """Collects the numbers among an operator's arguments; returns the first stand-in among them."""
    met = None
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.is_meta:
                met = value if met is None else met
            elif value.device.type != "cpu":
                # What number it began as cannot be seen, and may be another one in a later pass.
                raise CannotReplay("it makes a tensor on the device")
            elif value.ndim == 0:
                numbers.append(float(value))
        elif isinstance(value, Real) and not isinstance(value, bool):
            # Of numpy's, too.
            numbers.append(float(value))
        elif isinstance(value, (list, tuple)):
            inside = _listen(value, numbers)
            met = inside if met is None else met
    return met


@dataclass
class _Kind:
    """Parameters that the host treats alike: of one group, with the same host-side state."""

    group: int
    stand_in: torch.Tensor
    members: list[dict[str, Any]] = field(default_factory=list)
    host: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    counts: dict[str, HostCounts] = field(default_factory=dict)
    numbers: tuple[str, ...] = ()
    rebound: tuple[str, ...] = ()
    state: dict[str, torch.Tensor] = field(default_factory=dict)


class UpdateRecipe:
    """Computes the host's part of an optimizer's next update.

    Args:
        optimizer: with its state created, and the gradients there.

    Raises:
        CannotReplay: the optimizer is of a kind that this does not cover.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._class_step = type(optimizer).step
        # All of this comes before the step is run on a stand-in: it may not be run at all.
        self._own = OwnStep(type(optimizer))
        # What these keep on the host is known: nothing but their groups and state.
        self._is_torchs = type(optimizer) in _ANY_SHAPE
        hidden = self._hidden()
        if hidden is not None:
            raise CannotReplay(hidden)
        self._compiling = torch.compiler._is_compiling_flag
        if not all(isinstance(key, torch.Tensor) for key in optimizer.state):
            raise CannotReplay(self._keeps_more("state that is of no parameter"))
        self._kinds: list[_Kind] = []
        self._tensors: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        self._groups = [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]
        found: dict[Any, _Kind] = {}
        for index, group in enumerate(optimizer.param_groups):
            if any(isinstance(value, torch.Tensor) for key, value in group.items() if key != "params"):
                raise CannotReplay(f"{type(optimizer).__name__} holds a tensor among its hyper-parameters")
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._add(found, index, parameter)
        self._kinds.extend(found.values())
        self._members = [state for kind in self._kinds for state in kind.members]
        self._lengths = list(map(len, self._members))
        self._state = optimizer.state
        self._keys, self._values = list(optimizer.state), list(optimizer.state.values())
        for kind in self._kinds:
            kind.counts = {name: HostCounts(values) for name, values in kind.host.items()}
        self._counts = [counts for kind in self._kinds for counts in kind.counts.values()]
        self._look_up()
        self._version = self._versions()
        self._foresight = Foresight(self._play)
        watch([optimizer])
        self._skipped: set[Callable[..., Any]] = set()
        self._idles_with_groups = False

    def _look_up(self) -> None:
        self._owners = [owner for owner, _, _ in self._tensors]
        self._names = [name for _, name, _ in self._tensors]
        self._held = [tensor for _, _, tensor in self._tensors]

    def _hidden(self) -> str | None:
        """What the optimizer does or keeps that its numbers do not tell, in words; None if nothing."""
        addition = addition_to_step(self.optimizer)
        if addition is not None:
            return addition
        hidden = self._own.obstacle or self._own.hidden(self.optimizer)
        return None if hidden is None else self._keeps_more(hidden)

    def _keeps_more(self, what: str) -> str:
        return f"{type(self.optimizer).__name__} keeps more on the host than it tells: {what}"

    def _add(self, found: dict[Any, _Kind], index: int, parameter: torch.Tensor) -> None:
        state = self.optimizer.state.get(parameter, {})
        if not isinstance(state, dict):
            raise CannotReplay(f"the state of {type(self.optimizer).__name__} is not a dictionary per parameter")
        key: list[Any] = [index, parameter.dtype]
        if type(self.optimizer) not in _ANY_SHAPE:
            key.append(parameter.shape)
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                self._tensors.append((state, name, value))
                key.append((name, value.tolist() if value.device.type == "cpu" else (value.dtype, value.ndim)))
            elif isinstance(value, _SIMPLE):
                key.append((name, value))
            else:
                raise CannotReplay(f"{type(self.optimizer).__name__} keeps a {type(value).__name__} in its state")
        key = repr(key)  # type: ignore[assignment]
        kind = found.get(key)
        if kind is None:
            stand_in = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta", requires_grad=True)
            numbers = tuple(name for name, value in state.items() if isinstance(value, (int, float)))
            # Not `empty_like`: of a functional tensor it makes another one.
            stand_in.grad = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            kind = found[key] = _Kind(index, stand_in, numbers=numbers)
            kind.state = {
                name: torch.empty(value.shape, dtype=value.dtype, device="meta")
                for name, value in state.items()
                if isinstance(value, torch.Tensor) and value.device.type != "cpu"
            }
        kind.members.append(state)
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.device.type == "cpu":
                kind.host.setdefault(name, []).append(value)

    def rebound(self) -> Iterator[tuple[dict[str, Any], str]]:
        """Entries of the state that the update sets to new tensors, instead of writing to those that are there."""
        return ((member, name) for kind in self._kinds for name in kind.rebound for member in kind.members)

    def state_tensors(self) -> Iterator[torch.Tensor]:
        """The tensors of the optimizer's state."""
        return (tensor for _, _, tensor in self._tensors)

    def obstacle(self) -> str | None:
        """What changed since, if the recipe is not the optimizer's any more."""
        optimizer = self.optimizer
        name = type(optimizer).__name__
        if type(optimizer).step is not self._class_step:
            return f"{name}.step was replaced"
        hidden = self._hidden()
        if hidden is not None:
            return hidden
        groups = optimizer.param_groups
        if len(groups) != len(self._groups) or any(
            list(map(id, group["params"])) != ids for group, ids in zip(groups, self._groups, strict=True)
        ):
            return f"the parameter groups of {name} changed"
        state = optimizer.state
        if (
            state is not self._state
            or len(state) != len(self._keys)
            # By their places: a tensor's hash is Python.
            or not all(map(is_, state, self._keys))
            or not all(map(is_, state.values(), self._values))
            or not all(map(is_, map(dict.get, self._owners, self._names), self._held))
            or list(map(len, self._members)) != self._lengths
        ):
            return f"the state of {name} was replaced"
        # Those that are ahead nobody has touched.
        if not all(counts.is_ahead for counts in self._counts) and self._versions() != self._version:
            # By passes of other signatures, say: all parameters of a kind must be alike still.
            if not all(counts.are_alike() for counts in self._counts):
                return f"step counts of {name} were changed"
            self.accept()
        for kind in self._kinds:
            for key in kind.numbers:
                if any(member[key] != kind.members[0][key] for member in kind.members):
                    return f"the state of {name} was changed"
        return None

    def play(self) -> Update:
        """The host's part of the update that comes next; the optimizer stays as it is until `advance`.

        Raises:
            CannotReplay: the optimizer reads values of tensors, or keeps more on the host than it tells.
        """
        if not self._is_torchs:
            return self._play(None)
        return self._foresight.next(self.optimizer, [counts.ahead for counts in self._counts])

    def _play(self, given: Sequence[torch.Tensor] | None) -> Update:
        optimizer = self.optimizer
        groups = self._groups_without_parameters()
        state: defaultdict[Any, Any] = defaultdict(dict)
        counts = iter(
            [counts.value for counts in self._counts] if given is None else [value.clone() for value in given]
        )
        for kind in self._kinds:
            groups[kind.group]["params"].append(kind.stand_in)
            if kind.members[0]:
                host = {name: next(counts) for name in kind.counts}
                state[kind.stand_in] = {**kind.members[0], **kind.state, **host}
        stand_in = self._stand_in(groups, state)
        listener = _Listener(self._skipped)
        try:
            with as_if_compiling(self._compiling), listener:
                step_of(optimizer)(stand_in)
        except (*MODEL_FAILURES, XLAAdapterError) as error:
            raise CannotReplay(
                f"{type(optimizer).__name__} cannot compute its numbers without tensors ({_first_line(error)})"
            ) from error
        if self._is_torchs:
            # Their course does not depend on what operators on tensors return.
            self._skipped |= listener.computing
        self._check_attributes(stand_in)
        stand_ins = {id(kind.stand_in) for kind in self._kinds}
        if any(id(key) not in stand_ins for key in state):
            raise CannotReplay(self._keeps_more("state that is of no parameter"))
        changed = [
            {key: value for key, value in after.items() if key != "params" and value is not before.get(key)}
            for before, after in zip(optimizer.param_groups, groups, strict=True)
        ]
        for kind in self._kinds:
            if state.get(kind.stand_in, {}).keys() != kind.members[0].keys():
                raise CannotReplay(f"{type(optimizer).__name__} creates state in its update")
            after = state.get(kind.stand_in, {})
            rebound = tuple(name for name, tensor in kind.state.items() if after[name] is not tensor)
            if rebound != kind.rebound:
                kind.rebound = rebound
                anew = {(id(member), name) for member in kind.members for name in rebound}
                self._tensors = [entry for entry in self._tensors if (id(entry[0]), entry[1]) not in anew]
                self._look_up()
        more = any(changed) or any(kind.numbers or kind.rebound for kind in self._kinds)
        return Update(
            numbers=tuple(listener.numbers),
            operators=tuple(listener.operators),
            advance=lambda: self._advance(state, changed),
            counts=None if more else tuple(state[kind.stand_in][name] for kind in self._kinds for name in kind.counts),
        )

    def _groups_without_parameters(self) -> list[dict[str, Any]]:
        """Groups like the optimizer's, with containers of their own."""
        if self._is_torchs:
            return [{**group, "params": []} for group in self.optimizer.param_groups]
        return [
            {name: [] if name == "params" else copied(value) for name, value in group.items()}
            for group in self.optimizer.param_groups
        ]

    def _stand_in(self, groups: list[dict[str, Any]], state: dict[Any, Any]) -> Optimizer:
        """Of the optimizer, with containers of its own: what the step puts into them must not stay."""
        stand_in = stand_in_for(self.optimizer, param_groups=groups, state=state)
        if self._is_torchs:
            return stand_in
        own = vars(stand_in)
        own.update({name: copied(value) for name, value in own.items() if is_container(value) and name not in _APART})
        return stand_in

    def _check_attributes(self, stand_in: Optimizer) -> None:
        if self._is_torchs:
            return
        optimizer = self.optimizer
        before = vars(optimizer)
        for name, after in vars(stand_in).items():
            if name in _APART:
                continue
            # Where there was none, the class may have a default.
            value = before[name] if name in before else getattr(type(optimizer), name, after)
            if isinstance(after, _SIMPLE) and (type(value) is not type(after) or value != after):
                raise CannotReplay(f"{type(optimizer).__name__} changes its attribute {name!r} in its update")
            if is_container(after) and not same(value, after):
                raise CannotReplay(self._keeps_more(f"it changes {name!r} in its update"))
        for group, after in zip(optimizer.param_groups, stand_in.param_groups, strict=False):
            for name, value in group.items():
                if name != "params" and is_container(value) and not isinstance(value, tuple):
                    if not same(value, after.get(name)):
                        raise CannotReplay(self._keeps_more(f"it changes {name!r} of a group in its update"))
                    after[name] = value

    def find_idle_groups(self) -> None:
        """Finds out with which groups the optimizer steps and updates nothing.

        Raises:
            CannotReplay: it steps with none such.
        """
        for self._idles_with_groups in (False, True):
            groups = self._groups_without_parameters() if self._idles_with_groups else []
            stand_in = self._stand_in(groups, defaultdict(dict))
            try:
                with as_if_compiling(self._compiling):
                    step_of(self.optimizer)(stand_in)
                self._check_attributes(stand_in)
                return
            except MODEL_FAILURES as error:
                failure = error
        raise CannotReplay(
            f"{type(self.optimizer).__name__} cannot step without parameters ({_first_line(failure)})"
        ) from failure

    def idle_groups(self) -> list[dict[str, Any]]:
        """None, or those of the optimizer without parameters, for one that looks at its first group, say."""
        return [{**group, "params": []} for group in self.optimizer.param_groups] if self._idles_with_groups else []

    def _advance(self, state: dict[Any, Any], groups: Sequence[dict[str, Any]]) -> None:
        for kind in self._kinds:
            after = state.get(kind.stand_in, {})
            for name, counts in kind.counts.items():
                counts.set(after[name])
            for name in kind.numbers:
                for member in kind.members:
                    member[name] = after[name]
        for group, changed in zip(self.optimizer.param_groups, groups, strict=True):
            group.update(changed)
        self.accept()

    def accept(self) -> None:
        """Takes the step counts as they are for its own doing."""
        if not all(counts.is_ahead for counts in self._counts):
            self._version = self._versions()

    def _versions(self) -> int:
        return sum(counts.version for counts in self._counts)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
