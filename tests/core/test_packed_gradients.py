"""Gradients that replays leave behind in rows: who looks for them finds them as they would be otherwise."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import xla_adapters
from tests.core.replay_twins import CLASSES, Twin, assert_twins
from tests.core.support import are_all_packed, pack_small_states
from tests.isolation import isolated
from xla_adapters import CompiledStep, XLAConfig, get_backend, packed_gradients
from xla_adapters.config import StepReplay
from xla_adapters.errors import DiscardedTensorError


def leaving(replay: StepReplay) -> Twin:
    """Its step drops the gradients of the step before when it begins, and leaves its own."""
    twin = Twin(replay)
    parameters = list(twin.model.parameters())

    def step(inputs: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        twin.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(twin.model(inputs), classes)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 0.5)
        twin.optimizer.step()
        return loss.detach()

    twin.step = CompiledStep(step, config=XLAConfig(step_replay=replay), seed=twin._seed)
    return twin


def gradients(twin: Twin) -> list[torch.Tensor]:
    return [parameter.grad for parameter in twin.model.parameters() if parameter.grad is not None]


def are_packed(twin: Twin) -> bool:
    return are_all_packed(gradients(twin))


def on_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().tolist()
    return [on_host(item) for item in value] if isinstance(value, (list, tuple)) else value


def assert_same(run: Callable[[Twin], Any], *, replays: int, reason: str = "other gradients are there") -> Twin:
    """Runs the same with and without replay, and demands the same findings and state.

    Args:
        run: given a twin, trains it; returns what it found.
        replays: how many passes must have been replayed. The first of all finds no gradients, and proves nothing.
        reason: part of one for which a pass was traced again.
    """
    pack_small_states()
    assert get_backend().replay_works
    retraced, replayed = leaving(False), leaving("auto")
    found = [run(retraced), run(replayed)]
    assert replayed.step.replays == replays, replayed.step.reasons
    assert any(reason in found for found in replayed.step.reasons), replayed.step.reasons
    assert found[0] == found[1]
    assert found[0] is not None
    states = [retraced.state(), replayed.state()]
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        assert on_host(value) == on_host(states[1][name]), name
    return replayed


@isolated
def test_replays_leave_them_in_a_row() -> None:
    pack_small_states()
    twin = leaving("auto")
    assert get_backend().replay_works
    with xla_adapters.count() as proof:
        twin.run(4)
    assert (proof.compiles, proof.executions) == (1, 4)
    assert twin.step.replays == 1
    assert are_packed(twin)
    stand_ins = gradients(twin)
    assert [tensor.shape for tensor in stand_ins] == [parameter.shape for parameter in twin.model.parameters()]
    assert {tensor.device.type for tensor in stand_ins} == {"xla"}
    del stand_ins
    with xla_adapters.count() as replays:
        twin.run(5)
    assert (replays.compiles, replays.executions, replays.transfers_to_host) == (0, 5, 0)
    replay = twin.step.program._replay
    assert replay is not None
    (plan,) = replay._plans.values()
    assert plan.recording is not None
    kinds = [place.kind for places in plan.recording.targets for place in places]
    # The parameters, and what batch norm counts.
    assert (kinds.count("gradients"), kinds.count("grad"), kinds.count("packed")) == (1, 0, 2)


def _norms(twin: Twin) -> Any:
    return on_host(torch._foreach_norm(gradients(twin)))


def _sum(twin: Twin) -> Any:
    return [gradient.sum().item() for gradient in gradients(twin)]


def _deep_copies(twin: Twin) -> Any:
    return on_host(copy.deepcopy(gradients(twin)))


def _views(twin: Twin) -> Any:
    return [gradient.view(-1).tolist() for gradient in gradients(twin)]


def _clipped(twin: Twin) -> Any:
    return nn.utils.clip_grad_norm_(twin.model.parameters(), 0.01).item(), on_host(gradients(twin))


def _in_a_thread(twin: Twin) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(on_host(gradients(twin))))
    thread.start()
    thread.join()
    return found


def _in_place(twin: Twin) -> Any:
    for parameter in twin.model.parameters():
        assert parameter.grad is not None
        parameter.grad *= 2
    return on_host(gradients(twin))


def _zeroed(twin: Twin) -> Any:
    twin.model.zero_grad(set_to_none=False)
    return on_host(gradients(twin))


def _backward(twin: Twin) -> Any:
    """Autograd adds in C++, and asks nobody."""
    inputs = torch.linspace(-1, 1, 24).reshape(6, 4).to("xla")
    hidden = torch.tanh(twin.model[0](inputs))
    nn.functional.cross_entropy(twin.model[4](hidden), torch.arange(6).remainder(CLASSES).to("xla")).backward()
    return [[round(number, 4) for number in gradient.flatten().tolist()] for gradient in gradients(twin)]


def _one_gradient(twin: Twin) -> Any:
    first = next(iter(twin.model.parameters()))
    (first * first.detach()).sum().backward()
    return [[round(number, 4) for number in gradient.flatten().tolist()] for gradient in gradients(twin)]


@pytest.mark.parametrize(
    "use",
    [
        *(_norms, _sum, _deep_copies, _views, _clipped, _in_a_thread, _in_place, _zeroed),
        *(_backward, _one_gradient),
    ],
    ids=lambda use: use.__name__,
)
@isolated
def test_whoever_uses_them_finds_them(use: Callable[[Twin], Any]) -> None:
    def run(twin: Twin) -> Any:
        twin.run(5)
        if twin.step.replays:
            assert are_packed(twin)
        found = [use(twin)]
        assert not are_packed(twin)
        for _ in range(2):
            twin.run(1)
            found.append(use(twin))
        twin.run(3)
        if twin.step.replays:
            assert are_packed(twin)
        return [*found, use(twin)]

    assert_same(run, replays=7)


@isolated
def test_who_holds_one_keeps_it() -> None:
    """It was not looked at before the next step."""

    def run(twin: Twin) -> Any:
        twin.run(4)
        first = gradients(twin)
        twin.run(1)
        second = gradients(twin)[0]
        twin.run(2)
        assert all(tensor is not other for tensor in first for other in gradients(twin))
        return on_host(first), on_host(second), on_host(gradients(twin))

    assert_same(run, replays=4)


@isolated
def test_another_parameter_that_has_it_keeps_it() -> None:
    """It holds it in C++ alone."""
    other = torch.nn.Parameter(torch.zeros(8, 4, device="xla"))

    def run(twin: Twin) -> Any:
        twin.run(5)
        other.grad = next(iter(twin.model.parameters())).grad
        twin.run(1)
        return on_host(other.grad), on_host(gradients(twin))

    assert_same(run, replays=3)


@isolated
def test_what_is_added_by_way_of_another_parameter_is_not_lost_in_silence() -> None:
    pack_small_states()
    twin = leaving("auto")
    assert get_backend().replay_works
    twin.run(5)
    other = torch.nn.Parameter(torch.ones(8, 4, device="xla"))
    other.grad = next(iter(twin.model.parameters())).grad
    (other * 1000).sum().backward()
    first, second = gradients(twin)[:2]
    with pytest.raises(DiscardedTensorError, match=r"test_packed_gradients\.py:.*grad\.clone"):
        second.sum()
    # The others are there.
    assert second.abs().sum().item() > 0
    assert not are_packed(twin)
    assert first is other.grad


@isolated
def test_an_interrupt_while_they_are_brought_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written by then is no sign that they are lost."""
    backend = get_backend()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    def run(twin: Twin) -> Any:
        twin.run(5)
        if are_packed(twin):
            for function in ("write", "forget_writes"):
                with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                    patch.setattr(backend, function, interrupted)
                    gradients(twin)[0].sum()
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(packed_gradients, "unmark", interrupted)
                gradients(twin)[0].sum()
        found = on_host(gradients(twin))
        assert not are_packed(twin)
        twin.run(2)
        return found, on_host(gradients(twin))

    assert_same(run, replays=4)


