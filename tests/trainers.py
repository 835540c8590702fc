"""One small training by either trainer: the same model and data, hooks at the same moments, the same numbers back.

Everything here computes with torch, so call it only inside isolated tests.
"""

from __future__ import annotations

import functools
import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

import lightning as L
import numpy
import pytest
import safetensors.torch
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import TrainerCallback

import hf_trainer
import xla_adapters
from lightning_strategy import XLAEagerStrategy
from tests.hf_trainer.scenarios import Classifier, arguments, on_cpu, steps_of, vector_samples
from tests.lightning_strategy.scenarios import trainer as lightning_trainer
from xla_adapters import StepCounters, get_runtime
from xla_adapters.sharding.mesh import tiles_of

each_trainer = pytest.mark.parametrize("kind", ["hf", "lightning"])


class Noisy(Dataset[Any]):
    """24 samples for a `Classifier`, with noise from every random generator of the host, as augmentations draw it."""

    def __init__(self) -> None:
        self.data = vector_samples(24)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        noise = random.random() + float(numpy.random.rand()) + torch.rand(1)
        return {"x": self.data[index]["x"] + 0.1 * noise, "labels": self.data[index]["labels"]}


@dataclass(frozen=True)
class Moment:
    """What a hook is given.

    Attributes:
        step: the optimizer step that is being done or has just ended, counted from 1.
        trainer: of transformers or of Lightning.
        model: what is trained.
    """

    step: int
    trainer: Any
    model: nn.Module

    @property
    def optimizer(self) -> Any:
        """The optimizer of torch."""
        return optimizer_of(self.trainer)


Hook = Callable[[Moment], object]


def optimizer_of(trainer: Any) -> Any:
    """The optimizer of torch that a trainer uses."""
    found = trainer.optimizers[0] if isinstance(trainer, L.Trainer) else trainer.optimizer
    while hasattr(found, "optimizer"):
        found = found.optimizer
    return found


@dataclass(kw_only=True)
class Training(ABC):
    """A training, and what it gave.

    Args:
        folder: of the run and its checkpoints.
        net: the model; of `Classifier` with `dropout` and `seed` if it is None.
        data, held_out: samples to train and to evaluate with.
        batch, steps: samples in a batch, and optimizer steps.
        optimizer, rate: a key of `_OPTIMIZERS`, and the learning rate.
        accumulate, clip, bf16: batches per step, the largest norm of the gradients, and mixed precision.
        evaluate_every, save_every: after how many steps; 0 is never.
        keep: how many checkpoints stay; None is all.
        on_cpu: stock, on plain CPU torch.
        at: functions to call, by the moment: "load" and "step begin" before a step, "forward" and "update" in it
            (behind the forward, and before the optimizer), "step end" behind it, "save" in a save, "evaluation" in an
            evaluation step.
        stock: further options of `TrainingArguments`, or of Lightning's Trainer.
        own: further options of the trainer of transformers, or of Lightning's loader.
        callbacks: of the framework.
        xla: options of our trainer, or of our strategy.

    Attributes:
        trainer: of transformers or of Lightning.
        counts: of the whole training.
        counted: of each step.
        losses, evaluations: in this run; of each step with transformers, of each batch with Lightning.
        program: the compiled training step.
    """

    folder: Path | None = None
    net: nn.Module | None = None
    data: Any = None
    held_out: Any = None
    batch: int = 4
    steps: int = 8
    dropout: float = 0.0
    seed: int = 0
    optimizer: str = "adamw"
    rate: float = 1e-2
    accumulate: int = 1
    clip: float | None = None
    bf16: bool = False
    evaluate_every: int = 0
    save_every: int = 0
    keep: int | None = None
    on_cpu: bool = False
    at: dict[str, Hook] = field(default_factory=dict)
    stock: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    callbacks: list[Any] = field(default_factory=list)
    xla: dict[str, Any] = field(default_factory=dict)

    trainer: Any = field(init=False)
    counts: StepCounters = field(init=False, default_factory=StepCounters)
    counted: list[StepCounters] = field(init=False, default_factory=list)
    losses: list[float] = field(init=False, default_factory=list)
    evaluations: list[float] = field(init=False, default_factory=list)
    program: Any = field(init=False, default=None)

    def __post_init__(self) -> None:
        get_runtime().device.initialize()
        self.net = self.net if self.net is not None else Classifier(self.dropout, self.seed)
        self.data = self.data if self.data is not None else vector_samples(24)
        self.held_out = self.held_out if self.held_out is not None else vector_samples(8, seed=1)
        self._prepare()

    @abstractmethod
    def _prepare(self) -> None:
        """Makes the trainer."""

    @abstractmethod
    def run(self, resume: Any = None) -> Self:
        """Trains, from a checkpoint by its path or from the last one (True)."""

    @property
    @abstractmethod
    def report(self) -> Any:
        """The run report."""

    @property
    @abstractmethod
    def plan(self) -> Any:
        """The sharding plan."""

    def weights(self) -> dict[str, torch.Tensor]:
        """Copies of the weights on the host."""
        assert self.net is not None
        return {name: value.detach().cpu().clone() for name, value in self.net.state_dict().items()}

    def assert_one_graph(self, *, graphs: int = 1, per_step: int = 1) -> None:
        """Asserts the number of compiles in all and of executions per step, and that nothing was eager in a step."""
        assert self.counts.compiles == graphs, self.program.events
        assert [step.executions for step in self.counted] == [per_step] * self.steps
        assert all(step.eager_ops == 0 for step in self.counted)


