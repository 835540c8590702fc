"""An exception anywhere in a step leaves no trace of it: not a bit, not a flag, nothing executed."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import xla_adapters
from tests.device import DEVICE
from tests.support import Loop, differences, flags, state_of, unchanged

pytestmark = pytest.mark.isolated


class BreaksInBackward(torch.autograd.Function):
    """Writes a buffer in its backward pass, then raises."""

    error: type[BaseException] = ValueError
    buffer: torch.Tensor

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        BreaksInBackward.buffer.add_(grad.sum())
        raise BreaksInBackward.error


def in_forward(loop: Loop, error: type[BaseException]) -> None:
    loop.forward()
    raise error


def in_backward(loop: Loop, error: type[BaseException]) -> None:
    def hook(grad: torch.Tensor) -> None:
        raise error

    loss = loop.forward()
    loss.register_hook(hook)
    loss.backward()


def in_custom_backward(loop: Loop, error: type[BaseException]) -> None:
    BreaksInBackward.error, BreaksInBackward.buffer = error, loop.model.by_data
    # The last layer's gradients are there when it raises, the first layer's are not.
    hidden = loop.model.norm(loop.model.first(loop.batch))
    loop.model.last(BreaksInBackward.apply(hidden)).sum().backward()


def after_backward(loop: Loop, error: type[BaseException]) -> None:
    loop.forward().backward()
    torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1)
    raise error


def between_optimizers(loop: Loop, error: type[BaseException]) -> None:
    second = torch.optim.SGD(loop.model.last.parameters(), lr=0.1, momentum=0.9)
    loop.forward().backward()
    loop.optimizer.step()
    raise error
    second.step()


def after_optimizer(loop: Loop, error: type[BaseException]) -> None:
    loop.forward().backward()
    loop.optimizer.step()
    loop.optimizer.param_groups[0]["lr"] = 77.0
    raise error


def in_zero_grad(loop: Loop, error: type[BaseException]) -> None:
    loop.forward().backward()
    loop.optimizer.step()
    loop.model.last.weight.grad = None
    loop.model.first.weight.grad.zero_()
    raise error


def at_the_end(loop: Loop, error: type[BaseException]) -> None:
    loop.body()
    torch.rand(3)
    raise error


PLACES = [
    in_forward,
    in_backward,
    in_custom_backward,
    after_backward,
    between_optimizers,
    after_optimizer,
    in_zero_grad,
    at_the_end,
]


def raises_cleanly(
    loop: Loop, place: Callable[[Loop, type[BaseException]], None], error: type[BaseException], executions: int = 0
) -> None:
    with unchanged(loop.model, loop.optimizer, executions=executions):
        with pytest.raises(error), xla_adapters.step():
            place(loop, error)


def goes_on(loop: Loop, compiles: int = 0) -> None:
    with xla_adapters.count() as counters, xla_adapters.step():
        loop.body()
    assert (counters.compiles, counters.executions, counters.eager_ops) == (compiles, 1, 0)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_every_place(error: type[BaseException]) -> None:
    with xla_adapters.eager():
        loop = Loop()
        goes_on(loop, compiles=1)
        for place in PLACES:
            raises_cleanly(loop, place, error)
        goes_on(loop)


def test_a_buffer_of_a_module_that_is_not_called() -> None:
    """A LightningModule's, say: a step calls its `training_step`."""
    with xla_adapters.eager():
        loop, outer = Loop(), torch.nn.Module()
        outer.register_buffer("average", torch.ones(4).to(DEVICE))
        kept = outer.average
        with pytest.raises(ValueError, match="stop"), xla_adapters.step():
            outer.average = outer.average * 0.9 + loop.batch.mean(0)
            loop.body()
            raise ValueError("stop")
        assert outer.average is kept
        assert torch.equal(outer.average.cpu(), torch.ones(4))
        goes_on(loop, compiles=1)


def test_before_the_first_step_and_with_gradients_accumulated() -> None:
    with xla_adapters.eager():
        loop = Loop()
        for place in PLACES:
            raises_cleanly(loop, place, ValueError)
        assert not loop.optimizer.state
        with xla_adapters.step():
            loop.forward().backward()
        assert loop.model.last.weight.grad is not None
        for place in PLACES:
            # The gradient of a bias is a view of another tensor. If it was accumulated before, putting it
            # back is an update of that tensor: one tiny graph, and nothing of the step.
            raises_cleanly(loop, place, ValueError, executions=1)


@pytest.mark.parametrize(
    ("optimizer", "options", "recompiles"),
    [
        (torch.optim.NAdam, {}, 0),
        (torch.optim.SGD, {"momentum": 0.9, "foreach": True}, 0),
        (torch.optim.Adam, {"amsgrad": True, "foreach": False}, 0),
        # It copies the parameter into its average. torch_xla lets the two share a buffer from then on, and which
        # tensors share one is part of the graph: after a discarded step it is another, once.
        (torch.optim.ASGD, {}, 1),
    ],
)
def test_state_of_other_optimizers(
    optimizer: type[torch.optim.Optimizer], options: dict[str, Any], recompiles: int
) -> None:
    with xla_adapters.eager():
        loop = Loop(optimizer, **options)
        raises_cleanly(loop, at_the_end, ValueError)
        goes_on(loop, compiles=1)
        raises_cleanly(loop, at_the_end, ValueError)
        goes_on(loop, compiles=recompiles)
        goes_on(loop)


