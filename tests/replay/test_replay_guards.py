"""What changes under a replayed step takes effect at once: each intervention against the retraced trained."""

from __future__ import annotations

import linecache
import random
import re
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import xla_adapters
from tests.device import DEVICE, ON_TORCH_TPU
from tests.replay.with_and_without_replay import TrainedStep, assert_same_as_traced
from tests.support import update
from xla_adapters import (
    CompiledStep,
    ReplayMismatchError,
    ReplayMismatchWarning,
    XLAConfig,
    replay_safe,
)
from xla_adapters.replay.guards.containers import ContainerEntries
from xla_adapters.runtime import eager

pytestmark = pytest.mark.isolated

_Change = Callable[[TrainedStep], None]


def _freeze(trained: TrainedStep) -> None:
    for parameter in trained.model[0].parameters():
        parameter.requires_grad_(False)


def _rate(trained: TrainedStep) -> None:
    trained.optimizer.param_groups[0]["lr"] = 0.2


def _decay(trained: TrainedStep) -> None:
    trained.optimizer.param_groups[0]["weight_decay"] = 0.0


def _betas(trained: TrainedStep) -> None:
    trained.optimizer.param_groups[0]["betas"] = (0.8, 0.99)


def _evaluate(trained: TrainedStep) -> None:
    trained.model[2].eval()


def _dropout(trained: TrainedStep) -> None:
    trained.model[2].p = 0.6


def _load(trained: TrainedStep) -> None:
    trained.model.load_state_dict({name: value.cpu() * 0.5 for name, value in trained.model.state_dict().items()})


def _in_place(trained: TrainedStep) -> None:
    with torch.no_grad():
        trained.model[0].weight.mul_(1.5)


def _replace_parameter(trained: TrainedStep) -> None:
    weight = torch.full((8, 4), 0.1).to(DEVICE)
    trained.model[0].weight = nn.Parameter(weight)
    trained.optimizer.add_param_group({"params": [trained.model[0].weight]})


def _load_optimizer(trained: TrainedStep) -> None:
    saved = trained.optimizer.state_dict()
    trained.optimizer.load_state_dict(saved)


def _swap_optimizer(trained: TrainedStep) -> None:
    trained.optimizer = torch.optim.SGD(trained.model.parameters(), lr=0.1)


def _hook(trained: TrainedStep) -> None:
    trained.model[0].register_forward_hook(lambda module, args, output: output * 0.5)


def _set_data(trained: TrainedStep) -> None:
    trained.model[0].weight.data = torch.full((8, 4), 0.2).to(DEVICE)


def _swap_data(trained: TrainedStep) -> None:
    weight = trained.model[0].weight
    moment = trained.optimizer.state[weight]["exp_avg"]
    weight.data, moment.data = moment.data, weight.data


def _through_a_view(trained: TrainedStep) -> None:
    trained.model[0].weight.data.view(-1)[:3].fill_(0.3)


