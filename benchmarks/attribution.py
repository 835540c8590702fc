"""Whether the run report finds where stalls were put; `python -m benchmarks.attribution --check`.

Each Trainer trains a GPT-2 with stalls: a sample that is slow to load, a slow callback, a slow save, a slow evaluation,
and a batch of another length, which costs a compile. The report is read just before and just after each stall. Compared
are the seconds that passed with those that the report has more of the stall's kind. A compile's seconds are what its
step took longer than a step that is traced and not compiled. All parts together are compared with the time of the call
of `train()` or `fit()`.
"""

from __future__ import annotations

import functools
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import transformers
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

import hf_trainer
from benchmarks import report
from benchmarks.children import run_in_child
from benchmarks.deep_models import Size
from benchmarks.timed_trainers import Module
from benchmarks.training import Batches, arguments, only_item
from benchmarks.zoo_batches import Batch
from lightning_strategy import XLAEagerStrategy
from lightning_strategy.checkpoints import XLAEagerCheckpointIO
from xla_adapters import XLAConfig, get_runtime, initialize
from xla_adapters.insight.run_report import RunReport

HF, LIGHTNING = "HF", "Lightning"
KINDS = ("input wait", "callbacks", "saves", "evaluation", "compile")
# Of the wall time, and of a stall.
SUM, STALL = 0.02, 0.05
STEPS = 40
# The numbers of the steps, from 1, that are slow.
_TRACED, _LOADED, _CALLED, _SAVED, _COMPILED = 2, 10, 20, 30, 35
_SIZE = Size(layers=2, width=128)
# Without verifications, which take long.
_CONFIG = XLAConfig(replay_verify_every=None)


@dataclass
class Stalls:
    """Passes time where it is told to, and notes what the report makes of it.

    Args:
        length: of each stall, in seconds.

    Attributes:
        report: the report so far, of the training.
        stalls: seconds that passed and seconds that the report has more of the kind, by kind.
        steps: how long the step that compiles and one that is only traced took, by number.
    """

    length: float
    report: Callable[[], RunReport] | None = None
    stalls: dict[str, tuple[float, float]] = field(default_factory=dict)
    steps: dict[int, float] = field(default_factory=dict)
    _began: float = 0.0

    def stall(self, kind: str) -> None:
        """Time passes."""
        assert self.report is not None
        before = self.report().wall[kind]
        began = time.perf_counter()
        time.sleep(self.length)
        passed = time.perf_counter() - began
        self.stalls[kind] = passed, self.report().wall[kind] - before

    def step_begins(self, number: int) -> None:
        """To be called by a callback."""
        if number in (_TRACED, _COMPILED):
            # What earlier steps left to the device is no part of it.
            get_runtime().device.wait()
        self._began = time.perf_counter()

    def step_ended(self, number: int) -> None:
        """To be called by a callback."""
        if number in (_TRACED, _COMPILED):
            self.steps[number] = time.perf_counter() - self._began
        if number == _CALLED:
            self.stall("callbacks")


@dataclass(frozen=True)
class Measured:
    """One training.

    Attributes:
        seconds: from its begin to its end.
        reported: seconds by kind, of the report.
        stalls: of each kind, the seconds that passed and those that the report has.
    """

    seconds: float
    reported: dict[str, float]
    stalls: dict[str, tuple[float, float]]


class _Slow(Batches):
    """Is slow to load one of its samples."""

    def __init__(self, batches: list[Batch], index: int, stall: Callable[[], None]) -> None:
        super().__init__(batches)
        self._index, self._stall = index, stall

    def __getitem__(self, index: int) -> Batch:
        if index == self._index:
            self._stall()
        return super().__getitem__(index)


def _data(stalls: Stalls) -> tuple[_Slow, _Slow]:
    batches = _SIZE.batches(STEPS)
    batches[_COMPILED - 1] = {name: tensor[:, :48] for name, tensor in batches[_COMPILED - 1].items()}
    return (
        _Slow(batches, _LOADED - 1, functools.partial(stalls.stall, "input wait")),
        _Slow(batches[:2], 1, functools.partial(stalls.stall, "evaluation")),
    )


# ---- trainings -----------------------------------------------------------------------------------


class _HFSteps(transformers.TrainerCallback):
    def __init__(self, stalls: Stalls) -> None:
        self._stalls = stalls

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._stalls.step_begins(state.global_step + 1)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._stalls.step_ended(state.global_step)


class _SlowToSave(hf_trainer.Trainer):
    stalls: Stalls

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        self.stalls.stall("saves")
        super().save_model(*args, **kwargs)