class _HFTraining(Training):
    def _prepare(self) -> None:
        options: dict[str, Any] = {
            "max_steps": self.steps,
            "per_device_train_batch_size": self.batch,
            "per_device_eval_batch_size": self.batch,
            "gradient_accumulation_steps": self.accumulate,
            "learning_rate": self.rate,
            "bf16": self.bf16,
            **_OPTIMIZERS[self.optimizer][0],
        }
        if self.clip is not None:
            options["max_grad_norm"] = self.clip
        if self.evaluate_every:
            options |= {"eval_strategy": "steps", "eval_steps": self.evaluate_every}
        if self.save_every:
            options |= {"save_strategy": "steps", "save_steps": self.save_every, "save_total_limit": self.keep}
        options |= {"folder": None if self.folder is None else str(self.folder), **self.stock}
        self._options = {"eval_dataset": self.held_out, "callbacks": [*self._hooks(), *self.callbacks], **self.own}
        self._arguments = options
        if not self.on_cpu:
            self.trainer = self._kind()(
                model=self.net, args=arguments(**options), train_dataset=self.data, **self._options, **self.xla
            )
            self.program = steps_of(self.trainer).train

    def _moment(self, trainer: Any, behind: int) -> Moment:
        assert self.net is not None
        return Moment(trainer.state.global_step + behind, trainer, self.net)

    def _kind(self) -> Any:
        """Our trainer, with methods of its own only where there are hooks: user code is not replayed."""
        at = self.at

        def wrap(name: str, hook: Callable[[Any], Any], *, first: bool) -> Any:
            def method(trainer: Any, *args: Any, **kwargs: Any) -> Any:
                if first:
                    hook(trainer)
                result = getattr(hf_trainer.Trainer, name)(trainer, *args, **kwargs)
                if not first:
                    hook(trainer)
                return result

            return method

        def loaded(trainer: Any) -> None:
            if trainer.model.training:
                at["load"](self._moment(trainer, 1))

        def computed(trainer: Any) -> None:
            event, behind = ("forward", 1) if trainer.model.training else ("evaluation", 0)
            if event in at:
                at[event](self._moment(trainer, behind))

        methods = {}
        if "load" in at:
            methods["_get_num_items_in_batch"] = wrap("_get_num_items_in_batch", loaded, first=True)
        if "forward" in at or "evaluation" in at:
            methods["compute_loss"] = wrap("compute_loss", computed, first=False)
        if "save" in at:
            methods["_save_rng_state"] = wrap(
                "_save_rng_state", lambda trainer: at["save"](self._moment(trainer, 0)), first=True
            )
        return type("Hooked", (hf_trainer.Trainer,), methods) if methods else hf_trainer.Trainer

    def _hooks(self) -> list[TrainerCallback]:
        events = {"step begin": "on_step_begin", "step end": "on_step_end", "update": "on_pre_optimizer_step"}
        made = TrainerCallback()

        def calling(event: str) -> Any:
            def call(args: Any, state: Any, *others: Any, **kwargs: Any) -> None:
                assert self.net is not None
                step = state.global_step + (event != "step end")
                self.at[event](Moment(step, getattr(self, "trainer", None), self.net))

            return call

        for event, method in events.items():
            if event in self.at:
                setattr(made, method, calling(event))
        return [_CountsSteps(self.counted), made]

    def run(self, resume: Any = None) -> Self:
        if self.on_cpu:
            with on_cpu(self.net, self.data, args=self._arguments, **self._options) as self.trainer:  # type: ignore[arg-type]
                self.trainer.train(resume_from_checkpoint=resume)
        else:
            with xla_adapters.count() as self.counts:
                self.trainer.train(resume_from_checkpoint=resume if resume in (None, True) else str(resume))
        before = self._options["callbacks"][0].logged_before
        self.losses, self.evaluations = (
            [entry[name] for entry in self.trainer.state.log_history[before:] if name in entry]
            for name in ("loss", "eval_loss")
        )
        return self

    @property
    def report(self) -> Any:
        return self.trainer.xla_report()

    @property
    def plan(self) -> Any:
        return self.trainer.sharding_plan


