"""The code of a step catches the error of an execution that is refused, and goes on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from torch import Tensor

import xla_adapters
from tests.device import DEVICE
from tests.support import Loop, unchanged
from xla_adapters.errors import GraphBreakError, HostOperatorError

pytestmark = pytest.mark.isolated


def _roots(x: Tensor) -> Tensor:
    return torch.linalg.cholesky(x @ x.mT + torch.eye(len(x), device=x.device))  # marked


def _go_on(function: Callable[[Tensor], object], x: Tensor) -> Tensor:
    pending = x * 2
    with suppress(RuntimeError):
        function(pending)
    return (pending * 3).sum()


def test_an_operator_on_the_host_has_its_line() -> None:
    with xla_adapters.eager():
        x = torch.ones(3, 3).to(DEVICE)
        with pytest.raises(HostOperatorError) as raised, xla_adapters.step():
            _go_on(_roots, x)
        said = str(raised.value)
        assert "the operator linalg_cholesky_ex, which torch_xla computes on the host; the code caught" in said
        assert f"{__file__}:" in said
        assert "# marked" in said


def test_a_value_that_the_refusal_has_lost_is_no_riddle() -> None:
    """A refusal to several tensors at once leaves them without a value: "Check failed: data()->tensor_data"."""
    with xla_adapters.eager():
        loop = Loop()
        caught = pytest.raises(GraphBreakError, match="; the code caught the error")
        with unchanged(loop.model, loop.optimizer), caught, xla_adapters.step():
            loop.body()
            _go_on(lambda pending: torch._to_cpu([pending]), loop.batch)
        with xla_adapters.step():
            loop.body()


def test_reads_that_are_caught_change_nothing() -> None:
    with xla_adapters.eager():
        x = torch.ones(3, 3).to(DEVICE)
        with xla_adapters.count() as counters, xla_adapters.step():
            result = _go_on(lambda pending: pending.sum().item(), x)
        assert (counters.executions, result.item()) == (1, 54.0)
