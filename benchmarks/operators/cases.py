"""The samples that operators are tried with.

They come from torch's own list of sample inputs (`op_db`), and from direct calls for what it does not reach. `choose`
finds those of an operator by recording which operators each sample calls.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

# Of each source; the list has hundreds for some, most of them the same operators with other shapes.
MOST_SAMPLES = 16
_DTYPES = (torch.float32, torch.int64, torch.bool)


@dataclass(frozen=True)
class Sample:
    """One call, with inputs on the CPU."""

    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Source:
    """Samples of one function.

    Attributes:
        name: as torch's list has it.
        operators: names of operators that the function is a plain call of.
        make: makes the samples, on the CPU.
        direct: whether every sample calls the operator even if a dispatch mode does not see that.
    """

    name: str
    operators: frozenset[str]
    make: Callable[[], Iterator[Sample]]
    direct: bool = False

    def samples(self) -> Iterator[Sample]:
        """The samples, the same ones each time."""
        for seed in (torch.manual_seed, np.random.seed, random.seed):
            seed(0)
        return itertools.islice(self.make(), MOST_SAMPLES)


def core_operators() -> list[str]:
    """The operators with an overload that torch tags as core."""
    known = (name.partition("::") for name in torch._C._dispatch_get_all_op_names())
    names = {name.partition(".")[0] for space, _, name in known if space == "aten"}
    return sorted(name for name in names if _has_tag(name, torch.Tag.core))


def is_random(operator: str) -> bool:
    """Whether an operator draws random numbers."""
    return _has_tag(operator, torch.Tag.nondeterministic_seeded)


def without_values(operator: str) -> str | None:
    """Why the values of an operator's result cannot be compared; None if they can."""
    if is_random(operator):
        return "random"
    return "not initialized" if operator in ("empty", "empty_strided", "empty_like", "new_empty") else None


@functools.cache
def _has_tag(name: str, tag: torch.Tag) -> bool:
    packet = getattr(torch.ops.aten, name)
    return isinstance(packet, torch._ops.OpOverloadPacket) and any(
        tag in getattr(packet, overload).tags for overload in packet.overloads()
    )


def _of_list(info: Any) -> Iterator[Sample]:
    dtype = next(dtype for dtype in _DTYPES if dtype in info.dtypes)
    for made in info.sample_inputs("cpu", dtype, requires_grad=dtype.is_floating_point):
        yield Sample(info, (made.input, *made.args), made.kwargs)


def _direct(operator: str, make: Callable[[], Iterator[Sample]]) -> Source:
    return Source(f"aten.{operator}, called", frozenset({operator}), make, direct=True)


def _tensor(*shape: int) -> torch.Tensor:
    return torch.randn(shape).requires_grad_()


def _normalisation() -> Iterator[Sample]:
    call = torch.ops.aten._native_batch_norm_legit_no_training
    for shape in ((4, 3), (2, 3, 5, 4)):
        yield Sample(call, (_tensor(*shape), _tensor(3), _tensor(3), torch.randn(3), torch.rand(3) + 0.5, 0.1, 1e-5))
    yield Sample(call, (_tensor(4, 3), None, None, torch.randn(3), torch.rand(3) + 0.5, 0.1, 1e-5))


def _copies() -> Iterator[Sample]:
    for shape in ((3, 4), (4,), ()):
        yield Sample(torch.ops.aten.copy, (_tensor(3, 4), _tensor(*shape)))
    yield Sample(torch.ops.aten.copy, (_tensor(3, 4), torch.arange(4)))


def _drops() -> Iterator[Sample]:
    for p, train in ((0.5, True), (0.5, False), (0.0, True), (1.0, True)):
        yield Sample(torch.native_dropout, (_tensor(3, 4), p, train))


def _resizes() -> Iterator[Sample]:
    for shape in ((2, 6), (5,), (0,)):
        yield Sample(torch.ops.aten.resize_, (torch.randn(3, 4), shape))


def _pools(call: Callable[..., Any], *arguments: Any) -> Callable[[], Iterator[Sample]]:
    def make() -> Iterator[Sample]:
        for argument in arguments:
            yield Sample(call, (_tensor(2, 3, 8), argument))

    return make


def _of_shapes(call: Callable[..., Any], *arguments: Any) -> Callable[[], Iterator[Sample]]:
    def make() -> Iterator[Sample]:
        for shape in ((3, 4), (2, 3, 4)):
            yield Sample(call, (_tensor(*shape), *arguments))

    return make


def _factory(call: Callable[..., Any], *arguments: Any) -> Callable[[], Iterator[Sample]]:
    def make() -> Iterator[Sample]:
        for argument in arguments:
            yield Sample(call, (argument,), {"device": torch.device("cpu")})

    return make


