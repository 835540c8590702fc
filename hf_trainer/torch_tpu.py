"""What transformers and accelerate do for torch_xla only, done for TorchTPU."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import accelerate.accelerator
import torch
from accelerate import PartialState
from transformers import TrainingArguments

from hf_trainer.loader import DeviceLoader
from xla_adapters import get_runtime
from xla_adapters.errors import UnsupportedOptionError
from xla_adapters.utils.patching import replaced

_log = logging.getLogger(__name__)


def is_used() -> bool:
    """Whether the device is one of TorchTPU."""
    return get_runtime().name == "torch_tpu"


def give_device_to_accelerate(args: TrainingArguments) -> None:
    """Tells accelerate which device it is. accelerate (1.15) does not know TorchTPU, and takes the CPU.

    Called before the trainer makes its `Accelerator`. Said once in a process.

    Args:
        args: of the trainer; `args.device` is right, since transformers knows TorchTPU.

    Raises:
        UnsupportedOptionError: several processes were launched.
    """
    if not is_used():
        return
    if args.world_size > 1:
        raise UnsupportedOptionError(
            f"{args.world_size} processes were launched: with TorchTPU xla-adapters trains in one; start the script "
            "without torchrun or accelerate launch"
        )
    if args.distributed_state is None:
        return
    # Not that of the arguments: of arguments from another process it is a copy.
    state = PartialState()
    if state.device == args.device:
        return
    _say(state.device, args.device)
    state.device = args.device


@functools.cache
def _say(chosen: torch.device, device: torch.device) -> None:
    _log.warning("accelerate took the device %s; a trainer of TorchTPU gives it %s", chosen, device)


@contextmanager
def loader_patches() -> Iterator[None]:
    """`DeviceLoader` reads the batches of all loaders that accelerate prepares, as it does with torch_xla.

    accelerate's own loader would copy batches to the device one by one, and does not know its position.
    """
    if not is_used():
        yield
        return
    prepare = accelerate.accelerator.prepare_data_loader

    def prepare_data_loader(dataloader: Any, device: Any = None, *args: Any, **kwargs: Any) -> Any:
        loader = prepare(dataloader, None, *args, **{**kwargs, "put_on_device": False})
        return DeviceLoader(loader, device)

    with replaced(accelerate.accelerator, "prepare_data_loader", prepare_data_loader):
        yield


@contextmanager
def losses_not_filtered(args: TrainingArguments) -> Iterator[None]:
    """The loop does not read each loss to look for NaN, which it never does with torch_xla.

    Args:
        args: `logging_nan_inf_filter` is False inside the context.
    """
    with ExitStack() as stack:
        if is_used():
            stack.enter_context(replaced(args, "logging_nan_inf_filter", False))
        yield
