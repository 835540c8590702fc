"""What a step's own code reads, wherever it lies, counts as soon as it changes; what cannot be followed is traced."""

from __future__ import annotations

import time
from collections import OrderedDict, defaultdict, deque
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import xla_adapters
from tests.device import DEVICE
from tests.replay.replay_cases import assert_followed, assert_traced
from tests.replay.with_and_without_replay import TrainedStep
from tests.support import differences
from xla_adapters import CompiledStep

pytestmark = pytest.mark.isolated

_FACTOR = 1.0


class _Base:
    factor = 1.0


class _Loss(_Base):
    """Called as a function; a method of it is a step."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.settings = SimpleNamespace(inner=SimpleNamespace(factor=1.0))

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.model(inputs).sum().detach() * self.factor

    def step(self, inputs: torch.Tensor) -> torch.Tensor:
        return self._scaled(self.model(inputs).sum().detach())

    def _scaled(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self.settings.inner.factor


def _attribute_in_a_helper(model: nn.Module) -> Any:
    loss = _Loss(model)
    return loss.step, lambda: setattr(loss.settings.inner, "factor", 3.0)


def _default_of_a_class_hidden(model: nn.Module) -> Any:
    loss = _Loss(model)
    return loss, lambda: setattr(loss, "factor", 3.0)


def _default_of_a_base_class_hidden(model: nn.Module) -> Any:
    class Own(_Loss):
        """Of this case alone."""

    return Own(model), lambda: setattr(Own, "factor", 3.0)


def _partial(model: nn.Module) -> Any:
    def step(inputs: torch.Tensor, factor: dict[str, float]) -> torch.Tensor:
        return model(inputs).sum().detach() * factor["it"]

    factor = {"it": 1.0}
    return partial(step, factor=factor), lambda: factor.update(it=3.0)


def _default_argument(model: nn.Module) -> Any:
    def scaled(loss: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        return loss * factor

    def step(inputs: torch.Tensor) -> torch.Tensor:
        return scaled(model(inputs).sum().detach())

    return step, lambda: setattr(scaled, "__defaults__", (3.0,))


def _global_in_a_lambda(model: nn.Module) -> Any:
    def change() -> None:
        global _FACTOR
        _FACTOR = 3.0

    global _FACTOR
    _FACTOR = 1.0
    return (lambda inputs: model(inputs).sum().detach() * _FACTOR), change


def _length_of_an_ordered_dict(model: nn.Module) -> Any:
    parts = OrderedDict(a=1)
    return (lambda inputs: model(inputs).sum().detach() * len(parts)), lambda: parts.update(b=2)


def _member_of_a_defaultdict(model: nn.Module) -> Any:
    parts: dict[str, int] = defaultdict(int)
    step = lambda inputs: model(inputs).sum().detach() * (3 if "warm" in parts else 1)  # noqa: E731
    return step, lambda: parts.update(warm=2)


def _order_of_a_dict(model: nn.Module) -> Any:
    parts = {"a": 1.0, "b": 3.0}
    step = lambda inputs: model(inputs).sum().detach() * [*parts.values()][0]  # noqa: E731, RUF015
    return step, lambda: parts.update(a=parts.pop("a"))


def _kind_of_a_number(model: nn.Module) -> Any:
    settings = SimpleNamespace(power=2)
    # An integer to the power of a float is a float.
    return (lambda inputs: inputs.to(torch.int32) ** settings.power), lambda: setattr(settings, "power", 2.0)


def _presence(model: nn.Module) -> Any:
    settings = SimpleNamespace()
    step = lambda inputs: model(inputs).sum().detach() * (3 if hasattr(settings, "teacher") else 1)  # noqa: E731
    return step, lambda: setattr(settings, "teacher", object())


def _default_of_getattr(model: nn.Module) -> Any:
    settings = SimpleNamespace()
    step = lambda inputs: model(inputs).sum().detach() * getattr(settings, "factor", 1.0)  # noqa: E731
    return step, lambda: setattr(settings, "factor", 3.0)


def _method_of_a_model(model: nn.Module) -> Any:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Dropout(0.5)
            self.beta = 1.0

        def loss(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.inner(model(inputs)).sum().detach() * self.beta

    own = Own().eval()
    return (lambda inputs: own.loss(inputs)), lambda: setattr(own, "beta", 3.0)


def _list_of_models(model: nn.Module) -> Any:
    models = [model, model]
    return (lambda inputs: sum(part(inputs).sum().detach() for part in models)), lambda: models.pop()


def _attribute_of_a_parameter(model: nn.Module) -> Any:
    (weight, _) = model.parameters()
    weight.decay = 1.0  # type: ignore[attr-defined]

    def step(inputs: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(inputs).sum()
        for parameter in model.parameters():
            loss = loss + parameter.sum() * getattr(parameter, "decay", 0.0)
        return loss.detach()

    return step, lambda: setattr(weight, "decay", 3.0)


def _dtype(model: nn.Module) -> Any:
    return (lambda inputs: model(inputs.to(model.weight.dtype)).detach().float()), lambda: model.to(torch.bfloat16)


_FOLLOWED = [
    _attribute_in_a_helper,
    _default_of_a_class_hidden,
    _default_of_a_base_class_hidden,
    _partial,
    _default_argument,
    _global_in_a_lambda,
    _length_of_an_ordered_dict,
    _order_of_a_dict,
    _kind_of_a_number,
    _method_of_a_model,
    _list_of_models,
    _dtype,
]
_TRACED = [_member_of_a_defaultdict, _presence, _default_of_getattr, _attribute_of_a_parameter]


def test_what_changes_is_followed() -> None:
    assert_followed(_FOLLOWED)


def test_what_may_change_and_is_not_followed_is_traced() -> None:
    assert_traced(_TRACED)


class _Timer:
    def __init__(self) -> None:
        self.entered = 0

    def __enter__(self) -> None:
        self.entered += 1

    def __exit__(self, *raised: object) -> None:
        """Leaves."""


class _Counting(nn.Linear):
    calls = 0

    def __len__(self) -> int:
        self.calls += 1
        return 1

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(input)


def test_what_is_not_followed_is_traced() -> None:
    """The Python of each pass is run: its effects are counted."""
    timer, queue, log = _Timer(), deque([1]), {"count": 0}
    model, counting = nn.Linear(4, 3).to(DEVICE), _Counting(4, 3).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    shadowed = SimpleNamespace(n=0)

    def enters(inputs: torch.Tensor) -> torch.Tensor:
        with timer:
            return model(inputs).sum().detach()

    def asks(inputs: torch.Tensor) -> torch.Tensor:
        return model(inputs).sum().detach() * (2 if queue else 1)

    def schedules(inputs: torch.Tensor) -> torch.Tensor:
        loss = model(inputs).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        return loss.detach()

    def maps(inputs: torch.Tensor) -> torch.Tensor:
        first, second = map(counting, (inputs, inputs))
        return (first + second).sum().detach()

    def measures(inputs: torch.Tensor) -> torch.Tensor:
        return model(inputs).sum().detach() * len(counting)

    def hides_a_name(inputs: torch.Tensor) -> torch.Tensor:
        kept = shadowed
        total = sum([kept * 1 for kept in (1, 2)])
        kept.n = kept.n + 1
        return model(inputs).sum().detach() * total

    def times(inputs: torch.Tensor) -> torch.Tensor:
        return model(inputs).sum().detach() * (1 if time.perf_counter() else 2)

    def counts(inputs: torch.Tensor) -> torch.Tensor:
        log["count"] = log["count"] + 1
        return model(inputs).sum().detach()

    def hands_out(inputs: torch.Tensor) -> tuple[torch.Tensor, float]:
        return model(inputs).sum().detach(), schedule.get_last_lr()[0]

    for function in (enters, asks, schedules, maps, measures, hides_a_name, times, counts, hands_out):
        step = CompiledStep(function)
        for _ in range(6):
            step(torch.ones(2, 4))
        assert step.replays == 0, function.__name__
        assert any(f"{__file__}:" in reason for reason in step.reasons), step.reasons
    assert timer.entered == shadowed.n == log["count"] == 6
    assert counting.calls == 18
    assert schedule.last_epoch == 6
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0125)


def test_what_changes_at_each_step_is_said_once() -> None:
    model, settings = nn.Linear(4, 3).to(DEVICE), SimpleNamespace(factor=0.0)

    def function(inputs: torch.Tensor) -> torch.Tensor:
        return model(inputs).sum().detach() * settings.factor

    step = CompiledStep(function)
    for _ in range(20):
        settings.factor += 1.0
        value = step(torch.ones(2, 4))
    unit = model(torch.ones(2, 4).to(DEVICE)).sum().item()
    assert value.item() == pytest.approx(20 * unit, rel=1e-5)
    assert step.replays == 0
    assert "before each of 8 steps in a row, settings.factor changed" in step.reasons
    # It is tried again later: by then it stays as it is.
    for _ in range(60):
        value = step(torch.ones(2, 4))
    assert value.item() == pytest.approx(20 * unit, rel=1e-5)
    assert step.replays > 20


def _halved(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def test_hooks_on_parameters_count() -> None:
    def run(trained: TrainedStep) -> None:
        trained.run(5)
        hook = trained.model[0].weight.register_hook(lambda grad: grad * 0)
        trained.run(5)
        hook.remove()
        trained.run(6)
        trained.model[0].weight.register_post_accumulate_grad_hook(_halved)
        trained.run(5)

    retraced, replayed = TrainedStep(False), TrainedStep("auto")
    run(retraced)
    run(replayed)
    assert differences(retraced.state(), replayed.state()) == []
    assert replayed.step.replays >= 3


def test_a_hook_that_comes_back_counts() -> None:
    """It goes into the dictionary that the first one has left empty."""
    retraced, replayed = TrainedStep(False), TrainedStep("auto")
    for trained in (retraced, replayed):
        trained.model[0].weight.register_hook(lambda grad: grad * 0).remove()
        trained.run(5)
        trained.model[0].weight.register_hook(lambda grad: grad * 0)
        trained.run(5)
    assert differences(retraced.state(), replayed.state()) == []
    assert replayed.step.replays >= 3


def test_copies_made_where_all_is_eager_are_copies() -> None:
    """There a clone shares the buffer, also one that is made to get a buffer of its own."""
    with xla_adapters.eager():
        retraced, replayed = TrainedStep(False), TrainedStep("auto")
        for trained in (retraced, replayed):
            trained.run(7)
            weight = trained.model[0].weight
            cloned, state = weight.detach().clone(), trained.optimizer.state[weight]["exp_avg"].clone()
            kept = {name: value.clone() for name, value in trained.model.state_dict().items()}
            copied = torch.zeros_like(weight).copy_(weight.detach())
            expected, moment = weight.detach().cpu(), state.cpu()
            trained.run(4)
            assert torch.equal(cloned.cpu(), expected)
            assert torch.equal(copied.cpu(), expected)
            assert torch.equal(kept["0.weight"].cpu(), expected)
            assert torch.equal(state.cpu(), moment)
            trained.model.load_state_dict(kept)
            trained.run(4)
        assert differences(retraced.state(), replayed.state()) == []
        assert replayed.step.replays >= 9
