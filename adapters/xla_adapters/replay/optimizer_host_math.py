"""`OptimizerHostMath`: what an optimizer computes on the host in an update, computed without its tensors.

An optimizer computes Python numbers (AdamW's bias corrections, learning rates, decay) and passes them to operators,
where they become inputs of the graph. Each replay needs them for its own update. To compute them, the optimizer's own
`step` is run on stand-ins without data (tensors on `meta`), one for each kind of parameter.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import torch
from torch.optim import Optimizer, lr_scheduler
from torch.optim import optimizer as torch_optimizer

from xla_adapters.errors import MODEL_FAILURES, XLAAdapterError
from xla_adapters.replay.number_inputs import HostUpdate
from xla_adapters.replay.operator_recorder import OperatorRecorder
from xla_adapters.replay.safety.allowlist import OPTIMIZERS
from xla_adapters.replay.tensor_places import CannotReplay
from xla_adapters.tracing.optimizers import stand_in_for
from xla_adapters.utils.nested_values import is_simple
from xla_adapters.utils.torch_modes import as_if_compiling, leave_function_mode

_SIMPLE = (bool, int, float, str, type(None))
# Attributes of which a stand-in has its own.
_APART = ("param_groups", "state")
_CONTAINERS = (dict, OrderedDict, defaultdict, Counter, list, set, deque, tuple, bytearray)
_NESTING = 8


@dataclass
class _Kind:
    """Parameters for which the host computes the same numbers: of one group, with equal state on the host.

    Attributes:
        group: the position of the parameter group.
        stand_in: for all of these parameters.
        members: the state of each parameter.
        host: tensors of the state on the host (step counts), by name.
        numbers: names of Python numbers in the state.
        reassigned: names of tensors in the state that the update replaces by new ones.
        state: stand-ins for the tensors of the state on the device, by name.
    """

    group: int
    stand_in: torch.Tensor
    members: list[dict[str, Any]] = field(default_factory=list)
    host: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    numbers: tuple[str, ...] = ()
    reassigned: tuple[str, ...] = ()
    state: dict[str, torch.Tensor] = field(default_factory=dict)


class OptimizerHostMath:
    """Computes the host math of an optimizer's next update.

    Args:
        optimizer: with its state created, and with gradients.
        single: whether it updates one parameter after the other, whatever its groups' `foreach` says.

    Raises:
        CannotReplay: the optimizer cannot be run on stand-ins.
    """

    def __init__(self, optimizer: Optimizer, *, single: bool = False) -> None:
        self.optimizer = optimizer
        self._class_step = type(optimizer).step
        # These store nothing on the host but their groups and state.
        self._is_torchs = type(optimizer) in OPTIMIZERS
        addition = addition_to_step(optimizer)
        if addition is not None:
            raise CannotReplay(addition)
        self._single: dict[str, Any] = {"foreach": False} if single and "foreach" in optimizer.defaults else {}
        self._compiling = torch.compiler._is_compiling_flag
        if not all(isinstance(key, torch.Tensor) for key in optimizer.state):
            raise CannotReplay(self._keeps_more("state that is of no parameter"))
        self._kinds: list[_Kind] = []
        # For each parameter with a gradient its kind, in the order of the groups.
        self._order: list[_Kind] = []
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
        # Step counts and the like: equal for all parameters of a kind.
        self._counts = [tensors for kind in self._kinds for tensors in kind.host.values()]
        self._index_tensors()
        self._skipped: set[Callable[..., Any]] = set()
        self._idles_with_groups = False

    def _index_tensors(self) -> None:
        self._owners = [owner for owner, _, _ in self._tensors]
        self._names = [name for _, name, _ in self._tensors]
        self._held = [tensor for _, _, tensor in self._tensors]

    def _keeps_more(self, what: str) -> str:
        return f"{type(self.optimizer).__name__} stores more on the host than its groups and state: {what}"

    def _add(self, found: dict[Any, _Kind], index: int, parameter: torch.Tensor) -> None:
        state = self.optimizer.state.get(parameter, {})
        if not isinstance(state, dict):
            raise CannotReplay(f"the state of {type(self.optimizer).__name__} is not a dictionary per parameter")
        key: list[Any] = [index, parameter.dtype]
        if type(self.optimizer) not in OPTIMIZERS:
            key.append(parameter.shape)
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                self._tensors.append((state, name, value))
                # torch's own treat matrices and vectors alike.
                dims = value.ndim > 0 if self._is_torchs else value.ndim
                key.append((name, value.tolist() if value.device.type == "cpu" else (value.dtype, dims)))
            elif isinstance(value, _SIMPLE):
                key.append((name, value))
            else:
                raise CannotReplay(f"{type(self.optimizer).__name__} keeps a {type(value).__name__} in its state")
        key = repr(key)  # type: ignore[assignment]
        kind = found.get(key)
        if kind is None:
            stand_in = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta", requires_grad=True)
            numbers = tuple(name for name, value in state.items() if isinstance(value, (int, float)))
            # Not `empty_like`, which makes a functional tensor from a functional tensor.
            stand_in.grad = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            kind = found[key] = _Kind(index, stand_in, numbers=numbers)
            kind.state = {
                name: torch.empty(value.shape, dtype=value.dtype, device="meta")
                for name, value in state.items()
                if isinstance(value, torch.Tensor) and value.device.type != "cpu"
            }
        kind.members.append(state)
        self._order.append(kind)
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.device.type == "cpu":
                kind.host.setdefault(name, []).append(value)

    def reassigned(self) -> Iterator[tuple[dict[str, Any], str]]:
        """The entries of the state that the update sets to new tensors instead of writing in place."""
        return ((member, name) for kind in self._kinds for name in kind.reassigned for member in kind.members)

    def state_tensors(self) -> Iterator[torch.Tensor]:
        """The tensors of the optimizer's state."""
        return (tensor for _, _, tensor in self._tensors)

    def reason_to_trace(self) -> str | None:
        """What has changed of the optimizer so that this does not describe it any more, in words, or None."""
        optimizer = self.optimizer
        name = type(optimizer).__name__
        if type(optimizer).step is not self._class_step:
            return f"{name}.step was replaced"
        addition = addition_to_step(optimizer)
        if addition is not None:
            return addition
        groups = optimizer.param_groups
        if len(groups) != len(self._groups) or any(
            list(map(id, group["params"])) != ids for group, ids in zip(groups, self._groups, strict=True)
        ):
            return f"the parameter groups of {name} changed"
        state = optimizer.state
        if (
            state is not self._state
            or len(state) != len(self._keys)
            # By position: the hash of a tensor runs Python.
            or not all(map(is_, state, self._keys))
            or not all(map(is_, state.values(), self._values))
            or not all(map(is_, map(dict.get, self._owners, self._names), self._held))
            or list(map(len, self._members)) != self._lengths
        ):
            return f"the state of {name} was replaced"
        # By value: a write through `.data` does not change a tensor's version.
        if not all(map(_are_alike, self._counts)):
            return f"step counts of {name} were changed"
        for kind in self._kinds:
            for key in kind.numbers:
                if any(member[key] != kind.members[0][key] for member in kind.members):
                    return f"the state of {name} was changed"
        return None

    def play(self) -> HostUpdate:
        """Computes the host math of the next update. The optimizer does not change until `HostUpdate.advance`.

        Raises:
            CannotReplay: the optimizer reads values of tensors, or stores more on the host than its groups and state.
        """
        optimizer = self.optimizer
        stand_in, recorder = self._step_on_stand_ins(self._kinds)
        groups, state = stand_in.param_groups, stand_in.state
        if self._is_torchs:
            # What torch's optimizers do next does not depend on the results of operators.
            self._skipped |= recorder.computing
        self._check_attributes(stand_in)
        stand_ins = {id(kind.stand_in) for kind in self._kinds}
        if any(id(key) not in stand_ins for key in state):
            raise CannotReplay(self._keeps_more("state that is of no parameter"))
        changed = [
            {
                key: value
                for key, value in after.items()
                if key != "params" and key not in self._single and value is not before.get(key)
            }
            for before, after in zip(optimizer.param_groups, groups, strict=True)
        ]
        for kind in self._kinds:
            if state.get(kind.stand_in, {}).keys() != kind.members[0].keys():
                raise CannotReplay(f"{type(optimizer).__name__} creates state in its update")
            after = state.get(kind.stand_in, {})
            reassigned = tuple(name for name, tensor in kind.state.items() if after[name] is not tensor)
            if reassigned != kind.reassigned:
                kind.reassigned = reassigned
                replaced = {(id(member), name) for member in kind.members for name in reassigned}
                self._tensors = [entry for entry in self._tensors if (id(entry[0]), entry[1]) not in replaced]
                self._index_tensors()
        return HostUpdate(
            numbers=tuple(recorder.numbers),
            constants=tuple(recorder.constants),
            operators=tuple(recorder.operators),
            advance=lambda: self._advance(state, changed),
        )

    def _step_on_stand_ins(self, kinds: Sequence[_Kind]) -> tuple[Optimizer, OperatorRecorder]:
        """Runs the optimizer's own `step` on a stand-in with these kinds of parameters."""
        optimizer = self.optimizer
        groups = self._groups_without_parameters()
        state: defaultdict[Any, Any] = defaultdict(dict)
        for kind in kinds:
            groups[kind.group]["params"].append(kind.stand_in)
            if kind.members[0]:
                host = {name: tensors[0].clone() for name, tensors in kind.host.items()}
                state[kind.stand_in] = {**kind.members[0], **kind.state, **host}
        stand_in = self._stand_in(groups, state)
        recorder = OperatorRecorder(self._skipped)
        try:
            with as_if_compiling(self._compiling), recorder:
                step_of(optimizer)(stand_in)
        except (*MODEL_FAILURES, XLAAdapterError) as error:
            raise CannotReplay(
                f"{type(optimizer).__name__} cannot compute its numbers without tensors ({_first_line(error)})"
            ) from error
        except BaseException:
            # Ctrl-C may have interrupted the exit of the mode.
            leave_function_mode(recorder)
            raise
        return stand_in, recorder

    def roles(self, update: HostUpdate) -> list[tuple[int, float]]:
        """For each number that the optimizer uses, parameter by parameter: its position in an update, and its value.

        Args:
            update: of the same state, as `play` returned it.

        Raises:
            CannotReplay: the numbers of a parameter depend on the others.
        """
        positions: dict[int, list[tuple[int, float]]] = {}
        begin = 0
        for kind in self._kinds:
            numbers = self._step_on_stand_ins([kind])[1].numbers
            if tuple(numbers) != update.numbers[begin : begin + len(numbers)]:
                raise CannotReplay(f"{type(self.optimizer).__name__} uses numbers that depend on several parameters")
            positions[id(kind)] = list(enumerate(numbers, begin))
            begin += len(numbers)
        if begin != len(update.numbers):
            raise CannotReplay(f"{type(self.optimizer).__name__} uses numbers that are of no parameter")
        return [role for kind in self._order for role in positions[id(kind)]]

    def _groups_without_parameters(self) -> list[dict[str, Any]]:
        """Copies of the optimizer's groups, without parameters."""
        if self._is_torchs:
            return [{**group, **self._single, "params": []} for group in self.optimizer.param_groups]
        return [
            {name: [] if name == "params" else copied(value) for name, value in group.items()}
            for group in self.optimizer.param_groups
        ]

    def _stand_in(self, groups: list[dict[str, Any]], state: dict[Any, Any]) -> Optimizer:
        """A stand-in for the optimizer, with copies of its containers, so that running `step` changes nothing."""
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
            # An attribute that did not exist may have a default in the class.
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
        """Finds groups with which the optimizer can step without updating anything: none, or groups without parameters.

        Raises:
            CannotReplay: it cannot step with either.
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
        """Groups with which the optimizer steps and updates nothing; see `find_idle_groups`."""
        return [{**group, "params": []} for group in self.optimizer.param_groups] if self._idles_with_groups else []

    def _advance(self, state: dict[Any, Any], groups: Sequence[dict[str, Any]]) -> None:
        for kind in self._kinds:
            after = state.get(kind.stand_in, {})
            for name, tensors in kind.host.items():
                torch._foreach_copy_(tensors, [after[name]] * len(tensors))
            for name in kind.numbers:
                for member in kind.members:
                    member[name] = after[name]
        for group, changed in zip(self.optimizer.param_groups, groups, strict=True):
            group.update(changed)


def _are_alike(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all have the same value."""
    first = tensors[0].tolist()
    return all(value == first for value in map(torch.Tensor.tolist, tensors))


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


