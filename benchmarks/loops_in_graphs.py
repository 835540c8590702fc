"""Loops with smaller graphs (`scan_layers`, stacked AdamW), to compare their compile times.

One has a loop over the layers, the other updates all parameters of one shape at once. Neither is part of the package,
because neither gains: each layer still needs a slice, and XLA:CPU compiles a kernel for each slice at another offset.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers

from benchmarks.clock import Clock, Plan, Timing
from benchmarks.interleaved import Pause
from benchmarks.training import LEARNING_RATE, MAX_NORM
from benchmarks.zoo_batches import Batch
from xla_adapters import get_runtime, initialize

LAZY_UPDATE, SCAN, STACKED = "lazy unrolled", "lazy scan_layers", "lazy stacked update"
RUNS = (LAZY_UPDATE, SCAN, STACKED)


class _Scanned(torch.nn.Module):
    """The layers of a GPT-2 as one module, with torch_xla's loop over layers."""

    def __init__(self, blocks: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(blocks)

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        from torch_xla.experimental.scan_layers import scan_layers

        return scan_layers(self.blocks, hidden, is_layer_pure=True)  # type: ignore[no-any-return]


class _StackedAdamW:
    """Clipping and AdamW, with all parameters of one shape stacked."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._groups: dict[torch.Size, list[list[torch.Tensor]]] = {}
        for parameter in parameters:
            state = [parameter, torch.zeros_like(parameter), torch.zeros_like(parameter)]
            self._groups.setdefault(parameter.shape, []).append(state)
        self._steps = 0

    @torch.no_grad()
    def __call__(self) -> None:
        self._steps += 1
        stacks = [
            (group, [torch.stack(each) for each in zip(*group, strict=True)], torch.stack([p.grad for p, *_ in group]))
            for group in self._groups.values()
        ]
        norm = torch.stack([grad.square().sum() for _, _, grad in stacks]).sum().sqrt()
        factor = (MAX_NORM / (norm + 1e-6)).clamp(max=1.0)
        for group, (value, mean, square), grad in stacks:
            grad = grad * factor
            mean = mean.lerp(grad, 0.1)
            square = square * 0.999 + grad * grad * 0.001
            size = (square / (1 - 0.999**self._steps)).sqrt() + 1e-8
            value = value - LEARNING_RATE * (mean / (1 - 0.9**self._steps)) / size
            for state, results in zip(group, zip(value, mean, square, strict=True), strict=True):
                for tensor, result in zip(state, results, strict=True):
                    tensor.copy_(result)
                state[0].grad = None


def run(
    name: str,
    make: Callable[[], transformers.GPT2LMHeadModel],
    batches: Sequence[Batch],
    plan: Plan,
    pause: Pause,
) -> Timing:
    """Runs in a child.

    Args:
        name: one of `RUNS`.
        make: makes the model.
        batches: as many as the plan has steps.
        plan, pause: see `Clock`.
    """
    import torch_xla

    initialize(eager=False, keep_memory=False)
    model = make().train().to("xla")
    model.tie_weights()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0)
    stacked = _StackedAdamW(parameters)
    if name == SCAN:
        model.transformer.h = torch.nn.ModuleList([_Scanned(list(model.transformer.h))])
    # Executes the uploads, so that they are not part of the first step.
    torch_xla.sync()
    clock, losses = Clock(plan, pause, get_runtime().device.wait), []
    for batch in batches:
        loss = model(**{key: value.to("xla") for key, value in batch.items()}).loss
        loss.backward()
        if name == STACKED:
            stacked()
        else:
            torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
        torch_xla.sync()
        losses.append(loss.detach())
        clock.step_done()
    return clock.timing([float(loss) for loss in losses])