@isolated
def test_gradients_are_where_backward_begins() -> None:
    def run(twin: Twin) -> Any:
        found = []
        for form in range(3):
            twin.run(5 if form == 0 else 2)
            source = torch.ones(8, 4, device="xla", requires_grad=True)
            gradient = next(iter(twin.model.parameters())).grad
            assert gradient is not None
            result = source * 3
            if form == 0:
                result.backward(gradient)
            elif form == 1:
                torch.autograd.backward([result], [gradient])
            else:
                (source.grad,) = torch.autograd.grad(result, source, grad_outputs=[gradient])
            found.append(on_host(source.grad))
        return found

    assert_same(run, replays=6)


@pytest.mark.parametrize("together", [1, 2])
@isolated
def test_a_gradient_is_the_batch_of_another_step(together: int) -> None:
    config = XLAConfig(steps_per_execution=together)
    double = CompiledStep(lambda gradient: gradient * 2, config=config)

    def run(twin: Twin) -> Any:
        twin.run(4)
        found = []
        for _ in range(5):
            twin.run(1)
            found.append(on_host(double(gradients(twin)[0])))
        return found

    assert_same(run, replays=6)


@pytest.mark.parametrize("together", [1, 2])
@isolated
def test_another_step_adds_to_them(together: int) -> None:
    pack_small_states()
    assert get_backend().replay_works

    def run(replay: StepReplay) -> Any:
        twin = leaving(replay)
        count = together if replay == "auto" else 1

        def add(inputs: torch.Tensor) -> torch.Tensor:
            loss = twin.model[4](torch.tanh(twin.model[0](inputs))).square().mean()
            loss.backward()
            return loss.detach()

        adds = CompiledStep(add, config=XLAConfig(step_replay=replay, steps_per_execution=count))
        twin.run(4)
        for number in range(6):
            for part in range(2):
                adds(torch.full((6, 4), 0.1 * number + part))
            twin.run(1)
        adds(torch.ones(6, 4))
        return adds, on_host(gradients(twin)), [on_host(value) for value in twin.state().values()]

    retraced, replayed = run(False), run("auto")
    assert replayed[0].replays >= 4, replayed[0].reasons
    assert retraced[1:] == replayed[1:]