# ---- the step without hooks -----------------------------------------------------------------------


def addition_to_step(optimizer: Optimizer) -> str | None:
    """A hook or wrapper on an optimizer's step, whose Python a replay would skip, in words; None if there is none."""
    name, own = type(optimizer).__name__, vars(optimizer)
    for hooks in (
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
        own.get("_optimizer_step_pre_hooks", {}),
        own.get("_optimizer_step_post_hooks", {}),
    ):
        for hook in hooks.values():
            if not (getattr(hook, "__module__", None) or "").startswith("xla_adapters"):
                return f"the step of {name} has a hook ({getattr(hook, '__qualname__', type(hook).__name__)})"
    step = own.get("step")
    if step is not None and not _is_of_scheduler(step, type(optimizer)):
        return f"the step of {name} was replaced by another one"
    return None


def _is_of_scheduler(step: Any, kind: type) -> bool:
    """Whether this is the wrapper by which learning rate schedulers count calls of `step`."""
    code = getattr(step, "__code__", None)
    return (
        code is not None
        and code.co_filename == lr_scheduler.__file__
        and getattr(step, "__wrapped__", None) is _defined(kind, "step")
    )


def _defined(kind: type, name: str) -> Any:
    """The member of this name in a class or its bases, as in their `__dict__`; None if there is none."""
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)


