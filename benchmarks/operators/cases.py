"""`choose`: the samples that an operator is tried with, found by recording which operators each sample calls."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from benchmarks.operators.sources import Sample, core_operators, is_random, sources

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
