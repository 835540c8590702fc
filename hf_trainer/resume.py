"""What a resumed training goes on from, beside the state that transformers saves itself."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.trainer_utils import has_length

from hf_trainer.data import DeviceLoader, saved_unit_of
from hf_trainer.patches import torch_tpu_is_used
from xla_adapters import get_runtime
from xla_adapters.runtime.transfers import uploading
from xla_adapters.utils.host_random import host_random_numbers_kept
from xla_adapters.utils.unpickling import load_values

EXACT_RESUME = "xla_adapters.trainer.pt"

_log = logging.getLogger(__name__)


def unlogged_loss(trainer: transformers.Trainer) -> float:
    """The sum of losses since the last log; over ranks its mean, so that all ranks call it."""
    if trainer._globalstep_last_logged == trainer.state.global_step:
        return 0.0
    ranks = get_runtime().device.ranks
    (loss,) = get_runtime().transfers.to_host([trainer._tr_loss])
    return loss.item() if ranks is None else ranks.total(loss.item(), "the loss to save") / ranks.size


def save_rest(trainer: transformers.Trainer, folder: Path, total: float) -> None:
    """Writes this state of a training into the folder of a checkpoint, as `EXACT_RESUME`; each rank its own.

    Args:
        trainer: the trainer.
        folder: of the checkpoint.
        total: see `unlogged_loss`.
    """
    ranks = get_runtime().device.ranks
    logged = trainer._globalstep_last_logged
    loader = trainer.callback_handler.train_dataloader
    data = loader.position.state(loader) if isinstance(loader, DeviceLoader) else None
    rest = {"loss_sum": total, "logged_at_step": logged, "step": trainer.state.global_step, "data": data}
    if torch_tpu_is_used():
        rest["device_random"] = get_runtime().random.seed()
    torch.save(rest, folder / _name(0 if ranks is None else ranks.rank))


def restore_rest(trainer: transformers.Trainer, folder: Path) -> None:
    """Restores the state of `save_rest` when a training begins; does nothing if the checkpoint has none."""
    saved = _read(folder)
    if saved is None:
        return
    loader = trainer.callback_handler.train_dataloader
    if saved["data"] is not None and isinstance(loader, DeviceLoader):
        loader.position.resume(saved["data"])
    if "device_random" in saved and torch_tpu_is_used():
        get_runtime().random.set_seed(saved["device_random"])
    if saved["logged_at_step"] == trainer.state.global_step:
        return
    with uploading():
        trainer._tr_loss = torch.tensor([saved["loss_sum"]], dtype=torch.float32).to(trainer.args.device)
    trainer._globalstep_last_logged = saved["logged_at_step"]
    # `train_loss`, logged at the end, is the mean over the steps of this run only.
    trainer._total_loss_scalar -= saved["loss_sum"]


def _name(rank: int) -> str:
    return EXACT_RESUME if not rank else f"{rank}.{EXACT_RESUME}"


def _read(folder: Path) -> dict[str, Any] | None:
    ranks = get_runtime().device.ranks
    path = folder / _name(0 if ranks is None else ranks.rank)
    if not path.is_file():
        # That of the first rank: there were fewer.
        path = folder / EXACT_RESUME
    if not path.is_file():
        return None
    saved: dict[str, Any] = load_values(path)
    return saved


def keeping_numbers_of_data(trainer: transformers.Trainer) -> AbstractContextManager[object]:
    """Around `Trainer._load_rng_state`, which sets random numbers after the first batches of a resumed training.

    Those batches were read with the random numbers of the checkpoint, which have gone on.
    """
    loader = trainer.callback_handler.train_dataloader
    if isinstance(loader, DeviceLoader) and loader.position.goes_on_in_epoch:
        return host_random_numbers_kept()
    return nullcontext()


@contextmanager
def numbers_of_another_device_allowed(checkpoint: str | None) -> Iterator[None]:
    """Around `Trainer._load_rng_state`, which fails if the checkpoint was saved on a CPU or a GPU.

    transformers has set the random numbers of the host by then. Those of the device begin at the training's seed.
    """
    try:
        yield
    except KeyError as error:
        if error.args != ("xla",):
            raise
        _log.warning(
            "%s was saved on another kind of device: it has no random numbers of this one, which begin at the seed of "
            "the training. Dropout differs from that of the other run; weights, optimizer and data go on",
            checkpoint,
        )


class ResumedCounts:
    """Where a resumed training begins, and how long it is, by the samples that it has seen.

    transformers computes both from the number of steps, as if all had been steps of the settings of now. The batch
    size, the accumulation or the length of an epoch may have changed.

    Args:
        trainer: the trainer.
        base: the methods that the mixin overrides.
    """

    def __init__(self, trainer: transformers.Trainer, base: Any) -> None:
        self._trainer = trainer
        self._base = base
        self._begin: tuple[int, int] | None = None

    def initial_values(self, checkpoint: Path | None, args: Any, loader: Any) -> Any:
        """As `Trainer.set_initial_training_values`.

        Args:
            checkpoint: that the training resumes from, or None.
            args: the training arguments.
            loader: reads the training's data.

        Raises:
            CheckpointError: no batch of now begins where the epoch of the checkpoint was left.
        """
        values = self._base.set_initial_training_values(args, loader)
        self._begin = None
        saved = None if checkpoint is None else _read(checkpoint)
        # A loader without a length has no epochs that steps are counted in.
        if saved is None or not has_length(loader) or not isinstance(loader, DeviceLoader):
            return values
        data = saved["data"]
        # Checkpoints of version 0.1 have no unit.
        if data is None or "unit" not in data:
            return values
        epochs, per_epoch, examples, samples, batch, in_epoch, steps = values
        unit = loader.unit()
        epoch, taken, saved_unit = data["epoch"] + data["ended"], data["taken"], saved_unit_of(data, unit)
        if data["ended"]:
            taken = 0
        if args.ignore_data_skip:
            # The epoch begins anew, and ends with the step with which it would have ended.
            self._begin = epoch, 0
            batches = taken * (saved_unit.rows or 1) // (unit.rows or 1)
        else:
            batches = unit.batches(taken, saved_unit)
            self._begin = epoch, batches
        ahead = saved["step"] - (epoch * per_epoch + batches // args.gradient_accumulation_steps)
        if args.max_steps > 0:
            epochs = math.ceil((steps - ahead) / per_epoch)
        else:
            steps += ahead
        return epochs, per_epoch, examples, samples, batch, in_epoch, steps

    def training_state(self, *args: Any, **kwargs: Any) -> Any:
        """As `Trainer._init_training_state`: the epoch, and how many of its batches were trained on."""
        begin = self._base._init_training_state(*args, **kwargs)
        return begin if self._begin is None else self._begin

    def batches_of_update(self, number: int) -> int:
        """How many batches the next update has: the first may complete the one that the checkpoint was left in.

        Args:
            number: of any other update.
        """
        begin, self._begin = self._begin, None
        return number if begin is None else number - begin[1] % self._trainer.args.gradient_accumulation_steps