def step_of(optimizer: Optimizer) -> Callable[[Optimizer], object]:
    """The `step` of an optimizer's class, without the wrapper by which torch calls hooks."""
    step: Any = type(optimizer).step
    # A wrapper of another library copies torch's marks; only the file of its code tells whose it is.
    is_torchs = getattr(step, "hooked", False) and step.__code__.co_filename == torch_optimizer.__file__
    return step.__wrapped__ if is_torchs else step  # type: ignore[no-any-return]


# ---- nested containers of an optimizer on the host ------------------------------------------------


def is_container(value: Any) -> bool:
    """Whether a value is one of Python's own containers, no subclass of them."""
    return type(value) in _CONTAINERS


def copied(value: Any, depth: int = _NESTING) -> Any:
    """A copy of nested containers; items that are no containers are shared."""
    kind = type(value)
    if not depth or kind not in _CONTAINERS:
        return value
    if kind is tuple:
        items = tuple(copied(item, depth - 1) for item in value)
        return value if all(map(_is, items, value)) else items
    copy = value.copy()
    if isinstance(copy, dict):
        for key, item in copy.items():
            copy[key] = copied(item, depth - 1)
    elif isinstance(copy, (list, deque)):
        for index, item in enumerate(value):
            copy[index] = copied(item, depth - 1)
    return copy


def same(left: Any, right: Any, depth: int = _NESTING) -> bool:
    """Whether nested containers have equal items."""
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    if isinstance(left, (set, bytearray)) or is_simple(left, 0):
        return bool(left == right)
    if not depth or not is_container(left) or len(left) != len(right):
        return False
    if isinstance(left, dict):
        return all(map(_is_same, left, right)) and all(
            same(mine, theirs, depth - 1) for mine, theirs in zip(left.values(), right.values(), strict=True)
        )
    return all(same(mine, theirs, depth - 1) for mine, theirs in zip(left, right, strict=True))


def _is(left: Any, right: Any) -> bool:
    return left is right


def _is_same(left: Any, right: Any) -> bool:
    return same(left, right, 1)
