"""A replayed step is the retraced one: the same numbers to the last bit, one compile, one execution."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import xla_adapters
from tests.device import DEVICE, ON_TORCH_TPU
from tests.isolation import isolated, run_in_child
from tests.replay.with_and_without_replay import TrainedStep, assert_same_as_traced
from xla_adapters import CompiledStep, XLAConfig
from xla_adapters.replay.call_spec import CallSpec
from xla_adapters.replay.capture import CaptureScope


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.AdamW, {}),
        pytest.param(torch.optim.AdamW, {"amsgrad": True, "weight_decay": 0.3}, marks=pytest.mark.long),
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
        pytest.param(torch.optim.RMSprop, {"momentum": 0.5}, marks=pytest.mark.long),
        pytest.param(torch.optim.NAdam, {}, marks=pytest.mark.slow),
    ],
    ids=["adamw", "amsgrad", "sgd", "rmsprop", "nadam"],
)
@isolated
def test_bit_identical_over_two_hundred_steps_with_a_schedule(
    optimizer: type[torch.optim.Optimizer], options: dict
) -> None:
    def run(trained: TrainedStep) -> None:
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(trained.optimizer, 200)
        for _ in range(200):
            trained.run(1)
            schedule.step()

    assert_same_as_traced(run, replays=198, optimizer=optimizer, **options)


@isolated
def test_one_compile_and_one_execution_per_step() -> None:
    assert xla_adapters.get_runtime().replay_works
    # On TorchTPU tensors from before it get buffers of their own, operation by operation.
    xla_adapters.get_runtime().device.initialize()
    trained = TrainedStep("auto")
    xla_adapters.get_runtime().tracing.flush()
    with xla_adapters.count() as counters:
        trained.run(10)
    # The one transfer brings the numbers that prove which inputs of a lazy graph are the optimizer's.
    transfers = 0 if ON_TORCH_TPU else 1
    assert (counters.compiles, counters.executions, counters.transfers_to_host) == (1, 10, transfers)
    assert counters.eager_ops == 0
    assert trained.step.replays == 8


@isolated
def test_accumulation_is_a_step_of_its_own() -> None:
    torch.manual_seed(0)
    batches = torch.randn(12, 5, 4)

    def train(replay: bool | str) -> tuple[list[torch.Tensor], int]:
        torch.manual_seed(1)
        model = nn.Linear(4, 2).to(DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def accumulate(batch: torch.Tensor, last: bool) -> None:
            model(batch).square().mean().backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()

        step = CompiledStep(accumulate, config=XLAConfig(step_replay=replay))
        for number, batch in enumerate(batches):
            step(batch, number % 2 == 1)
        return [parameter.detach().cpu() for parameter in model.parameters()], step.replays

    retraced, replayed = train(False), train("auto")
    assert (retraced[1], replayed[1]) == (0, 8)
    assert all(torch.equal(left, right) for left, right in zip(retraced[0], replayed[0], strict=True))


@isolated
def test_the_stream_of_the_device_goes_on_as_if_each_pass_was_traced() -> None:
    """Without seeds of its own a step draws what the ones before it left; so does who draws behind it."""

    def train(replay: bool | str) -> tuple[list[float], list[int], int]:
        torch.manual_seed(0)
        xla_adapters.initialize()
        runtime = xla_adapters.get_runtime()
        runtime.random.set_seed(5)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2), nn.Dropout(0.5)).to(DEVICE)
        step = CompiledStep(lambda batch: model(batch).square().mean().detach(), config=XLAConfig(step_replay=replay))
        losses, seeds = [], []
        for number in range(8):
            losses.append(float(step(torch.ones(3, 4))))
            seeds.append(runtime.random.seed())
            if number % 3 == 2:
                losses.append(float(torch.rand(1, device=DEVICE)))
        return losses, seeds, step.replays

    retraced, replayed = train(False), train("auto")
    assert (retraced[2], replayed[2]) == (0, 6)
    assert retraced[:2] == replayed[:2]


@isolated
def test_gradients_that_are_not_dropped_are_there() -> None:
    model = nn.Linear(4, 2).to(DEVICE)

    @CompiledStep
    def step(batch: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        loss = model(batch).square().sum()
        loss.backward()
        return loss.detach()

    # Before the first pass there were none.
    for number in range(6):
        batch = torch.full((3, 4), float(number + 1))
        loss = step(batch)
        output = torch.nn.functional.linear(batch, model.weight.cpu(), model.bias.cpu())
        assert torch.allclose(loss.cpu(), output.square().sum())
        assert model.weight.grad is not None
        assert torch.allclose(model.weight.grad.cpu(), 2 * output.T @ batch)
    assert step.replays == 3


@isolated
def test_views_aliases_and_copies_see_what_they_should() -> None:
    trained = TrainedStep("auto")
    trained.run(3)
    weight = trained.model[0].weight
    view, alias = weight.view(-1), weight.detach()
    with xla_adapters.eager():
        copied = torch.zeros_like(weight)
        copied.copy_(weight.detach())
        cloned = weight.detach().clone()
    before = weight.detach().cpu().clone()
    trained.run(2)
    after = weight.detach().cpu()
    assert trained.step.replays == 3
    assert not torch.equal(before, after)
    assert torch.equal(view.cpu(), after.view(-1))
    assert torch.equal(alias.cpu(), after)
    # Copying shares the buffer in torch_xla, and the executable reuses the parameter's.
    assert torch.equal(copied.cpu(), before)
    assert torch.equal(cloned.cpu(), before)


@isolated
def test_state_lives_in_as_many_buffers_as_before() -> None:
    """What a replay writes back is let go of again: the number of live device tensors does not grow."""
    import torch_xla

    from xla_adapters.replay.launcher import WRITES_KEPT

    trained = TrainedStep("auto")
    trained.run(20)

    def live() -> int:
        """Where replays have just let go of what they have replaced: how many they are ahead depends on their pace."""
        found = []
        for _ in range(2 * WRITES_KEPT):
            trained.run(1)
            trained.losses.clear()
            found.append(len(torch_xla._XLAC._check_device_tensor_need_materialization(str(torch_xla.device()))))
        return min(found)

    before = live()
    trained.run(8 * WRITES_KEPT)
    assert live() <= before + 8


@isolated
def test_switched_off_where_torch_xla_behaves_otherwise() -> None:
    runtime = xla_adapters.get_runtime()
    runtime.__dict__["replay_works"] = False
    trained = TrainedStep("auto")
    trained.run(4)
    assert trained.step.replays == 0
    assert trained.losses[-1].cpu().isfinite()


@isolated
def test_a_torch_that_does_not_tell_of_writes_is_noticed() -> None:
    xla_adapters.initialize()
    runtime = xla_adapters.get_runtime()
    runtime.lazy.storage_marks = lambda tensors: ([1] * len(tensors), [0] * len(tensors))
    with pytest.warns(UserWarning, match="does not run cached graphs as 2.9 does"):
        assert not runtime.replay_works


@isolated
def test_a_torch_xla_that_behaves_otherwise_is_noticed_once() -> None:
    xla_adapters.initialize()
    runtime = xla_adapters.get_runtime()

    def changed(*args: object) -> None:
        raise RuntimeError("another signature")

    runtime.executables.run = changed
    with pytest.warns(UserWarning, match="does not run cached graphs as 2.9 does") as caught:
        works = [runtime.replay_works, runtime.replay_works]
    assert works == [False, False]
    assert len([warning for warning in caught if "does not run cached graphs" in str(warning.message)]) == 1


def _weights_after(optimizer: type[torch.optim.Optimizer], replay: bool | str) -> tuple[list[torch.Tensor], int]:
    torch.manual_seed(0)
    layers = [module for _ in range(20) for module in (nn.Linear(8, 8), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(8, 4)).to(DEVICE)
    update = optimizer(model.parameters(), lr=0.01)

    def body(inputs: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(inputs), classes)
        loss.backward()
        update.step()
        update.zero_grad()
        return loss.detach()

    step = CompiledStep(body, config=XLAConfig(step_replay=replay))
    for _ in range(24):
        step(torch.randn(8, 8), torch.randint(0, 4, (8,)))
    return [parameter.detach().cpu() for parameter in model.parameters()], step.replays


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_bit_identical_as_users_have_it_compiled(optimizer: type[torch.optim.Optimizer]) -> None:
    """With all that LLVM does, which other tests leave out: other kernels would round otherwise."""
    traced, replayed = (
        run_in_child(functools.partial(_weights_after, optimizer, replay), env={"XLA_FLAGS": ""})
        for replay in (False, "auto")
    )
    assert (traced[1], replayed[1]) == (0, 20)
    assert all(map(torch.equal, traced[0], replayed[0]))


@isolated(env={"CPU_NUM_DEVICES": "8"})
def test_a_tensor_that_has_moved_is_not_looked_for_at_its_old_address() -> None:
    xla_adapters.initialize(spmd=True)
    runtime = xla_adapters.get_runtime()
    total, batch = torch.zeros(1).to(DEVICE), torch.ones(8, device=DEVICE)
    scope = CaptureScope(
        CallSpec(batch=[batch], extras=[total]), set(), lambda found, is_executable_kept: None, config=XLAConfig()
    )
    scope.open()
    (before,) = runtime.lazy.handles([total])
    # As before each write. The next number that is uploaded may get the address.
    runtime.spmd.annotate_whole(total)
    assert runtime.lazy.handles([total]) != [before]
    assert [place.kind for places in scope._unmoved().values() for place in places] == ["batch"]
    scope.abort()


@isolated
@pytest.mark.parametrize("cause", ["code that changes in each step", "a hook"])
def test_what_keeps_steps_from_being_replayed_later_costs_no_compile(cause: str) -> None:
    xla_adapters.initialize()
    model = nn.Linear(4, 3).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    settings = {"temperature": 4.0}

    @xla_adapters.CompiledStep
    def step(inputs: torch.Tensor) -> torch.Tensor:
        loss = (model(inputs) / settings["temperature"]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    for _ in range(4):
        step(torch.randn(5, 4))
    with xla_adapters.count() as counted:
        batches = [torch.randn(5, 4).to(DEVICE) for _ in range(12)]
        before = counted.compiles
        for call, batch in enumerate(batches):
            if cause == "a hook" and call == 0:
                model.register_forward_hook(lambda module, args, result: None)
            elif cause != "a hook":
                settings["temperature"] = 3.0 - call / 8
            step(batch)
        assert counted.compiles == before
    assert any(("in a row" if cause != "a hook" else "hook") in reason for reason in step.reasons)