class _CountsSteps(TrainerCallback):
    """Counts from the first micro batch to the end of the optimizer step."""

    logged_before = 0

    def __init__(self, counted: list[StepCounters]) -> None:
        self._counted = counted
        self._context: Any = None

    def on_train_begin(self, args: Any, state: Any, *others: Any, **kwargs: Any) -> None:
        self.logged_before = len(state.log_history)

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._context = xla_adapters.count()
        self._counted.append(self._context.__enter__())

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._context.__exit__(None, None, None)


class _LightningTraining(Training):
    def _prepare(self) -> None:
        options: dict[str, Any] = {
            "max_steps": self.steps,
            "max_epochs": -1,
            "accumulate_grad_batches": self.accumulate,
            "gradient_clip_val": self.clip,
        }
        if self.bf16:
            options["precision"] = "bf16-mixed"
        if self.evaluate_every:
            every = self.evaluate_every * self.accumulate
            options |= {"val_check_interval": every, "check_val_every_n_epoch": None}
        callbacks: list[Any] = [_Records(self), *self.callbacks]
        if self.save_every:
            keep = -1 if self.keep is None else self.keep
            every_step: dict[str, Any] = {"every_n_train_steps": self.save_every, "filename": "{step}"}
            callbacks.append(ModelCheckpoint(dirpath=self.folder, save_top_k=keep, **every_step))
        elif self.folder is not None and "checkpoint" in self.xla:
            # What is saved on a schedule lies in its folder.
            callbacks.append(ModelCheckpoint(dirpath=self.folder, save_top_k=0))
        if self.folder is not None:
            options["default_root_dir"] = self.folder
        self.strategy = None if self.on_cpu else XLAEagerStrategy(**self.xla)
        self.module = self._kind()(self)
        self.trainer = lightning_trainer(self.strategy, callbacks=callbacks, **{**options, **self.stock})

    def moment(self, behind: int) -> Moment:
        assert self.net is not None
        return Moment(self.trainer.global_step + behind, self.trainer, self.net)

    def _kind(self) -> Any:
        """The module, with hooks only where there are some: user code is not replayed."""
        at = self.at

        def training_step(module: _Module, batch: Any, batch_idx: int) -> Any:
            loss = _Module.training_step(module, batch, batch_idx)
            at["forward"](self.moment(1))
            return loss

        def validation_step(module: _Module, batch: Any, batch_idx: int) -> None:
            _Module.validation_step(module, batch, batch_idx)
            at["evaluation"](self.moment(0))

        methods: dict[str, tuple[str, Any]] = {
            "forward": ("training_step", training_step),
            "evaluation": ("validation_step", validation_step),
            "update": ("on_before_optimizer_step", lambda module, optimizer: at["update"](self.moment(1))),
            "save": ("on_save_checkpoint", lambda module, checkpoint: at["save"](self.moment(0))),
        }
        own = dict(method for event, method in methods.items() if event in at)
        return type("Hooked", (_Module,), own) if own else _Module

    def _loader(self, data: Any) -> Any:
        if callable(data):
            return data()
        if "load" in self.at and data is self.data:
            data = _Loads(self)
        return DataLoader(data, **{"batch_size": self.batch, **self.own})

    def run(self, resume: Any = None) -> Self:
        L.seed_everything(7 + self.seed, verbose=False)
        held_out = self._loader(self.held_out) if self.evaluate_every else None
        with xla_adapters.count() as self.counts:
            path = "last" if resume is True else resume
            self.trainer.fit(self.module, self._loader(self.data), held_out, ckpt_path=path)
        self.losses = [float(loss) for loss in self.module.kept]
        return self

    @property
    def report(self) -> Any:
        assert self.strategy is not None
        return self.strategy.xla_report()

    @property
    def plan(self) -> Any:
        assert self.strategy is not None
        return self.strategy.sharding_plan


