"""Every optimizer of torch in a replayed step: bit-identical to the retraced one, or refused with the reason."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.device import DEVICE, ON_TORCH_TPU
from tests.replay.with_and_without_replay import TrainedStep, assert_same_as_traced
from xla_adapters import CompiledStep, XLAConfig

pytestmark = pytest.mark.isolated

# How many of 10 passes are replayed. The first two prove it; whose update takes another course (RAdam's, as its
# variance becomes tractable), or shares an input between numbers that part, is proven anew.
_REPLAYED: dict[str, tuple[int, str]] = {
    "ASGD": (7, "the graph is another one"),
    "Adadelta": (8, ""),
    "Adagrad": (8, ""),
    "Adam": (8, ""),
    "AdamW": (8, ""),
    "Adamax": (8, ""),
    "NAdam": (8, ""),
    "RAdam": (5, "another course"),
    "RMSprop": (8, ""),
    "Rprop": (7, "the graph is another one"),
    "SGD": (8, ""),
}
# On TorchTPU no numbers share an input.
if ON_TORCH_TPU:
    _REPLAYED |= {"ASGD": (8, ""), "RAdam": (6, "another course"), "Rprop": (8, "")}
# They run eagerly, and are none of those whose updates are known.
_REFUSED = {"Adafactor", "LBFGS", "Muon"}
# It takes sparse gradients alone, which XLA does not have.
_UNUSABLE = {"SparseAdam"}


def test_no_optimizer_is_forgotten() -> None:
    found = {
        name
        for name in torch.optim.__all__
        if isinstance(getattr(torch.optim, name), type)
        and issubclass(getattr(torch.optim, name), torch.optim.Optimizer)
    }
    assert found - {"Optimizer"} == {*_REPLAYED, *_REFUSED, *_UNUSABLE}


def test_replayed_bit_for_bit() -> None:
    for name, (replays, reason) in _REPLAYED.items():
        assert_same_as_traced(
            lambda trained: trained.run(10), replays=replays, reason=reason, optimizer=getattr(torch.optim, name)
        )


def test_refused_with_the_reason() -> None:
    def train(name: str, replay: bool | str) -> tuple[list[torch.Tensor], CompiledStep[torch.Tensor]]:
        torch.manual_seed(0)
        model = nn.Linear(4, 3, bias=False).to(DEVICE)
        optimizer: Any = getattr(torch.optim, name)(model.parameters(), lr=0.1)

        def body(batch: torch.Tensor) -> torch.Tensor:
            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(batch).square().mean()
                loss.backward()
                return loss

            if name == "LBFGS":
                return optimizer.step(closure).detach()  # type: ignore[no-any-return]
            loss = closure()
            optimizer.step()
            return loss.detach()

        step = CompiledStep(body, config=XLAConfig(step_replay=replay))
        losses = [step(torch.full((2, 4), float(number + 1))) for number in range(5)]
        return [*losses, model.weight.detach()], step

    for name in sorted(_REFUSED):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected, _ = train(name, False)
            found, step = train(name, "auto")
        assert step.replays == 0, name
        assert any("not known to be safe to leave out" in reason for reason in step.reasons), name
        assert all(torch.equal(left.cpu(), right.cpu()) for left, right in zip(expected, found, strict=True)), name


class Louder(torch.optim.AdamW):
    """Calls the step of its base class, which torch's hooks take for a step of its own."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return super().step(closure)


def test_a_subclass_that_calls_the_step_of_its_base() -> None:
    # torch puts its hooks around the step of a class when the first of them is made.
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
    trained = assert_same_as_traced(
        lambda trained: trained.run(8), replays=0, reason="none of the known optimizers", optimizer=Louder
    )
    plain = TrainedStep(False)
    plain.run(8)
    # Its first pass, which creates the state, is another graph, and rounds otherwise.
    assert torch.allclose(plain.state()["losses"], trained.state()["losses"], atol=1e-6)
    assert [len(group["params"]) for group in trained.optimizer.param_groups] == [6]


def test_parts_that_only_some_batches_reach_keep_their_own_step_counts() -> None:
    """Three kinds of batches, all replayed: recorded while the counts are equal, one must notice what another sets."""

    def trained(replay: bool | str) -> tuple[list[float], CompiledStep]:
        torch.manual_seed(0)
        first, second = nn.Linear(4, 4).to(DEVICE), nn.Linear(4, 4).to(DEVICE)
        optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters()], lr=0.05)

        def update(inputs: torch.Tensor) -> torch.Tensor:
            values = inputs if len(inputs) == 4 else first(inputs)
            values = values if len(inputs) == 3 else second(values)
            loss = values.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        step = CompiledStep(update, config=XLAConfig(step_replay=replay))
        rows = [*[3] * 4, *[4] * 4, *[3] * 4, *[4] * 4, *[2] * 4, 3, *[2] * 4]
        return [step(torch.full((size, 4), number + 1.0)).item() for number, size in enumerate(rows)], step

    (expected, _), (found, step) = trained(False), trained(True)
    assert found == expected
    assert step.replays >= 9, step.reasons
    assert any("step counts" in reason for reason in step.reasons), step.reasons


def _of_one(trained: TrainedStep) -> torch.Tensor:
    return list(trained.optimizer.state.values())[2]["step"]


def _replace_data(trained: TrainedStep) -> None:
    _of_one(trained).data = torch.tensor(1.0)


def _fill_data(trained: TrainedStep) -> None:
    _of_one(trained).data.fill_(1)


def _write_by_numpy(trained: TrainedStep) -> None:
    _of_one(trained).numpy()[...] = 1


def _fill_all(trained: TrainedStep) -> None:
    for state in trained.optimizer.state.values():
        state["step"].data.fill_(1)


# Written together, the counts are one number as before, which replays take as it is.
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_replace_data, "step counts"),
        (_fill_data, "step counts"),
        (_write_by_numpy, "step counts"),
        (_fill_all, ""),
    ],
)
def test_step_counts_that_are_written_without_a_new_version(change: Callable[[TrainedStep], None], reason: str) -> None:
    def run(trained: TrainedStep) -> None:
        trained.run(6)
        change(trained)
        trained.run(6)

    assert_same_as_traced(run, replays=8 if reason else 10, reason=reason)