_DIRECT = (
    _direct("_native_batch_norm_legit_no_training", _normalisation),
    _direct("copy", _copies),
    _direct("native_dropout", _drops),
    _direct("alias", _of_shapes(torch.ops.aten.alias)),
    _direct("rand", _factory(torch.rand, (3, 4), (), (0, 2))),
    _direct("randperm", _factory(torch.randperm, 7, 1, 0)),
    _direct("adaptive_avg_pool1d", _pools(torch.ops.aten.adaptive_avg_pool1d, [4], [3], [1])),
    _direct("avg_pool1d", _pools(torch.ops.aten.avg_pool1d, [2], [3], [8])),
    _direct("resize_", _resizes),
    _direct("sym_is_contiguous", _of_shapes(torch.ops.aten.sym_is_contiguous.default)),
    _direct("sym_size", _of_shapes(torch.ops.aten.sym_size.int, 1)),
    _direct("sym_stride", _of_shapes(torch.ops.aten.sym_stride.int, 0)),
    _direct("sym_numel", _of_shapes(torch.ops.aten.sym_numel.default)),
    _direct("sym_storage_offset", _of_shapes(torch.ops.aten.sym_storage_offset.default)),
)


@functools.cache
def sources() -> tuple[Source, ...]:
    """All of them; a source is known by its place."""
    # Here, since it takes seconds, and a package that torch does not install.
    from torch.testing._internal.common_methods_invocations import op_db

    listed = (
        Source(
            info.formatted_name,
            frozenset({info.name.rpartition(".")[2], info.aten_name}),
            functools.partial(_of_list, info),
        )
        for info in op_db
        if any(dtype in info.dtypes for dtype in _DTYPES)
    )
    return (*listed, *_DIRECT)


# Of an operator.
MOST_CASES = 6


@dataclass(frozen=True)
class Case:
    """A sample that an operator is tried with.

    Attributes:
        source, sample: their places, see `sources`.
        in_backward: whether the operator is called in the backward only.
        differentiates: whether the sample has a backward.
    """

    source: int
    sample: int
    in_backward: bool
    differentiates: bool


class _Recorder(TorchDispatchMode):
    """The names of the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func._schema.name.rpartition("::")[2])
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Calls:
    """What a sample calls on the CPU: the names of operators, and whether it has a backward."""

    forward: frozenset[str]
    backward: frozenset[str]
    differentiates: bool


def differentiable(values: Any) -> list[torch.Tensor]:
    """The tensors among some values that gradients are computed of."""
    return [
        value
        for value in tree_leaves(values)
        if isinstance(value, torch.Tensor) and value.requires_grad and (value.is_floating_point() or value.is_complex())
    ]


def copied(value: Any) -> Any:
    """A copy on the CPU, as `placed`."""
    return placed(value, torch.device("cpu"))


def placed(value: Any, device: torch.device) -> Any:
    """A copy on a device, contiguous on each: what `as_strided` shows depends on the layout."""
    if isinstance(value, torch.Tensor):
        copy = value.detach().clone(memory_format=torch.contiguous_format).to(device)
        return copy.requires_grad_(value.requires_grad)
    if isinstance(value, torch.device) or (isinstance(value, str) and value == "cpu"):
        return device
    return value


def calls_of(sample: Sample) -> Calls:
    """Runs a sample on the CPU and records what it calls."""
    args, kwargs = tree_map(copied, (sample.args, sample.kwargs))
    with _Recorder() as forward:
        results = differentiable(sample.call(*args, **kwargs))
    inputs = differentiable((args, kwargs))
    if not results or not inputs:
        return Calls(frozenset(forward.names), frozenset(), False)
    try:
        with _Recorder() as backward:
            torch.autograd.grad(results, inputs, [torch.ones_like(one) for one in results], allow_unused=True)
    except RuntimeError:
        # torch has no derivative of it.
        return Calls(frozenset(forward.names), frozenset(), False)
    return Calls(frozenset(forward.names), frozenset(backward.names), True)


def _spread(cases: list[Case], number: int) -> list[Case]:
    """So many of them, at equal distances."""
    if len(cases) <= number:
        return cases
    return [cases[index * (len(cases) - 1) // (number - 1)] for index in range(number)]


def choose(operators: Collection[str] | None = None) -> dict[str, list[Case]]:
    """The cases of each core operator, none where no sample calls it.

    Those of functions that are a plain call of the operator, or else those that call the fewest operators.
    """
    wanted = sorted(set(core_operators()) if operators is None else set(operators))
    found: dict[str, list[tuple[tuple[bool, int], Case]]] = {name: [] for name in wanted}
    for number, source in enumerate(sources()):
        for index, sample in enumerate(source.samples()):
            try:
                calls = calls_of(sample)
            except Exception:  # noqa: BLE001 (of another layout or device: the CPU does not compute it either)
                continue
            names = calls.forward | calls.backward
            for name in (names | source.operators if source.direct else names) & found.keys():
                if any(map(is_random, names)) and not is_random(name):
                    continue
                backward = name in calls.backward and name not in calls.forward
                case = Case(number, index, backward, calls.differentiates)
                found[name].append(((name not in source.operators, len(names)), case))
    return {name: _spread(_closest(cases), MOST_CASES) for name, cases in found.items()}


def _closest(cases: list[tuple[tuple[bool, int], Case]]) -> list[Case]:
    if not cases:
        return []
    elsewhere, fewest = min(order for order, _ in cases)
    return [case for order, case in cases if order[0] == elsewhere and (not elsewhere or order[1] == fewest)]