class _Module(L.LightningModule):
    def __init__(self, training: Training) -> None:
        super().__init__()
        assert training.net is not None
        self.net = training.net
        self.make_optimizer = functools.partial(_OPTIMIZERS[training.optimizer][1], lr=training.rate)
        self.kept: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.net(**batch)["loss"]
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net(**batch)["loss"])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.kept.append(outputs["loss"].detach())

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.net.parameters())


class _Records(L.Callback):
    """Calls the hooks between steps, counts steps, and notes evaluations."""

    def __init__(self, training: _LightningTraining) -> None:
        self._training = training
        self._context: Any = None

    def on_train_start(self, trainer: Any, module: Any) -> None:
        if self._training.strategy is not None:
            self._training.program = trainer.strategy.run.steps.train

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self._call("step begin", 1)
        if self._context is None:
            self._context = xla_adapters.count()
            self._training.counted.append(self._context.__enter__())

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not trainer.fit_loop._should_accumulate():
            self._context.__exit__(None, None, None)
            self._context = None
            self._call("step end", 0)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if "val_loss" in trainer.callback_metrics:
            self._training.evaluations.append(float(trainer.callback_metrics["val_loss"]))

    def _call(self, event: str, behind: int) -> None:
        if event in self._training.at:
            self._training.at[event](self._training.moment(behind))


class _Loads(Dataset[Any]):
    """Calls the hook when the first sample of a batch is loaded, in order."""

    def __init__(self, training: Training) -> None:
        self._training = training

    def __len__(self) -> int:
        return len(self._training.data)

    def __getitem__(self, index: int) -> Any:
        if index % self._training.batch == 0:
            assert isinstance(self._training, _LightningTraining)
            self._training.at["load"](self._training.moment(1))
        return self._training.data[index]