def _hf(stalls: Stalls, folder: str) -> Callable[[], object]:
    data, validation = _data(stalls)
    _SlowToSave.stalls = stalls
    saves: dict[str, Any] = {"save_strategy": "steps", "save_steps": _SAVED}
    evaluates: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": STEPS, "per_device_eval_batch_size": 1}
    trainer = _SlowToSave(
        model=_SIZE.model(),
        args=arguments(folder, logging_steps=10, optim="adamw_torch", **saves, **evaluates),
        train_dataset=data,
        eval_dataset=validation,
        data_collator=only_item,
        callbacks=[_HFSteps(stalls)],
        xla_args=_CONFIG,
    )
    stalls.report = trainer.xla_report
    return trainer.train


class _LightningSteps(L.Callback):
    def __init__(self, stalls: Stalls) -> None:
        self._stalls = stalls

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        self._stalls.step_begins(batch_idx + 1)

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._stalls.step_ended(batch_idx + 1)


class _SlowIO(XLAEagerCheckpointIO):
    def __init__(self, stalls: Stalls) -> None:
        super().__init__()
        self._stalls = stalls

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self._stalls.stall("saves")
        super().save_checkpoint(*args, **kwargs)


class _Validated(Module):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch).loss)


def _lightning(stalls: Stalls, folder: str) -> Callable[[], object]:
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    data, validation = _data(stalls)
    strategy = XLAEagerStrategy(_CONFIG, checkpoint_io=_SlowIO(stalls))
    saves = ModelCheckpoint(Path(folder, "saved"), every_n_train_steps=_SAVED, save_on_train_epoch_end=False)
    trainer = L.Trainer(
        strategy=strategy,
        max_epochs=1,
        callbacks=[_LightningSteps(stalls), saves],
        default_root_dir=folder,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    loaders = [DataLoader(part, batch_size=1, collate_fn=only_item) for part in (data, validation)]
    stalls.report = strategy.xla_report
    return functools.partial(trainer.fit, _Validated(_SIZE.model().train()), *loaders)


_TRAININGS = {HF: _hf, LIGHTNING: _lightning}


def _run(trainer: str, length: float) -> Measured:
    """Runs in a child."""
    initialize()
    # The first access executes two tiny graphs.
    assert get_runtime().replay_works
    stalls = Stalls(length)
    with tempfile.TemporaryDirectory() as folder:
        train = _TRAININGS[trainer](stalls, folder)
        began = time.perf_counter()
        train()
        seconds = time.perf_counter() - began
        assert stalls.report is not None
        made = stalls.report()
    compiles = {event.call: event.seconds for event in made.compiles if event.step == "train_step"}
    compiled = stalls.steps[_COMPILED] - stalls.steps[_TRACED], compiles.get(_COMPILED, 0.0)
    return Measured(seconds=seconds, reported=made.wall, stalls={**stalls.stalls, "compile": compiled})


def measure(trainer: str, length: float, timeout: float) -> Measured:
    """Trains with stalls.

    Raises:
        RuntimeError: the run failed.
    """
    outcome = run_in_child(functools.partial(_run, trainer, length), timeout=timeout)
    if not outcome.ok:
        raise RuntimeError(f"{trainer}: {outcome.error}\n{outcome.output}")
    measured: Measured = outcome.value
    return measured


def add_targets(made: report.Report, trainer: str, measured: Measured) -> None:
    """Adds the targets of one trainer."""
    apart = abs(sum(measured.reported.values()) / measured.seconds - 1)
    made.target(f"{trainer}: share of the wall time that the sum of the parts is off", apart, "at most", SUM)
    for kind in KINDS:
        passed, reported = measured.stalls.get(kind, (0.0, 0.0))
        share = abs(reported / passed - 1) if passed else None
        made.target(f"{trainer}: share of a stall that {kind} is off", share, "at most", STALL)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints, checks."""
    parser = report.parser("Whether the run report finds where stalls were put.")
    parser.add_argument("--trainers", default=",".join(_TRAININGS), help="comma-separated")
    parser.add_argument("--length", type=float, default=1.0, help="seconds of each stall")
    parser.add_argument("--timeout", type=float, default=300, help="seconds of a run")
    options = parser.parse_args(argv)
    if unknown := set(options.trainers.split(",")) - set(_TRAININGS):
        parser.error(f"no trainer is called {unknown.pop()!r}; there are {', '.join(_TRAININGS)}")
    report.freeze_imports()
    made = report.Report("attribution", settings={"steps": STEPS, "seconds of a stall": options.length})
    rows: list[tuple[object, ...]] = []
    for trainer in options.trainers.split(","):
        measured = measure(trainer, options.length, options.timeout)
        made.results[trainer] = asdict(measured)
        made.save(options)
        rows.append((trainer, "all", measured.seconds, sum(measured.reported.values())))
        rows += [(trainer, kind, *seconds) for kind, seconds in measured.stalls.items()]
        add_targets(made, trainer, measured)
    print(report.table(("trainer", "what", "seconds that passed", "seconds in the report"), rows))
    return made.finish(options)


if __name__ == "__main__":
    sys.exit(main())
