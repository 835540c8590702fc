"""Steps whose code reads something that is changed in mid-run, with replay and without."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from tests.device import DEVICE
from xla_adapters import CompiledStep, XLAConfig

# Makes a step of a model, and what is changed between two of its passes.
Case = Callable[[nn.Module], tuple[Callable[..., Any], Callable[[], object]]]


def assert_followed(cases: Iterable[Case]) -> None:
    """What is changed takes effect at once, and steps are replayed before and behind it."""
    for case in cases:
        (expected, _), (found, step) = _run(case, False), _run(case, "auto")
        assert found == expected, case.__name__
        assert expected[:5] != expected[5:], f"{case.__name__} changes nothing"
        assert step.replays >= 3, (case.__name__, step.reasons)
        assert len(step.reasons) == 1, (case.__name__, step.reasons)


def assert_traced(cases: Iterable[Case]) -> None:
    """What is changed takes effect at once, because no pass is replayed."""
    for case in cases:
        (expected, _), (found, step) = _run(case, False), _run(case, "auto")
        assert found == expected, case.__name__
        assert expected[:5] != expected[5:], f"{case.__name__} changes nothing"
        assert step.replays == 0, case.__name__
        assert all("not known to be safe" in reason for reason in step.reasons), (case.__name__, step.reasons)


def _run(case: Case, replay: bool | str) -> tuple[list[Any], CompiledStep[Any]]:
    torch.manual_seed(0)
    function, change = case(nn.Linear(4, 3).to(DEVICE))
    step = CompiledStep(function, config=XLAConfig(step_replay=replay))  # type: ignore[arg-type]
    found = [step(torch.full((2, 4), 1.0 + number)) for number in range(5)]
    change()
    found += [step(torch.full((2, 4), 1.0 + number)) for number in range(5)]
    return [(value.cpu().tolist(), value.dtype) for value in found], step
