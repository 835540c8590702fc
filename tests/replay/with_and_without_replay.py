"""A step of one's own, replayed and retraced side by side: what the tests of step replay share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

import xla_adapters
from tests.device import DEVICE
from tests.support import differences, state_of
from xla_adapters import CompiledStep, StepSeed, XLAConfig

CLASSES = 3


class TrainedStep:
    """A model, an optimizer and a step with dropout, clipping and a statistic.

    Args:
        replay: `step_replay` of the step.
        optimizer: the optimizer's class.
        config: further options of the step.
        options: of the optimizer.
    """

    def __init__(
        self,
        replay: bool | str,
        optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
        *,
        config: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, CLASSES)
        ).to(DEVICE)
        # The tensors of the state begin in buffers of their own.
        self.optimizer = optimizer(self.model.parameters(), **{"lr": 0.05, **options})
        self.passes = 0
        self.losses: list[torch.Tensor] = []
        self.clip = 0.5

        def step(inputs: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
            loss = nn.functional.cross_entropy(self.model(inputs), classes)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            self.optimizer.zero_grad()
            return loss.detach()

        # Traced passes that verify replays would be counted with the others.
        chosen = {"step_replay": replay, "replay_verify_every": None, **(config or {})}
        self.step = CompiledStep(step, config=XLAConfig(**chosen), seed=self._seed)  # type: ignore[arg-type]

    def _seed(self) -> StepSeed:
        return StepSeed(seed=7, step=self.passes)

    def run(self, passes: int, *, size: int = 6) -> None:
        """Runs the step so many times, each time on another batch."""
        for _ in range(passes):
            generator = torch.Generator().manual_seed(self.passes)
            inputs = torch.randn(size, 4, generator=generator)
            classes = torch.randint(0, CLASSES, (size,), generator=generator)
            self.losses.append(self.step(inputs, classes))
            self.passes += 1

    def state(self) -> dict[str, Any]:
        """Everything, on the host."""
        state = state_of(self.model, self.optimizer)
        state["losses"] = torch.stack([loss.cpu() for loss in self.losses])
        # Whoever traces asks the host's generator for nothing either, but makes tensors: not compared.
        del state["host seed"]
        return state


def assert_same_as_traced(
    run: Callable[[TrainedStep], None], *, replays: int, reason: str = "", **options: Any
) -> TrainedStep:
    """Runs the same with and without replay, and demands the same state to the last bit.

    Args:
        run: given a step, trains it and intervenes.
        replays: how many passes must have been replayed.
        reason: must be part of a reason noted for a pass that was traced again; empty for no reason at all.
        **options: of the steps.

    Returns:
        The replayed one.
    """
    assert xla_adapters.get_runtime().replay_works
    retraced, replayed = TrainedStep(False, **options), TrainedStep("auto", **options)
    run(retraced)
    run(replayed)
    assert retraced.step.replays == 0
    assert replayed.step.replays == replays, replayed.step.reasons
    if reason:
        assert any(reason in found for found in replayed.step.reasons), replayed.step.reasons
    else:
        assert not replayed.step.reasons, replayed.step.reasons
    assert differences(retraced.state(), replayed.state()) == []
    return replayed
