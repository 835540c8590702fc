"""Steps in steps, decorators, generators, early exits and threads: one graph, and never a leaked one."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

import xla_adapters
from tests.device import DEVICE, ON_TORCH_TPU
from tests.support import Loop, differences, flags, state_of, unchanged
from xla_adapters import ConcurrentStepError, ConfigError
from xla_adapters.tracing.make_scope import make_scope
from xla_adapters.tracing.step_scope import current_scope

pytestmark = pytest.mark.isolated


def fresh() -> torch.Tensor:
    return torch.zeros(2).to(DEVICE)


def test_nested_steps_are_one_graph() -> None:
    @xla_adapters.step
    def recursive(value: torch.Tensor, depth: int) -> torch.Tensor:
        return recursive(value + 1, depth - 1) if depth else value * 2

    with xla_adapters.eager():
        loop = Loop()
        for compiles in (1, 0):
            with xla_adapters.count() as counters, xla_adapters.step():
                with xla_adapters.step(name="forward"):
                    loss = loop.forward()
                with xla_adapters.step(name="update"):
                    loss.backward()
                    loop.optimizer.step()
                    loop.optimizer.zero_grad()
            assert (counters.compiles, counters.executions, counters.eager_ops) == (compiles, 1, 0)
        start = fresh()
        with xla_adapters.count() as counters:
            result = recursive(start, 5)
        assert (counters.compiles, counters.executions) == (1, 1)
        assert result.tolist() == [10, 10]


def test_inner_error_caught_by_the_user_rolls_back_the_inner_step_alone() -> None:
    with xla_adapters.eager():
        loop, trained = Loop(), Loop()
        counter, made_outside = fresh(), fresh()
        with xla_adapters.count() as counters, xla_adapters.step(seed=xla_adapters.StepSeed(seed=0, step=0)):
            loss = loop.forward()
            made_outside = counter + 1
            counter.add_(10)
            with pytest.raises(ValueError, match="inner"), xla_adapters.step():
                counter.mul_(7)
                made_outside.add_(5)
                loss.backward()
                loop.optimizer.step()
                raise ValueError("inner")
            assert all(parameter.grad is None for parameter in loop.model.parameters())
            assert not loop.optimizer.state
            counter.add_(1)
        assert (counters.compiles, counters.executions, counters.eager_ops) == (1, 1, 0)
        assert counter.tolist() == [11, 11]
        assert made_outside.tolist() == [1, 1]
        # The forward of the outer step is done (it moved the running statistics); nothing of the inner one is.
        with xla_adapters.step(seed=xla_adapters.StepSeed(seed=0, step=0)):
            expected = trained.forward()
        assert expected.item() == pytest.approx(loss.item(), abs=1e-6)
        left, right = (state_of(one.model, one.optimizer) for one in (loop, trained))
        assert not [name for name in differences(left, right) if "seed" not in name]


def test_three_levels_and_an_outer_error_after_inner_ends() -> None:
    with xla_adapters.eager():
        loop = Loop()
        with xla_adapters.step():
            loop.body()
        with unchanged(loop.model, loop.optimizer), pytest.raises(ValueError, match="outer"), xla_adapters.step():
            with xla_adapters.step(), xla_adapters.step():
                loop.body()
            with pytest.raises(ValueError, match="deep"), xla_adapters.step(), xla_adapters.step():
                loop.body()
                raise ValueError("deep")
            raise ValueError("outer")
        with xla_adapters.count() as counters, xla_adapters.step():
            loop.body()
        assert (counters.compiles, counters.executions) == (0, 1)


def test_decorators_early_exits_and_reuse() -> None:
    value = None

    @xla_adapters.step(name="named")
    def returns_early(flag: bool) -> torch.Tensor:
        if flag:
            return value + 1
        return value * 2

    @xla_adapters.step
    def bare(number: int = 3) -> torch.Tensor:
        """Documented."""
        return value + number

    with xla_adapters.eager():
        value, flags_before = fresh(), flags()
        with xla_adapters.count() as counters:
            assert returns_early(True) is not None
            for index in range(6):
                with xla_adapters.step():
                    value.add_(1)
                    if index == 1:
                        continue
                    value.add_(1)
                    if index == 3:
                        break
            else:
                pytest.fail("did not break")
        assert (counters.compiles, counters.executions, counters.eager_ops) == (3, 5, 0)
        assert value.tolist() == [7, 7]
        assert bare().tolist() == [10, 10]
        assert (bare.__name__, bare.__doc__) == ("bare", "Documented.")
        again = xla_adapters.step()
        for _ in range(2):
            with again:
                value.add_(1)
        assert value.tolist() == [9, 9]
        assert flags() == flags_before
        assert current_scope() is None


def test_generators() -> None:
    with xla_adapters.eager():
        value = fresh()

        @xla_adapters.step
        def segments() -> Iterator[int]:
            value.add_(1)
            received = yield 1
            value.add_(received)
            yield 2
            value.add_(100)

        with xla_adapters.count() as counters:
            generator = segments()
            assert next(generator) == 1
            assert current_scope() is None
            assert value.tolist() == [1, 1]
            assert generator.send(5) == 2
            assert list(generator) == []
        assert value.tolist() == [106, 106]
        # Two of the three are the same graph: the 5 and the 100 are inputs.
        assert counters.executions == 3

        for _ in segments():
            break
        assert value.tolist() == [107, 107]

        def holds_a_step_open() -> Iterator[None]:
            with xla_adapters.step():
                value.add_(1)
                yield

        flags_before = flags()
        with xla_adapters.count() as counters:
            for _ in holds_a_step_open():
                break
            closed = holds_a_step_open()
            next(closed)
            closed.close()
        assert (counters.executions, counters.eager_ops) == (0, 0)
        assert value.tolist() == [107, 107]
        assert flags() == flags_before
        assert current_scope() is None


def test_edges_that_cross() -> None:
    with xla_adapters.eager():
        value, flags_before = fresh(), flags()

        def holds_a_step_open() -> Iterator[None]:
            with xla_adapters.step(name="inner"):
                value.add_(1)
                yield

        generator = holds_a_step_open()
        with xla_adapters.step(name="outer"):
            next(generator)
        with pytest.raises(ConcurrentStepError, match=r"inner.*outer.*ended before"):
            next(generator)
        assert value.tolist() == [1, 1]
        generator = holds_a_step_open()
        with pytest.raises(ValueError, match="late"), xla_adapters.step(name="outer"):
            next(generator)
            raise ValueError("late")
        generator.close()
        assert value.tolist() == [1, 1]
        assert flags() == flags_before


def test_asynchronous_functions_are_refused() -> None:
    with pytest.raises(ConfigError, match="asynchronous"):

        @xla_adapters.step
        async def coroutine() -> None: ...

    with pytest.raises(ConfigError, match="asynchronous"):

        @xla_adapters.step()
        async def generator() -> Iterator[None]:
            yield


def test_two_threads() -> None:
    with xla_adapters.eager():
        value = fresh()
        errors: list[BaseException] = []

        def other() -> None:
            try:
                with xla_adapters.step(name="second"):
                    value.add_(100)
            except ConcurrentStepError as error:
                errors.append(error)

        def run_other() -> None:
            thread = threading.Thread(target=other, name="the other")
            thread.start()
            thread.join()

        with xla_adapters.step(name="first"):
            value.add_(1)
            run_other()
        assert value.tolist() == [1, 1]
        assert "'the other'" in str(errors[0])
        assert "'first'" in str(errors[0])
        run_other()
        assert value.tolist() == [101, 101]

        def leaves_open() -> None:
            make_scope(name="forgotten").open()
            value.add_(1000)

        thread = threading.Thread(target=leaves_open)
        thread.start()
        thread.join()
        # Its thread is dead: the next step throws it away.
        with xla_adapters.step():
            value.add_(1)
        assert value.tolist() == [102, 102]


@pytest.mark.skipif(ON_TORCH_TPU, reason="there a step is recorded in its own thread alone")
def test_another_thread_reads_while_a_step_is_traced() -> None:
    with xla_adapters.eager():
        value = fresh()
        held: list[torch.Tensor] = []
        refused: list[str] = []

        def read() -> None:
            held.append(value.detach() * 2)
            try:
                held[0].tolist()
            except RuntimeError as error:
                refused.append(str(error))

        with pytest.raises(ConcurrentStepError, match=r"'first' is undone.*another thread.*lock"):
            with xla_adapters.step(name="first"):
                value.add_(1)
                thread = threading.Thread(target=read)
                thread.start()
                thread.join()
        assert refused
        held.clear()
        assert value.tolist() == [0, 0]
        with xla_adapters.step():
            value.add_(1)
        assert value.tolist() == [1, 1]
