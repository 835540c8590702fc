"""What `xla-adapters check` and `preflight` need of transformers: trainers with XLA steps put in, and nothing saved."""

from __future__ import annotations

import itertools
import os
import types
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import TrainingArguments

from hf_trainer.bridge import Bridge
from hf_trainer.mixin import XLATrainerMixin
from hf_trainer.model import innermost, model_of
from hf_trainer.options import TrainerOptions
from hf_trainer.patches import give_device_to_accelerate, trainer_patches
from xla_adapters.tools.preflight import preflight_run
from xla_adapters.tools.preflight_report import PreflightReport
from xla_adapters.tools.user_script import Hand
from xla_adapters.utils.host_random import host_random_numbers_kept
from xla_adapters.utils.location import line_of_caller

if TYPE_CHECKING:
    _Base = transformers.Trainer
else:
    _Base = object


def checked(kind: type, hand: Hand) -> type:
    """The class that is instantiated in place of a trainer's class; see `xla_adapters.tools.user_script`."""
    bases = (kind,) if issubclass(kind, XLATrainerMixin) else (XLATrainerMixin, kind)
    if len(bases) == 2:
        hand.put_steps(f"{kind.__module__}.{kind.__qualname__} ({line_of_caller()}): its steps run on hf_trainer's")
    attributes = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "_hand": hand}
    return type(kind.__name__, (_Checked, *bases), attributes)