_KINDS: dict[str, type[Training]] = {"hf": _HFTraining, "lightning": _LightningTraining}
# Options of transformers, and what makes it in Lightning.
_OPTIMIZERS: dict[str, tuple[dict[str, Any], Any]] = {
    "adamw": ({"optim": "adamw_torch"}, torch.optim.AdamW),
    "sgd": ({"optim": "sgd"}, torch.optim.SGD),
    "sgd momentum": ({"optim": "sgd", "optim_args": "momentum=0.9"}, functools.partial(torch.optim.SGD, momentum=0.9)),
    "rmsprop": (
        {"optim": "rmsprop", "optim_args": "momentum=0.9"},
        functools.partial(torch.optim.RMSprop, momentum=0.9),
    ),
    "adafactor": ({"optim": "adafactor"}, torch.optim.Adafactor),
}


def training(kind: str, folder: Path | None = None, **options: Any) -> Training:
    """A training that has not begun. What is no option of `Training` is one of our trainer, or of our strategy."""
    known = {item.name for item in fields(Training) if item.init}
    given = {name: value for name, value in options.items() if name in known}
    xla = {name: value for name, value in options.items() if name not in known}
    if kind == "hf" and "config" in xla:
        xla["xla_args"] = xla.pop("config")
    return _KINDS[kind](folder=folder, xla=xla, **given)


def train(kind: str, folder: Path | None = None, *, resume: Any = None, **options: Any) -> Training:
    """Trains; see `training`."""
    return training(kind, folder, **options).run(resume)


# ---- checkpoints -------------------------------------------------------------------------------------

# The name of what Lightning saves on a schedule, or when a signal ends the process.
ON_SCHEDULE = "last-xla_adapters.ckpt"


def checkpoint(kind: str, folder: Path, step: int) -> Path:
    """The path of the checkpoint that `save_every` saves after a step."""
    return folder / (f"checkpoint-{step}" if kind == "hf" else f"step={step}.ckpt")


def saved_steps(folder: Path) -> list[int]:
    """The steps of the checkpoints of a folder that have their names."""
    paths = [*folder.glob("checkpoint-*"), *folder.glob("step=*.ckpt")]
    return sorted(int("".join(filter(str.isdigit, path.name))) for path in paths)


def contents(path: Path) -> dict[str, Any]:
    """What a checkpoint holds of a training, as lists of numbers: weights, optimizer, random numbers, position."""
    if path.is_dir():
        read: dict[str, Any] = {"model": safetensors.torch.load_file(path / "model.safetensors")}
        for file in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
            read[file] = torch.load(path / file, weights_only=False)
    else:
        held = torch.load(path, weights_only=False)
        read = {name: held[name] for name in ("state_dict", "optimizer_states", "loops", "xla_adapters")}
    listed: dict[str, Any] = torch.utils._pytree.tree_map(
        lambda leaf: leaf.tolist() if hasattr(leaf, "tolist") else leaf, read
    )
    return listed


# ---- sharding ----------------------------------------------------------------------------------------


def check_cuts(plan: Any, module: nn.Module, optimizer: Any = None) -> set[str]:
    """Parameters and their states are sharded as planned; returns the names of those that are not replicated."""
    runtime, cut = get_runtime(), set()
    runtime.device.wait()
    for name, parameter in module.named_parameters():
        wanted = tiles_of(plan.mesh, plan.spec_of(name))
        values = [parameter]
        if optimizer is not None:
            state = [value for value in optimizer.state[parameter].values() if value.shape == parameter.shape]
            assert len(state) == 2, name
            values += state
        for value in values:
            assert runtime.spmd.tiles_of(value) == (wanted if wanted.number > 1 else None), name
            local = tuple(size // count for size, count in zip(value.shape, wanted.counts, strict=True))
            assert shape_of_a_shard(value) == local, name
        if wanted.number > 1:
            cut.add(name)
    return cut


def shape_of_a_shard(value: torch.Tensor) -> tuple[int, ...]:
    """The shape on the first device, which an annotation may not match."""
    import torch_xla

    shards: Any = torch_xla._XLAC._get_local_shards([value.detach()])
    return tuple(shards[0][0][0].shape)