class Counting(torch.optim.SGD):
    """Keeps Python numbers in its state."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["seen"] = self.state[parameter].get("seen", 0) + 1
            group["total"] = group.get("total", 0) + 1


def test_python_numbers_in_optimizer_state_and_groups() -> None:
    with xla_adapters.eager():
        loop = Loop(Counting)
        with xla_adapters.step():
            loop.body()
        raises_cleanly(loop, at_the_end, ValueError)
        assert {values["seen"] for values in loop.optimizer.state.values()} == {1}
        assert loop.optimizer.param_groups[0]["total"] == 1


@contextmanager
def failing_finish(*, executed: bool, error: type[BaseException]) -> Iterator[None]:
    runtime = xla_adapters.get_runtime()
    real = runtime.tracing.finish_step

    def finish() -> None:
        if executed:
            real()
        raise error

    runtime.tracing.finish_step = finish  # type: ignore[method-assign]
    try:
        yield
    finally:
        runtime.tracing.finish_step = real  # type: ignore[method-assign]


@pytest.mark.parametrize("collects", [True, False])
def test_a_graph_that_does_not_compile(collects: bool) -> None:
    """Whatever Python has collected of the step by then."""
    (gc.enable if collects else gc.disable)()
    with xla_adapters.eager():
        loop = Loop()
        goes_on(loop, compiles=1)
        narrow, weight = torch.ones(6, 8, dtype=torch.bfloat16).to(DEVICE), torch.ones(8).to(DEVICE)
        linear = torch.nn.Linear(8, 2, dtype=torch.bfloat16).to(DEVICE)
        with unchanged(loop.model, loop.optimizer, executions=1), pytest.raises(ValueError, match="mixed precision"):
            with xla_adapters.step():
                loss = loop.body()
                # torch_xla says that this is bfloat16 and computes float32: the compiler refuses what follows.
                wrong = linear(torch.native_batch_norm(narrow, weight, weight, None, None, True, 0.0, 1e-5)[0])
        for lost in (loss, wrong):
            with pytest.raises(xla_adapters.DiscardedTensorError):
                lost.cpu()
        goes_on(loop)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_the_sync_itself_raises(error: type[BaseException]) -> None:
    with xla_adapters.eager():
        loop = Loop()
        goes_on(loop, compiles=1)
        with unchanged(loop.model, loop.optimizer), failing_finish(executed=False, error=error):
            with pytest.raises(error), xla_adapters.step():
                loop.body()
        goes_on(loop)
        before, flags_before = state_of(loop.model, loop.optimizer), flags()
        with failing_finish(executed=True, error=error), pytest.raises(error), xla_adapters.step():
            loop.body()
        # It was executed: the state is that after the step, whole and readable.
        after = state_of(loop.model, loop.optimizer)
        assert flags() == flags_before
        changed = differences(before, after)
        assert {"model first.weight", "optimizer 0 0 exp_avg", "optimizer 0 0 step"} <= set(changed)
        assert after["optimizer 0 0 step"] == before["optimizer 0 0 step"] + 1
        goes_on(loop)


def test_what_a_discarded_step_made_can_not_be_used() -> None:
    with xla_adapters.eager():
        loop = Loop()
        alias = loop.model.first.weight.detach()
        view = loop.model.by_view[0]
        with pytest.raises(ValueError, match="late"):
            with xla_adapters.step():
                loss = loop.body()
                raise ValueError("late")
        for use in (loss.item, loss.backward, loss.cpu, lambda: loss + 1, lambda: torch.stack([loss])):
            with pytest.raises(xla_adapters.DiscardedTensorError, match="discarded"):
                use()
        assert "discarded" in repr(loss)
        # What shares memory with the model is as good as the model.
        assert torch.equal(alias.cpu(), loop.model.first.weight.detach().cpu())
        assert view.cpu().tolist() == [0, 0]


def test_real_interrupts_at_any_moment() -> None:
    """After each Ctrl-C the state is that of a whole number of steps, to the bit."""

    def run_step(loop: Loop, index: int) -> None:
        with xla_adapters.step(seed=xla_adapters.StepSeed(seed=1, step=index)):
            loop.body()

    def whole(loop: Loop) -> dict[str, Any]:
        state = state_of(loop.model, loop.optimizer)
        del state["device seed"], state["host seed"]
        return state

    with xla_adapters.eager():
        reference = Loop()
        trajectory = [whole(reference)]
        for index in range(10):
            run_step(reference, index)
            trajectory.append(whole(reference))
        # Whoever started the tests may have switched Ctrl-C off.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        flags_before, handler = flags(), signal.getsignal(signal.SIGINT)
        moments = random.Random(0)
        interrupted = 0
        for _ in range(25):
            loop = Loop()
            done = 0
            timer = threading.Timer(moments.uniform(0.0, 0.12), os.kill, (os.getpid(), signal.SIGINT))
            try:
                timer.start()
                while done < 10:
                    run_step(loop, done)
                    done += 1
                timer.join()
            except KeyboardInterrupt:
                interrupted += 1
            timer.join()
            assert flags() == flags_before
            assert signal.getsignal(signal.SIGINT) == handler
            # The interrupt may be delivered when the step is done already: then it counts.
            state = whole(loop)
            steps = [number for number in (done, done + 1) if number <= 10]
            found = {number: differences(trajectory[number], state) for number in steps}
            assert not all(found.values()), (done, interrupted, found)
        assert interrupted >= 15