class _Checked(_Base):
    """Before a trainer's class: what it writes goes to a temporary folder, and checkpoints are not written."""

    _hand: Hand

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        arguments = kwargs.get("args", args[1] if len(args) > 1 else None)
        folder = str(self._hand.folder / "output")
        if arguments is None:
            kwargs["args"] = TrainingArguments(output_dir=folder)
        else:
            arguments.output_dir, arguments.report_to, arguments.push_to_hub = folder, [], False
        if self._hand.sharding is not None:
            self._hand.change(f"{type(self).__name__} ({line_of_caller()}): sharding={self._hand.sharding!r}")
            kwargs["sharding"] = self._hand.sharding
        if kwargs.get("shapes") is None and getattr(arguments, "shapes", None) is None:
            kwargs["shapes"] = self._hand.shapes
        super().__init__(*args, **kwargs)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As `Trainer.train`, from the beginning."""
        if resume_from_checkpoint:
            self._hand.change(f"resume_from_checkpoint={resume_from_checkpoint!r}: trains from the beginning")
        loops = self._hand.loops
        if loops is None:
            self._hand.told_epochs(_epochs(self))
            return super().train(*args, **kwargs)
        loops.train(lambda: super(_Checked, self).train(*args, **kwargs))
        if self.eval_dataset is not None:
            loops.evaluate(super().evaluate)
        return loops.end()

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As `Trainer.evaluate`. A pre-flight evaluates after the training, and gives no metrics before."""
        loops = self._hand.loops
        if loops is None or loops.is_taking:
            return super().evaluate(*args, **kwargs)
        self._hand.change(f"{type(self).__name__}.evaluate ({line_of_caller()}): left out")
        return {}

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self._hand.skip(f"the checkpoint of step {self.state.global_step}")

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves nothing."""
        self._hand.skip(f"the model ({line_of_caller()})")


def _epochs(trainer: transformers.Trainer) -> float:
    """How often a training reads its data."""
    args: Any = trainer.args
    dataset: Any = trainer.train_dataset
    if args.max_steps <= 0 or not hasattr(dataset, "__len__"):
        return float(args.num_train_epochs)
    rows: int = args.max_steps * args.gradient_accumulation_steps * args.train_batch_size * args.world_size
    return rows / max(1, len(dataset))


# What the trainer is constructed with again, by name of argument and attribute.
_CONSTRUCTED = (
    "data_collator",
    "compute_loss_func",
    "compute_metrics",
    "preprocess_logits_for_metrics",
    "processing_class",
    "optimizer_cls_and_kwargs",
)


@dataclass(frozen=True, kw_only=True)
class _Again:
    """A trainer that is constructed once more, in the tracing process.

    Attributes:
        kind: its class.
        options: its XLA options.
        arguments: of `transformers.Trainer`.
        attributes: those that the user's own class has set.
    """

    kind: type
    options: TrainerOptions
    arguments: dict[str, Any]
    attributes: dict[str, Any] = field(default_factory=dict)

    def __call__(self, model: torch.nn.Module, samples: dict[str, list[Any] | None], hand: Hand) -> None:
        """Trains, until the graphs are there."""
        kind: Any = checked(self.kind, hand)
        trainer = object.__new__(kind)
        # Not the constructor of the user's class, which may want other arguments.
        trainer._xla = Bridge(trainer, super(XLATrainerMixin, trainer), self.options)
        arguments = dict(self.arguments)
        arguments["args"].output_dir, arguments["args"].report_to = str(hand.folder / "output"), []
        give_device_to_accelerate(arguments["args"])
        with trainer_patches():
            transformers.Trainer.__init__(
                trainer, model, train_dataset=samples["train"], eval_dataset=samples["evaluation"], **arguments
            )
        trainer._xla.connect()
        for name, value in self.attributes.items():
            setattr(trainer, name, value)
        trainer.train()


def preflight(
    trainer: XLATrainerMixin, topology: str, *, timeout: float, save_programs: str | os.PathLike[str] | None
) -> PreflightReport:
    """See `Trainer.preflight`; for other classes with `XLATrainerMixin`, too."""
    args = trainer.args
    # Programs are saved of two updates.
    update = args.train_batch_size * args.gradient_accumulation_steps * (1 if save_programs is None else 2)
    samples = {
        "train": _first(trainer.train_dataset, trainer._xla.shapes.samples_for(update)),
        "evaluation": _first(trainer.eval_dataset, args.eval_batch_size),
    }
    optimizer = getattr(trainer, "optimizer", None)
    given = {name: getattr(trainer, name, None) for name in _CONSTRUCTED}
    again = _Again(
        kind=type(trainer),
        options=trainer._xla.options,
        arguments={
            "args": args,
            "callbacks": [item for item in trainer.callback_handler.callbacks if _is_of_user(item)],
            "optimizers": (None if optimizer is None else innermost(optimizer), None),
            **{name: value for name, value in given.items() if value is not None},
        },
        attributes={name: value for name, value in vars(trainer).items() if name not in _stock_names()},
    )
    what = f"{type(trainer).__name__} of {type(model_of(trainer)).__name__}"
    sharded = trainer._xla.options.sharding is not None
    found = preflight_run(
        what,
        topology,
        model_of(trainer),
        samples,
        again,
        sharded=sharded,
        timeout=timeout,
        saves_to=save_programs,
    )
    trainer._xla.record.preflight = found
    return found


def _first(dataset: Any, count: int) -> list[Any] | None:
    """The first samples of a dataset, repeated if it has fewer; None if it has none."""
    if isinstance(dataset, dict):
        dataset = next(iter(dataset.values()), None)
    if dataset is None:
        return None
    with host_random_numbers_kept():
        if hasattr(dataset, "__getitem__") and not isinstance(dataset, torch.utils.data.IterableDataset):
            samples = [dataset[index] for index in range(min(count, len(dataset)))]
        else:
            samples = list(itertools.islice(dataset, count))
    return list(itertools.islice(itertools.cycle(samples), count)) if samples else None


def _is_of_user(callback: Any) -> bool:
    return not type(callback).__module__.startswith(("transformers.", "hf_trainer."))


def _stock_names() -> set[str]:
    """Names of attributes that transformers' and this package's own methods use."""
    names = {"_xla"}
    for cls in (XLATrainerMixin, transformers.Trainer, transformers.Seq2SeqTrainer):
        for value in vars(cls).values():
            if isinstance(value, types.FunctionType):
                names.update(value.__code__.co_names)
    return names
