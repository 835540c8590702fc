"""Timed trainings with the Trainers of HuggingFace and Lightning, stock and ours."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import torch
import transformers
from lightning.pytorch.accelerators import XLAAccelerator
from lightning.pytorch.strategies import SingleDeviceXLAStrategy
from torch.utils.data import DataLoader

import hf_trainer
from benchmarks.harness import Clock, Pause, Plan, Timing
from benchmarks.training import LEARNING_RATE, MAX_NORM, Batches, arguments, only_item
from benchmarks.zoo import Batch
from lightning_strategy import XLAEagerStrategy
from tests.hf_trainer.text_models import tokenizer
from xla_adapters import XLAConfig, get_runtime, initialize

HF_STOCK, HF_TRACED, HF_REPLAYED = "HF stock", "HF traced", "HF replayed"
LIGHTNING_STOCK, LIGHTNING_TRACED, LIGHTNING_REPLAYED = "Lightning stock", "Lightning traced", "Lightning replayed"
TRL_STOCK, TRL_TRACED = "TRL SFT stock", "TRL SFT traced"
# Replayed, with `xla_report=False`.
HF_UNREPORTED, LIGHTNING_UNREPORTED = "HF unreported", "Lightning unreported"
# Ours with each `xla_mode`.
MODES = {f"HF {mode}": mode for mode in ("eager", "lazy", "eager+compile", "eager+dynamo")}
STOCK = (HF_STOCK, LIGHTNING_STOCK, TRL_STOCK)
HF_RUNS = (HF_STOCK, HF_TRACED, HF_REPLAYED)
LIGHTNING_RUNS = (LIGHTNING_STOCK, LIGHTNING_TRACED, LIGHTNING_REPLAYED)
# Only run where they are named.
NAMED_ONLY = (HF_UNREPORTED, LIGHTNING_UNREPORTED, *MODES)
TRL_RUNS = (TRL_STOCK, TRL_TRACED)
RUNS = (*HF_RUNS, *LIGHTNING_RUNS, *TRL_RUNS)

MakeModel = Callable[[], torch.nn.Module]


def run(name: str, make: MakeModel, batches: Sequence[Batch], plan: Plan, pause: Pause) -> Timing:
    """Runs in a child.

    Args:
        name: one of `RUNS` or `NAMED_ONLY`.
        make: makes the model; called with a batch it returns something with a `loss`.
        batches: as many as the plan has steps.
        plan, pause: see `Clock`.
    """
    is_stock = name in STOCK
    initialize(eager=not is_stock and name not in MODES, keep_memory=False if is_stock else None)
    runtime = get_runtime()

    def wait() -> None:
        # What is traced lazily may be pending: then the step is not done.
        if not runtime.tracing.eager() and runtime.tracing.pending_count():
            runtime.tracing.flush()
        runtime.device.wait()

    if not is_stock:
        # The first access to `replay_works` executes two tiny graphs, which must not be counted.
        assert runtime.replay_works
    model = make()
    # TRL adds a mask to tokens and labels.
    tensors = len(batches[0]) + (name in TRL_RUNS)
    clock = Clock(plan, pause, wait if name in MODES else runtime.device.wait, batch_tensors=tensors)
    run_trainer = _run_trl if name in TRL_RUNS else _run_hf if name.startswith("HF") else _run_lightning
    return clock.timing(run_trainer(name, model, Batches(list(batches)), clock))


class HFSteps(transformers.TrainerCallback):
    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._clock.step_done()


def _ours(name: str) -> tuple[XLAConfig, bool]:
    """The options of one of our runs, and whether there is a run report."""
    # Without verifications, of which so few steps would have many; `benchmarks.verification` measures their cost.
    config = XLAConfig(
        xla_mode=MODES.get(name, "eager+compile"),
        step_replay=False if name in (HF_TRACED, LIGHTNING_TRACED) else "auto",
        replay_verify_every=None,
    )
    return config, name not in (HF_UNREPORTED, LIGHTNING_UNREPORTED)


def _run_hf(name: str, model: torch.nn.Module, data: Batches, clock: Clock) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        common: dict[str, Any] = {
            "model": model,
            "args": arguments(folder, logging_steps=len(data), optim="adamw_torch", max_grad_norm=MAX_NORM),
            "train_dataset": data,
            "data_collator": only_item,
            "callbacks": [HFSteps(clock)],
        }
        if name == HF_STOCK:
            trainer: Any = transformers.Trainer(**common)
        else:
            config, report = _ours(name)
            trainer = hf_trainer.Trainer(**common, xla_args=config, xla_report=report)
        # The logged loss is the mean of all steps.
        return [float(trainer.train().training_loss)]


def _run_trl(name: str, model: torch.nn.Module, data: Batches, clock: Clock) -> list[float]:
    # They take seconds to import, and few runs need them.
    import trl
    from datasets import Dataset

    class SFTTrainer(hf_trainer.XLATrainerMixin, trl.SFTTrainer):
        """Ours. TRL has code around each step, so that it is traced whatever `step_replay` is."""

    batches = [data[index] for index in range(len(data))]
    rows = Dataset.from_list([{"input_ids": row} for batch in batches for row in batch["input_ids"].tolist()])
    with tempfile.TemporaryDirectory() as folder:
        args = arguments(
            folder,
            trl.SFTConfig,
            per_device_train_batch_size=len(batches[0]["input_ids"]),
            logging_steps=len(batches),
            optim="adamw_torch",
            max_grad_norm=MAX_NORM,
            gradient_checkpointing=False,
            bf16=False,
        )
        trainer: Any = (trl.SFTTrainer if name == TRL_STOCK else SFTTrainer)(
            model=model,
            args=args,
            train_dataset=rows,
            processing_class=tokenizer(),
            callbacks=[HFSteps(clock)],
        )
        return [float(trainer.train().training_loss)]


class LiftedAccelerator(XLAAccelerator):
    """Lightning's, without its look for TPUs on the PCI bus."""

    @staticmethod
    def is_available() -> bool:  # type: ignore[override]
        return True

    @staticmethod
    def auto_device_count() -> int:  # type: ignore[override]
        return 1

    @staticmethod
    def parse_devices(devices: Any) -> int:
        return 1

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device("xla", 0)]


def stock_on_xla() -> dict[str, Any]:
    """Options of Lightning's own Trainer on XLA, where there is no TPU."""
    return {"strategy": SingleDeviceXLAStrategy(device=0), "accelerator": LiftedAccelerator(), "devices": 1}


class Module(L.LightningModule):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.model(**batch).loss  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=LEARNING_RATE, weight_decay=0.0)


class LightningSteps(L.Callback):
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.losses: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *_: Any) -> None:
        self.losses.append(outputs["loss"])
        self._clock.step_done()


def _run_lightning(name: str, model: torch.nn.Module, data: Batches, clock: Clock) -> list[float]:
    chosen: dict[str, Any]
    if name == LIGHTNING_STOCK:
        chosen = stock_on_xla()
    else:
        # To construct it makes the process eager.
        config, report = _ours(name)
        chosen = {"strategy": XLAEagerStrategy(config, xla_report=report)}
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    steps = LightningSteps(clock)
    trainer = L.Trainer(
        max_epochs=1,
        gradient_clip_val=MAX_NORM,
        callbacks=[steps],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **chosen,
    )
    # As in a training from HF's Trainer, which sets the mode too: `from_pretrained` leaves models in eval mode.
    trainer.fit(Module(model.train()), DataLoader(data, batch_size=1, collate_fn=only_item))
    return [float(loss) for loss in steps.losses]
