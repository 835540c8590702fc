"""What `fabric.launch()` changes in the process: eager mode, cheap uploads, and seeds that reach the device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import lightning.fabric.fabric
import lightning.fabric.wrappers
import torch

from lightning_strategy.connector.flops import flops_of_devices
from lightning_strategy.connector.refusals import check_nesting
from lightning_strategy.fabric.steps import FabricSteps
from lightning_strategy.metrics.traceable import metrics_without_reads
from xla_adapters import StepSeed, get_runtime, in_step
from xla_adapters.runtime.modes import eager
from xla_adapters.runtime.transfers import uploading
from xla_adapters.tracing.undo_log import release_retired
from xla_adapters.utils.patching import replaced
from xla_adapters.utils.torch_modes import inference_mode_as_no_grad

_SEED_STREAM = 2

_launched: list[FabricSteps] = []
_lasting = ExitStack()


def begin(steps: FabricSteps) -> None:
    """Launches a Fabric; the first one in the process switches it to eager mode and installs the patches.

    Args:
        steps: of the Fabric's strategy.

    Raises:
        ConfigError: another launched Fabric has other settings.
    """
    global _lasting
    check_nesting([other.config for other in _launched], steps.config)
    if not _launched:
        with ExitStack() as stack:
            stack.callback(release_retired)
            stack.enter_context(eager(steps.config.eager_by_default))
            # For a backward outside of steps, too: see `StepScope`.
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            stack.enter_context(flops_of_devices())
            stack.enter_context(inference_mode_as_no_grad())
            stack.enter_context(metrics_without_reads())
            stack.enter_context(_uploading_batches())
            stack.enter_context(replaced(torch, "manual_seed", _seeding_device(torch.manual_seed)))
            _lasting = stack.pop_all()
    _launched.append(steps)


def end(steps: FabricSteps) -> None:
    """Ends a Fabric; the last one in the process undoes what `begin` did for the first one."""
    _launched.remove(steps)
    if not _launched:
        _lasting.close()


@contextmanager
def _uploading_batches() -> Iterator[None]:
    wrappers: Any = lightning.fabric.wrappers
    fabric: Any = lightning.fabric.fabric
    stock = wrappers.move_data_to_device
    with (
        replaced(wrappers, "move_data_to_device", _moving(stock, _note_batch)),
        replaced(fabric, "move_data_to_device", _moving(stock, lambda _: None)),
    ):
        yield


def _moving(stock: Callable[..., Any], note: Callable[[Any], None]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def move_data_to_device(batch: Any, device: Any) -> Any:
        if torch.device(device).type != get_runtime().device.torch_device().type:
            return stock(batch, device)
        with uploading():
            moved = stock(batch, device)
        for steps in _launched:
            steps.place_batch(moved)
        note(moved)
        return moved

    return move_data_to_device


def _note_batch(batch: Any) -> None:
    for steps in _launched:
        steps.note_batch(batch)


def _seeding_device(stock: Callable[..., torch.Generator]) -> Callable[..., torch.Generator]:
    """`torch.manual_seed` seeds every device but XLA's. `seed_everything` calls it."""

    @functools.wraps(stock)
    def manual_seed(seed: Any) -> torch.Generator:
        generator = stock(seed)
        if not in_step():
            get_runtime().random.set_seed(StepSeed(seed=torch.initial_seed(), step=0, stream=_SEED_STREAM).value())
        for steps in _launched:
            steps.restart()
        return generator

    return manual_seed
