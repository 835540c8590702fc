"""`preflight`: compiles the steps of a fit for TPUs that are not there, before it begins."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from torch.utils.data import DataLoader, IterableDataset

from xla_adapters.errors import UnsupportedOptionError
from xla_adapters.tools.preflight import preflight_run
from xla_adapters.tools.preflight_report import PreflightReport
from xla_adapters.tools.user_script import Hand
from xla_adapters.utils.host_random import host_random_numbers_kept
from xla_adapters.utils.location import line_of_caller

if TYPE_CHECKING:
    _TrainerBase = L.Trainer
else:
    _TrainerBase = object


class EndingLoops(_TrainerBase):
    """Before a Trainer's class. Without a pre-flight its loops are as always."""

    _hand: Hand

    def _run_stage(self) -> Any:
        loops = self._hand.loops
        if loops is None:
            if self.training:
                self._hand.told_epochs(_epochs(self))
            return super()._run_stage()
        if self.training:
            loops.train(self.fit_loop.run)
            # The sanity check is the validation loop, with all that a validation calls before and after it.
            self.num_sanity_val_steps = 1
            loops.evaluate(self._run_sanity_check)
            return loops.end()
        self._hand.change(f"trainer.{self.state.fn} ({line_of_caller()}): left out")
        return []

    def _teardown(self) -> None:
        # It would bring the weights to the host.
        if self._hand.has_values:
            super()._teardown()


def _epochs(trainer: L.Trainer) -> float:
    """How often a fit reads its data."""
    limits = [float(trainer.max_epochs)] if trainer.max_epochs is not None and trainer.max_epochs > 0 else []
    if trainer.max_steps > 0:
        trainer.fit_loop.setup_data()
        limits.append(trainer.max_steps * trainer.accumulate_grad_batches / max(1, trainer.num_training_batches))
    return min(limits, default=1.0)


# Callbacks of Lightning that change what a step computes. Lightning 2.5 does not have the second.
_IN_STEPS = (GradientAccumulationScheduler, getattr(callbacks, "WeightAveraging", GradientAccumulationScheduler))


@dataclass(frozen=True)
class _Loader:
    """The first samples of a loader; or its first batches, where the size is None."""

    samples: list[Any]
    batch_size: int | None
    collate: Any

    def make(self) -> DataLoader[Any]:
        """The loader in the tracing process."""
        return DataLoader(self.samples, batch_size=self.batch_size, collate_fn=self.collate)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class _Again:
    """A Trainer that is constructed once more, in the tracing process.

    Attributes:
        strategy: a copy of the strategy.
        options: of the Trainer.
    """

    strategy: Any
    options: dict[str, Any]

    def __call__(self, model: torch.nn.Module, loaders: tuple[_Loader | None, _Loader | None], hand: Hand) -> None:
        """Fits, until the graphs are there."""
        cls: Any = type("Trainer", (EndingLoops, L.Trainer), {"_hand": hand})
        trainer = cls(
            strategy=self.strategy,
            default_root_dir=str(hand.folder),
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **self.options,
        )
        train, validation = (None if loader is None else loader.make() for loader in loaders)
        trainer.fit(model, train, validation)


def preflight(
    strategy: Any,
    trainer: L.Trainer,
    module: L.LightningModule,
    train_dataloaders: Any,
    val_dataloaders: Any,
    topology: str,
    *,
    sharded: bool,
    timeout: float,
    save_programs: str | os.PathLike[str] | None,
) -> PreflightReport:
    """See `XLAEagerStrategy.preflight`.

    Args:
        strategy: of the trainer.
        sharded: whether the strategy shards.
        trainer, module, train_dataloaders, val_dataloaders, topology, timeout, save_programs: as there.
    """
    accumulated = trainer.accumulate_grad_batches
    loaders = _first(train_dataloaders, accumulated), _first(val_dataloaders, 1)
    again = _Again(
        strategy=strategy,
        options={
            "accumulate_grad_batches": accumulated,
            "gradient_clip_val": trainer.gradient_clip_val,
            "gradient_clip_algorithm": trainer.gradient_clip_algorithm,
            "callbacks": [item for item in _callbacks(trainer) if _is_in_steps(item)],
        },
    )
    return preflight_run(
        type(module).__name__,
        topology,
        module,
        loaders,
        again,
        sharded=sharded,
        timeout=timeout,
        saves_to=save_programs,
    )


def _first(loader: Any, count: int) -> _Loader | None:
    """What makes the first batches of a loader again. No random number of the program is used up."""
    if loader is None:
        return None
    if not isinstance(loader, Iterable) or isinstance(loader, (Mapping, list, tuple)):
        raise UnsupportedOptionError(
            f"preflight: the loaders are a {type(loader).__name__}; give one loader, or None where the module has it"
        )
    size = loader.batch_size if isinstance(loader, DataLoader) else None
    with host_random_numbers_kept():
        if isinstance(loader, DataLoader) and size and not isinstance(loader.dataset, IterableDataset):
            dataset: Any = loader.dataset
            samples = [dataset[index] for index in range(min(size * count, len(dataset)))]
            return _Loader(_repeated(samples, size * count), size, loader.collate_fn)
        return _Loader(_repeated(list(itertools.islice(iter(loader), count)), count), None, None)


def _repeated(values: list[Any], count: int) -> list[Any]:
    return list(itertools.islice(itertools.cycle(values), count))


def _callbacks(trainer: Any) -> list[Callback]:
    found: list[Callback] = trainer.callbacks
    return found


def _is_in_steps(callback: Callback) -> bool:
    return isinstance(callback, _IN_STEPS) or not type(callback).__module__.startswith(("lightning.", "lightning_"))