@pytest.mark.parametrize(
    ("change", "again", "reason"),
    [
        (_rate, 5, ""),
        (_betas, 5, ""),
        (_load, 5, ""),
        (_in_place, 5, ""),
        (_set_data, 5, ""),
        (_swap_data, 5, ""),
        (_through_a_view, 5, ""),
        (_decay, 3, "another course"),
        (_freeze, 3, "requires_grad"),
        (_evaluate, 3, "eval mode"),
        (_dropout, 3, "0.3 -> 0.6"),
        (_load_optimizer, 3, "state of AdamW was replaced"),
        (_replace_parameter, 3, "the parameter weight of 0 was replaced"),
        (_swap_optimizer, 3, "self.optimizer changed"),
        (_hook, 0, "hook"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_intervention(change: _Change, again: int, reason: str) -> None:
    def run(trained: TrainedStep) -> None:
        trained.run(5)
        change(trained)
        trained.run(5)

    assert_same_as_traced(run, replays=3 + again, reason=reason)


class _Activation(nn.Module):
    """Of which a builtin is a part, and a list."""

    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.function: Callable[[torch.Tensor], torch.Tensor] = torch.tanh
        self.powers = [1, 1]

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.function(values) ** self.powers[0] * self.scale


def _own_forward(module: _Activation) -> None:
    module.forward = lambda values: torch.tanh(values) * 0.5  # type: ignore[method-assign]


def _builtin(module: _Activation) -> None:
    module.function = torch.sigmoid


def _in_a_list(module: _Activation) -> None:
    module.powers[0] = 2


def _hidden_default(module: _Activation) -> None:
    module.scale = 0.5


def _an_equal_value(module: _Activation) -> None:
    module.powers = list(module.powers)


@pytest.mark.parametrize(
    ("change", "again", "reason"),
    [
        (_own_forward, 3, "forward changed"),
        (_builtin, 3, "self.function changed"),
        (_in_a_list, 3, "self.powers changed"),
        (_hidden_default, 3, "scale changed"),
        (_an_equal_value, 5, ""),
    ],
)
def test_something_else_in_a_module(change: Callable[[_Activation], None], again: int, reason: str) -> None:
    def run(trained: TrainedStep) -> None:
        trained.model[2] = module = _Activation()
        trained.run(5)
        change(module)
        trained.run(5)

    assert_same_as_traced(run, replays=3 + again, reason=reason)


def test_another_shape_is_another_call() -> None:
    def run(trained: TrainedStep) -> None:
        for size in (6, 6, 6, 3, 6, 3, 3, 6):
            trained.run(1, size=size)

    assert_same_as_traced(run, replays=4)


def test_a_variable_of_the_function() -> None:
    def train(replay: bool | str) -> tuple[torch.Tensor, int]:
        torch.manual_seed(0)
        model = nn.Linear(4, 2).to(DEVICE)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        factor = 1.0

        def body(batch: torch.Tensor) -> None:
            update((model(batch) * factor).square().mean(), optimizer)

        step = CompiledStep(body, config=XLAConfig(step_replay=replay))
        for number in range(12):
            if number == 4:
                factor = 0.5
            if number == 8:
                optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
            step(torch.full((3, 4), float(number)))
        return model.weight.detach().cpu(), step.replays

    retraced, replayed = train(False), train("auto")
    assert torch.equal(retraced[0], replayed[0])
    assert replayed[1] == 6


def test_a_module_that_counts_its_calls_is_not_replayed() -> None:
    class Counting(nn.Linear):
        calls = 0

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(input)

    model = Counting(4, 2).to(DEVICE)

    @CompiledStep
    def step(batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean().detach()

    for _ in range(8):
        step(torch.ones(3, 4))
    assert model.calls == 8
    assert step.replays == 0
    assert any("it sets self.calls" in reason for reason in step.reasons), step.reasons


@pytest.mark.parametrize("draw", [torch.rand, lambda _: random.random()], ids=["torch", "python"])
def test_random_numbers_of_the_host_are_not_replayed(draw: Callable[[int], object]) -> None:
    model = nn.Linear(4, 2).to(DEVICE)

    @CompiledStep
    def step(batch: torch.Tensor) -> torch.Tensor:
        draw(1)
        return model(batch).square().mean().detach()

    for _ in range(6):
        step(torch.ones(3, 4))
    assert step.replays == 0
    assert any("random" in reason or "draw(1)" in reason for reason in step.reasons), step.reasons


def test_a_number_that_changes_is_not_replayed() -> None:
    model = nn.Linear(4, 2).to(DEVICE)
    numbers = iter(range(3, 100))

    @CompiledStep
    def step(batch: torch.Tensor) -> torch.Tensor:
        return (model(batch) * float(next(numbers))).sum().detach()

    values = [float(step(torch.ones(3, 4))) for _ in range(8)]
    unit = float(model(torch.ones(3, 4).to(DEVICE)).sum())
    assert values == pytest.approx([unit * number for number in range(3, 11)], rel=1e-5)
    assert step.replays == 0
    assert any("it uses next" in reason for reason in step.reasons), step.reasons


def test_a_tensor_left_behind_is_not_replayed() -> None:
    class Remembering(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            self.last = super().forward(input).detach()
            return self.last

    model = Remembering(4, 2).to(DEVICE)

    @CompiledStep
    def step(batch: torch.Tensor) -> torch.Tensor:
        return model(batch).sum().detach()

    for number in range(6):
        batch = torch.full((3, 4), float(number))
        step(batch)
        expected = torch.nn.functional.linear(batch, model.weight.cpu(), model.bias.cpu())
        assert torch.allclose(model.last.cpu(), expected, atol=1e-6)
    assert step.replays == 0


def test_equal_numbers_that_part_are_traced_again() -> None:
    """Decay and momentum are one number at first, and so one input of the graph."""

    def run(trained: TrainedStep) -> None:
        trained.run(5)
        trained.optimizer.param_groups[0]["weight_decay"] = 0.2
        trained.run(5)

    assert_same_as_traced(
        run,
        replays=6,
        reason="shared an input",
        optimizer=torch.optim.SGD,
        weight_decay=0.3,
        momentum=0.3,
    )


def test_off_and_on() -> None:
    for replay, expected in ((False, 0), (True, 4), ("auto", 4)):
        trained = TrainedStep(replay)
        trained.run(6)
        assert trained.step.replays == expected
    with pytest.raises(xla_adapters.ConfigError, match="step_replay='never' is not a valid value"):
        XLAConfig(step_replay="never")  # type: ignore[arg-type]


def test_giving_up_costs_no_compile() -> None:
    model, calls = nn.Linear(4, 2).to(DEVICE), iter(range(100))

    @CompiledStep
    def step(inputs: torch.Tensor) -> tuple[torch.Tensor, int]:
        loss = model(inputs).square().mean()
        loss.backward()
        model.zero_grad()
        return loss.detach(), next(calls)

    handed_out = [step(torch.ones(2, 4))[1] for _ in range(10)]
    assert handed_out == list(range(10))
    assert step.replays == 0
    assert [event.call for event in step.program.events] == [1]


def test_a_refusal_in_a_later_pass_costs_no_compile() -> None:
    trained = TrainedStep("auto")
    trained.run(1)
    traced = trained.step._function

    def drawing(*args: Any) -> Any:
        random.random()
        return traced(*args)

    trained.step._function = drawing
    trained.run(7)
    assert trained.step.replays == 0
    assert "the step draws random numbers on the host" in trained.step.reasons, trained.step.reasons
    assert [event.call for event in trained.step.program.events] == [1]


def test_a_batch_that_is_still_being_computed_is_known_again() -> None:
    model = nn.Linear(1200, 2).to(DEVICE)

    @CompiledStep
    def step(batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean().detach()

    start = torch.full((1200, 1200), 1e-3).to(DEVICE)
    for _ in range(6):
        with eager(True):
            batch = start
            for _ in range(4):
                batch = batch @ start
        step(batch)
    assert step.reasons == {}
    assert step.replays == 4
    assert [event.call for event in step.program.events] == [1]


def _differs(what: str) -> str:
    """On TorchTPU programs are compared, and not what they compute."""
    return r"the program \(the program is another one" if ON_TORCH_TPU else re.escape(what)


@pytest.mark.parametrize("error", [True, False])
def test_replays_are_verified_by_traces(error: bool) -> None:
    """A hidden switch (in a C extension, say) that no guard can see."""
    model, hidden, traced = nn.Linear(4, 2).to(DEVICE), array("d", [1.0]), array("i", [0])

    def scaled() -> float:
        traced[0] += 1
        return hidden[0]

    def function(inputs: torch.Tensor) -> torch.Tensor:
        loss = (model(inputs).square() ** scaled()).mean()
        loss.backward()
        model.zero_grad()
        return loss.detach()

    mode: Any = "error" if error else "retrace"
    config = XLAConfig(step_replay=True, replay_verify_every=20, on_replay_mismatch=mode)
    step = CompiledStep(function, config=config)
    # Two prove it. Verified after 8, 16, 32 replays, and then each 20.
    for calls, replays, traces in ((2 + 8, 8, 2), (1 + 8, 16, 3), (1 + 16, 32, 4), (1 + 20, 52, 5), (1 + 2, 54, 6)):
        for _ in range(calls):
            step(torch.ones(2, 4))
        assert (step.replays, traced[0]) == (replays, traces)
    assert [event.call for event in step.program.events] == [1]
    assert not step.reasons
    step.program.note_checkpoint("before")
    step(torch.ones(2, 4))
    step.program.note_checkpoint("after")
    hidden[0] = 2.0
    step(torch.ones(2, 4))
    step.verify()
    expected = model(torch.ones(2, 4).to(DEVICE)).square().square().mean().item()
    if error:
        message = rf"{_differs('what the step returns')}.*differs.* Steps 59 to 62 .* no checkpoint"
        with pytest.raises(ReplayMismatchError, match=message) as met:
            step(torch.ones(2, 4))
        assert met.value.trusted_steps == 58
    else:
        with pytest.warns(ReplayMismatchWarning, match="Steps 59 to 62"):
            assert step(torch.ones(2, 4)).item() == pytest.approx(expected)
    before = step.replays
    for _ in range(4):
        loss = step(torch.ones(2, 4))
    assert loss.item() == pytest.approx(expected)
    assert step.replays == before


def test_the_newest_checkpoint_before_a_mismatch_is_named() -> None:
    model, hidden = nn.Linear(4, 2).to(DEVICE), array("d", [1.0])

    @replay_safe
    def scaled(loss: torch.Tensor) -> torch.Tensor:
        return loss * hidden[0]

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def function(inputs: torch.Tensor) -> None:
        update(scaled(model(inputs).square().mean()), optimizer)

    step = CompiledStep(function)
    step(torch.ones(2, 4))
    step.program.note_checkpoint("checkpoint-1")
    for number in range(9):
        step(torch.full((2, 4), float(number)))
    step.program.note_checkpoint("checkpoint-10")
    assert step.replays == 8
    hidden[0] = 3.0
    message = rf"{_differs('Linear.weight')}.*differs.* Steps 3 to 10 .* go back to checkpoint-1\."
    with pytest.raises(ReplayMismatchError, match=message):
        step(torch.ones(2, 4))


def test_equal_numbers_are_no_mismatch() -> None:
    """A trace in which numbers share an input is another graph, and computes the same."""
    model = nn.Linear(4, 2).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.25)

    def function(inputs: torch.Tensor) -> torch.Tensor:
        return update(model(inputs).square().mean(), optimizer)

    step = CompiledStep(function)
    for _ in range(10):
        step(torch.ones(2, 4))
    assert step.replays == 8
    optimizer.param_groups[0]["weight_decay"] = 0.9
    for _ in range(4):
        step(torch.ones(2, 4))
    assert step.replays > 8


_scale = 1.0


class _Scaled(nn.Module):
    """It reads a global, in a method of its own."""

    def factor(self) -> float:
        return _scale

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values * self.factor()


def _global(module: _Scaled) -> None:
    global _scale
    _scale = 0.5


def _method_of_class(module: _Scaled) -> None:
    _Scaled.factor = lambda self: 0.5  # type: ignore[method-assign]


def _forward_of_class(module: _Scaled) -> None:
    _Scaled.forward = lambda self, values: values * 0.5  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_global, "_scale changed"),
        (_method_of_class, "self.factor was replaced"),
        (_forward_of_class, "forward was replaced"),
    ],
)
def test_what_the_code_of_a_module_reads(change: Callable[[_Scaled], None], reason: str) -> None:
    def run(trained: TrainedStep) -> None:
        global _scale
        _scale = 1.0
        _Scaled.factor = factor  # type: ignore[method-assign]
        _Scaled.forward = forward  # type: ignore[method-assign]
        trained.model[2] = module = _Scaled()
        trained.run(5)
        change(module)
        trained.run(5)

    factor, forward = _Scaled.factor, _Scaled.forward
    assert_same_as_traced(run, replays=6, reason=reason)


class _Loop:
    """Of which a step is one method, and what it multiplies by another, typed in."""

    def __init__(self) -> None:
        self.model = nn.Linear(4, 2).to(DEVICE)

    def factor(self) -> float:
        raise NotImplementedError

    def step(self, inputs: torch.Tensor) -> torch.Tensor:
        return (self.model(inputs).square().mean() * self.factor()).detach()


def test_a_method_that_was_typed_in() -> None:
    text, name = "def factor(self):\n    return given\n", "<ipython-input-7-3f2a>"
    # As IPython does.
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    typed = compile(text, name, "exec")
    names: dict[str, Any] = {"given": 1.0}
    exec(typed, names)
    _Loop.factor = names["factor"]  # type: ignore[method-assign]
    loop = _Loop()
    step = CompiledStep(loop.step)
    first = [step(torch.ones(2, 4)).item() for _ in range(5)]
    assert step.replays == 3
    names["given"] = 2.0
    assert [step(torch.ones(2, 4)).item() for _ in range(5)] == [2 * loss for loss in first]
    assert list(step.reasons) == ["given changed"]


def test_a_cell_that_a_debugger_has_written_to_a_file(tmp_path: Path) -> None:
    """What runs is what IPython keeps; the file is newer than the process, as if it had been edited."""
    text, file = "def loss(inputs):\n    return (inputs * 2).sum()\n", tmp_path / "345.py"
    file.write_text(text)
    linecache.cache[str(file)] = (len(text), None, text.splitlines(True), str(file))
    names: dict[str, Any] = {}
    exec(compile(text, str(file), "exec"), names)
    step = CompiledStep(names["loss"])
    assert [step(torch.ones(2, 4)).item() for _ in range(5)] == [16.0] * 5
    assert step.replays == 3


@pytest.mark.parametrize(("replay", "replays"), [("auto", 0), (True, 6)])
def test_a_helper_that_counts(replay: bool | str, replays: int) -> None:
    """What the step leaves behind and reads again is left out where that was asked for."""
    model, counted = nn.Linear(4, 2).to(DEVICE), [0]

    def count() -> None:
        counted[0] += 1

    def function(inputs: torch.Tensor) -> torch.Tensor:
        count()
        loss = model(inputs).square().mean()
        loss.backward()
        model.zero_grad()
        return loss.detach()

    step = CompiledStep(function, config=XLAConfig(step_replay=replay))  # type: ignore[arg-type]
    for _ in range(8):
        step(torch.ones(2, 4))
    assert step.replays == replays
    assert counted == [8 - replays]
    assert sum(event.graphs for event in step.program.events) == 1


def test_a_reason_names_the_functions_and_objects_that_differ() -> None:
    owner: dict[str, Any] = {"act": _own_forward, "kind": nn.ReLU, "held": object()}

    def reason(**change: Any) -> str:
        part = ContainerEntries(owner, "model", tuple(owner), len(owner))
        before = dict(owner)
        owner.update(change)
        found = part.difference()
        owner.update(before)
        assert found is not None
        return found

    line, file = _own_forward.__code__.co_firstlineno, re.escape(__file__)
    assert re.fullmatch(rf"model\.act: _own_forward \({file}:{line}\) -> _builtin \({file}:\d+\)", reason(act=_builtin))
    assert reason(kind=nn.GELU).endswith("activation.ReLU -> torch.nn.modules.activation.GELU")
    assert re.fullmatch(r"model\.held: a object at 0x\w+ -> another at 0x\w+", reason(held=object()))
    assert reason(act=None).endswith(" -> None")