@isolated
def test_gradients_dropped_behind_the_step_cost_no_transfer() -> None:
    pack_small_states()
    assert get_backend().replay_works
    twin = Twin("auto")
    parameters = list(twin.model.parameters())

    def step(inputs: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(twin.model(inputs), classes)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 0.5)
        twin.optimizer.step()
        return loss.detach()

    twin.step = CompiledStep(step, seed=twin._seed)
    for number in range(8):
        if number == 4:
            first = gradients(twin)
            del first
            twin.optimizer.zero_grad()
            counting = xla_adapters.count()
            counters = counting.__enter__()
        twin.run(1)
        assert len(gradients(twin)) == len(parameters)
        twin.optimizer.zero_grad()
    counting.__exit__(None, None, None)
    assert twin.step.replays >= 5, twin.step.reasons
    assert counters.transfers_to_host == 0


@isolated
def test_gradients_that_the_user_drops_or_sets_are_traced_for() -> None:
    def run(twin: Twin) -> Any:
        twin.run(4)
        twin.optimizer.zero_grad()
        twin.run(4)
        parameter = next(iter(twin.model.parameters()))
        parameter.grad = torch.ones_like(parameter)
        twin.run(2)
        return on_host(gradients(twin))

    assert_same(run, replays=4, reason="a gradient is absent that was not")


@isolated
def test_a_trace_between_replays_finds_them() -> None:
    def run(twin: Twin) -> Any:
        twin.run(4)
        twin.step.program.verify_replay()
        twin.run(4)
        return on_host(gradients(twin))

    replayed = assert_same(run, replays=4)
    with xla_adapters.count() as counters:
        replayed.run(1)
    assert counters.compiles == 0


@isolated
def test_steps_of_two_sizes() -> None:
    def run(twin: Twin) -> Any:
        found = []
        for size in (6, 4):
            twin.run(4, size=size)
        for size in (6, 4, 6, 4):
            twin.run(1, size=size)
            found.append(on_host(gradients(twin)[0]))
        twin.run(1, size=6)
        twin.run(1, size=4)
        return found, on_host(gradients(twin))

    assert_same(run, replays=9)


@isolated
def test_gradients_are_added_to_those_of_a_step_before() -> None:
    """Micro batches: of two steps one drops what is there, the other adds to it, and both update."""
    pack_small_states()
    assert get_backend().replay_works

    def run(replay: StepReplay) -> Any:
        twin = Twin(replay)

        def step(inputs: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
            if inputs.shape[0] == 6:
                twin.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(twin.model(inputs), classes)
            loss.backward()
            twin.optimizer.step()
            return loss.detach()

        twin.step = CompiledStep(step, config=XLAConfig(step_replay=replay), seed=twin._seed)
        for _ in range(6):
            twin.run(1, size=6)
            twin.run(1, size=4)
        return twin, on_host(gradients(twin)), [on_host(value) for value in twin.state().values()]

    retraced, replayed = run(False), run("auto")
    assert replayed[0].step.replays >= 6, replayed[0].step.reasons
    assert retraced[1:] == replayed[1:]


@isolated
def test_nothing_holds_on_to_a_model_that_is_gone() -> None:
    pack_small_states()
    twin = leaving("auto")
    assert get_backend().replay_works
    twin.run(5)
    assert are_packed(twin)
    model = weakref.ref(twin.model[0].weight)
    del twin
    xla_adapters.get_backend().wait()
    gc.collect()
    assert model() is None


@isolated
def test_state_and_gradients_of_twins_with_the_gradients_dropped() -> None:
    """There are none to pack: as before."""
    pack_small_states()
    assert_twins(lambda twin: twin.run(6), replays=4)
