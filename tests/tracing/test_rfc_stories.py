"""The stories of RFC pytorch/xla#6751: what stock torch_xla does in each, in numbers, and what a step here does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch

import xla_adapters
from tests.device import DEVICE, ON_TORCH_TPU
from tests.support import Loop, differences, state_of, unchanged
from xla_adapters import CheckpointSaveError, DeviceSyncError, ProfilerScopeError, StepCounters, TensorReadError

pytestmark = pytest.mark.isolated

if not ON_TORCH_TPU:
    import torch_xla
    import torch_xla.debug.profiler as xp


@contextmanager
def ready(*, lazy: bool = False) -> Iterator[Loop]:
    """A loop two steps into its training, all its graphs compiled."""
    with xla_adapters.eager(not lazy):
        loop = Loop()
        for _ in range(2):
            with xla_adapters.step():
                loop.body()
        yield loop


def cost(counters: StepCounters) -> tuple[int, int]:
    return counters.compiles, counters.executions


def stock() -> AbstractContextManager[None]:
    return torch_xla.step()  # type: ignore[no-any-return]


def test_a_step_is_one_graph() -> None:
    with ready() as loop:
        with xla_adapters.count() as counters, xla_adapters.step():
            loop.body()
        assert cost(counters) == (0, 1)


def test_steps_nest() -> None:
    with ready() as loop:
        for _ in range(0 if ON_TORCH_TPU else 2):
            with xla_adapters.count() as theirs, stock():
                with stock():
                    loss = loop.forward()
                loss.backward()
                loop.optimizer.step()
                loop.optimizer.zero_grad()
        with xla_adapters.count() as ours, xla_adapters.step():
            with xla_adapters.step():
                loop.body()
        assert ON_TORCH_TPU or cost(theirs)[1] >= 2  # each inner edge is a sync
        assert cost(ours) == (0, 1)


def test_a_read_in_a_step() -> None:
    def with_read(loop: Loop, scope: AbstractContextManager[object]) -> None:
        with scope:
            loss = loop.forward()
            loss.item()
            loss.backward()
            loop.optimizer.step()
            loop.optimizer.zero_grad()

    with ready() as loop:
        if not ON_TORCH_TPU:
            with xla_adapters.count() as theirs:
                with_read(loop, stock())
            # Silently: a graph for the read, and the whole step again.
            assert cost(theirs) == (2, 2)
        with unchanged(loop.model, loop.optimizer), pytest.raises(TensorReadError, match=r"loss\.item\(\)"):
            with_read(loop, xla_adapters.step())


def test_a_save_before_the_sync() -> None:
    with ready() as loop:
        if not ON_TORCH_TPU:
            with xla_adapters.count() as theirs, stock():
                loop.body()
                torch.save(loop.model.state_dict(), "/dev/null")
            assert theirs.executions > 1
        with unchanged(loop.model, loop.optimizer), pytest.raises(CheckpointSaveError):
            with xla_adapters.step():
                loop.body()
                torch.save(loop.model.state_dict(), "/dev/null")


def test_a_sync_in_a_step() -> None:
    with ready() as loop:
        if not ON_TORCH_TPU:
            with xla_adapters.count() as theirs, stock():
                loop.forward().backward()
                torch_xla.sync()
                loop.optimizer.step()
                loop.optimizer.zero_grad()
            assert cost(theirs) == (2, 2)
        with unchanged(loop.model, loop.optimizer), pytest.raises(DeviceSyncError), xla_adapters.step():
            loop.forward().backward()
            torch.accelerator.synchronize() if ON_TORCH_TPU else torch_xla.sync()


def test_a_profiler_scope_across_the_edge() -> None:
    with ready() as loop:
        scope = xp.Trace("loss")
        with pytest.raises(RuntimeError, match="Expecting scope to be empty"), stock():
            loop.forward()
            scope.__enter__()
        scope.__exit__(None, None, None)
        # And eager mode stays off after it.
        assert not xla_adapters.get_runtime().tracing.eager()
    with ready() as loop:
        scope = xp.Trace("loss")
        with pytest.raises(ProfilerScopeError, match="'loss'"), xla_adapters.step():
            loop.forward()
            scope.__enter__()
        scope.__exit__(None, None, None)
        assert xla_adapters.get_runtime().tracing.eager()


def test_an_exception_in_a_step() -> None:
    def failing(loop: Loop, scope: AbstractContextManager[object]) -> None:
        with scope:
            loop.forward().backward()
            loop.optimizer.step()
            raise ValueError("late")

    with ready() as loop:
        before = state_of(loop.model, loop.optimizer)
        if not ON_TORCH_TPU:
            with xla_adapters.count() as theirs, pytest.raises(ValueError, match="late"):
                failing(loop, stock())
            # The half of the step is compiled, executed, and kept.
            assert cost(theirs) == (1, 1)
            assert "model first.weight" in differences(before, state_of(loop.model, loop.optimizer))
            loop.optimizer.zero_grad()
        with unchanged(loop.model, loop.optimizer), pytest.raises(ValueError, match="late"):
            failing(loop, xla_adapters.step())


def test_leaving_the_loop_early() -> None:
    with ready(lazy=True) as loop:
        for _ in range(3):
            loop.body()
            break
        # Stock marks the end of a step at the top of the next: the last one is left pending.
        assert xla_adapters.get_runtime().tracing.pending_count() > 0
        with xla_adapters.count() as theirs:
            unrelated = torch.ones(2).to(DEVICE) * 3
            torch_xla.sync()
        assert cost(theirs) == (1, 1)  # the unrelated product and the forgotten step are one new graph
        assert unrelated.tolist() == [3, 3]
    with ready() as loop:
        for _ in range(3):
            with xla_adapters.step():
                loop.body()
                break
        assert xla_adapters.get_runtime().tracing.pending_count() == 0
        with xla_adapters.count() as ours:
            xla_adapters.get_runtime().tracing.flush()
        assert cost(ours) == (0, 0)
