"""Lightning's Trainer, and Fabric."""

from __future__ import annotations

import functools
import tempfile
from contextlib import nullcontext
from typing import Any

import lightning as L
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.ecosystem.cell import EPSILON, LEARNING_RATE, STEPS, Cell, Trained, weights_of
from benchmarks.lightning_counts import CountedSteps
from benchmarks.training import Batches
from benchmarks.zoo import Model
from lightning_strategy import XLAEagerFabricStrategy, XLAEagerStrategy
from tests.programs.program import KeepProgram, Logged
from xla_adapters import StepCounters, count, get_runtime
from xla_adapters.config import OnGraphBreak


class Module(L.LightningModule):
    """A model whose loss is logged.

    Args:
        model: called with the batch.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch)["loss"]
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=LEARNING_RATE, eps=EPSILON)


def _loader(model: Model) -> DataLoader[Any]:
    return DataLoader(Batches(model.batches(STEPS)), batch_size=None)


def trainer(models: tuple[Model, ...]) -> list[Cell]:
    """Cells of Lightning's Trainer."""
    return [Cell("Lightning", model.name, functools.partial(_fit, model), model.prepare) for model in models]


def _fit(model: Model, on_graph_break: OnGraphBreak | None) -> Trained:
    logged, kept, snapshots = Logged(), KeepProgram(), CountedSteps()
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {
            "max_epochs": 1,
            "log_every_n_steps": 1,
            "logger": logged,
            "default_root_dir": folder,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        }
        if on_graph_break is None:
            module = Module(model.seeded())
            L.Trainer(accelerator="cpu", **options).fit(module, _loader(model))
            return Trained(losses=_losses(logged), weights=weights_of(module))
        strategy = XLAEagerStrategy(on_graph_break=on_graph_break)
        module = Module(model.seeded())
        # The first access to `replay_works` executes two tiny graphs, which must not be counted.
        _ = get_runtime().replay_works
        with count() as counters:
            L.Trainer(strategy=strategy, callbacks=[kept, snapshots], **options).fit(module, _loader(model))
    assert kept.program is not None
    return Trained(
        losses=_losses(logged),
        weights=weights_of(module),
        compiles=counters.compiles,
        executions=[int(step["executions"]) for step in snapshots.steps],
        calls=kept.program.calls,
        replays=kept.program.replays,
        reasons=kept.program.replay_reasons,
    )


def _losses(logged: Logged) -> list[float]:
    return [values["loss"] for values in logged.values if "loss" in values]


def fabric(models: tuple[Model, ...]) -> list[Cell]:
    """Cells of a loop with Fabric."""
    return [Cell("Fabric", model.name, functools.partial(_loop, model), model.prepare) for model in models]


def _loop(model: Model, on_graph_break: OnGraphBreak | None) -> Trained:
    on_cpu = on_graph_break is None
    fabric = (
        Fabric(accelerator="cpu") if on_cpu else Fabric(strategy=XLAEagerFabricStrategy(on_graph_break=on_graph_break))
    )
    fabric.launch()
    net = model.seeded()
    module, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=LEARNING_RATE, eps=EPSILON))
    module.train()
    trained = Trained(losses=[], weights={})
    for batch in fabric.setup_dataloaders(_loader(model)):
        with nullcontext(StepCounters()) if on_cpu else count() as counters:
            with nullcontext() if on_cpu else fabric.strategy.step():
                loss = module(**batch)["loss"]
                fabric.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        trained.losses.append(loss.item())
        trained.executions.append(counters.executions)
        trained.compiles += counters.compiles
    trained.weights = weights_of(net)
    return trained
