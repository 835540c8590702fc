"""`checkpoint=`: saves in the background, on a schedule and before the process is ended; deadlines of hanging steps."""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from transformers import EarlyStoppingCallback, TrainerCallback

import hf_trainer
from hf_trainer import XLAArguments
from hf_trainer import checkpoints as saves
from hf_trainer.saving import DeferredWrites
from tests.checkpoint import time_of_hangs
from tests.crash.storages import Quick
from tests.hf_trainer.scenarios import (
    Classifier,
    Run,
    Scores,
    arguments,
    gpt2,
    keeping_the_best,
    ours,
    token_samples,
    vector_samples,
)
from tests.isolation import isolated, outcome_of, run_in_child
from xla_adapters import ConfigError, get_runtime
from xla_adapters.checkpoint import CheckpointConfig, CheckpointStore, CheckpointWarning, SaveSchedule
from xla_adapters.errors import CheckpointWriteError, StallError, UnsupportedOptionError
from xla_adapters.loop import checkpoints as scheduled


def run(folder: Path, checkpoint: Any = None, *, resume: Any = None, seed: int = 0, **options: Any) -> Run:
    """Eight steps, saved after every second one. Options are those of the trainer, or of its arguments."""
    own = {name: options.pop(name) for name in ("trainer_class", "eval_dataset", "callbacks") if name in options}
    defaults = {"max_steps": 8, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 2}
    return ours(
        Classifier(dropout=0.4, seed=seed),
        vector_samples(24),
        args=arguments(str(folder), **{**defaults, **options}),
        checkpoint=checkpoint,
        train_options={"resume_from_checkpoint": resume},
        **own,
    )


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("checkpoint-*"))


# ---- in the background -------------------------------------------------------------------------------


class _Slow(DeferredWrites):
    """A writer that waits until the training lets it go on: once for each checkpoint."""

    go = threading.Semaphore(0)
    begun = 0

    def finish(self, target: Path) -> None:
        type(self).begun += 1
        assert self.go.acquire(timeout=240)
        super().finish(target)


class _Lets(TrainerCallback):
    """Lets the writer continue one step after the save began."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen: list[tuple[int, list[str]]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % 2 == 1:
            self.seen.append((state.global_step, checkpoints(self.folder)))
        if state.global_step in (3, 5, 7):
            _Slow.go.release()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 8:
            _Slow.go.release()


@isolated
def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    expected = run(tmp_path / "sync")
    vars(saves)["DeferredWrites"] = _Slow
    lets = _Lets(tmp_path / "async")
    actual = run(tmp_path / "async", CheckpointConfig(asynchronous=True), callbacks=[lets])
    # The checkpoint that is being written is not visible yet, and the rotation has not deleted an old one.
    assert lets.seen == [
        (1, []),
        (3, []),
        (5, ["checkpoint-2"]),
        (7, ["checkpoint-2", "checkpoint-4"]),
    ]
    assert _Slow.begun == 4
    assert actual.losses == expected.losses
    assert actual.counts.compiles == 0, actual.explain()
    assert checkpoints(tmp_path / "async") == checkpoints(tmp_path / "sync") == ["checkpoint-6", "checkpoint-8"]
    for name in checkpoints(tmp_path / "sync"):
        _same(tmp_path / "sync" / name, tmp_path / "async" / name)
    # For the save of step 8.
    _Slow.go.release()
    resumed = run(tmp_path / "async", {"asynchronous": True}, resume=str(tmp_path / "async/checkpoint-6"), seed=1)
    assert resumed.losses == expected.losses


def _same(one: Path, other: Path) -> None:
    names = {path.name for path in one.iterdir()}
    assert names == {path.name for path in other.iterdir()}
    for name in names:
        if name.endswith((".pt", ".pth", "model.bin")):
            values = [torch.load(folder / name, weights_only=False) for folder in (one, other)]
            texts = [str(torch.utils._pytree.tree_map(_listed, value)) for value in values]
            assert texts[0] == texts[1], name


def _listed(leaf: Any) -> Any:
    return leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf


@isolated
def test_weights_of_transformers_models(tmp_path: Path) -> None:
    runs = {}
    for kind in (False, True):
        args = arguments(str(tmp_path / str(kind)), save_strategy="steps", save_steps=2)
        runs[kind] = ours(gpt2(dropout=0.3), token_samples(16), args=args, checkpoint={"asynchronous": kind})
    files = [tmp_path / str(kind) / "checkpoint-2" / "model.safetensors" for kind in (False, True)]
    one, other = (safetensors.torch.load_file(file) for file in files)
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "True" / "checkpoint-4")
    assert all(value.equal(runs[True].parameters()[name]) for name, value in loaded.state_dict().items())


class _Full(Quick):
    """A disk that is full at the second checkpoint."""

    folders = 0

    def make_folder(self, path: str) -> None:
        super().make_folder(path)
        type(self).folders += "checkpoint-4" in path

    def fsync(self, path: str) -> None:
        if "checkpoint-4" in path:
            raise OSError(28, "No space left on device")
        super().fsync(path)


@isolated
@pytest.mark.parametrize("last", [False, True], ids=["at the next save", "at the end"])
def test_a_save_that_fails_in_the_background_is_raised(last: bool, tmp_path: Path) -> None:
    vars(saves)["CheckpointStore"] = functools.partial(CheckpointStore, storage=_Full())
    done: list[int] = []

    class Notes(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            done.append(state.global_step)

    with pytest.raises(CheckpointWriteError, match="No space left on device"):
        run(tmp_path, {"asynchronous": True}, max_steps=5 if last else 8, callbacks=[Notes()])
    assert done[-1] == (5 if last else 6)
    assert checkpoints(tmp_path) == ["checkpoint-2"]
    assert not list(tmp_path.glob("_tmp-*"))


@isolated
@pytest.mark.parametrize("limit", [1, 2, None])
def test_the_best_one_stays_and_is_loaded(limit: int | None, tmp_path: Path) -> None:
    options = keeping_the_best(limit)
    runs = [run(tmp_path / str(kind), {"asynchronous": kind}, **options) for kind in (False, True)]
    assert checkpoints(tmp_path / "True") == checkpoints(tmp_path / "False")
    best = str(tmp_path / "True" / "checkpoint-2")
    assert runs[1].trainer.state.best_model_checkpoint == best
    one, other = (each.parameters() for each in runs)
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    saved = safetensors.torch.load_file(Path(best) / "model.safetensors")
    assert all(torch.equal(value, other[name]) for name, value in saved.items())
    for name in checkpoints(tmp_path / "True"):
        state = json.loads((tmp_path / "True" / name / "trainer_state.json").read_text())
        assert state["best_model_checkpoint"] == best


@isolated
def test_what_is_pushed_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pushed: list[tuple[str, bool]] = []

    def push(self: Any, folder: str) -> None:
        pushed.append((folder, (Path(folder) / "trainer_state.json").is_file()))

    monkeypatch.setattr(transformers.Trainer, "_push_from_checkpoint", push)
    monkeypatch.setattr(transformers.Trainer, "init_hf_repo", lambda self, token=None: None)
    run(tmp_path, {"asynchronous": True}, max_steps=4, push_to_hub=True, hub_model_id="me/mine")
    assert pushed == [(str(tmp_path / f"checkpoint-{step}"), True) for step in (2, 4)]


@isolated
def test_save_model_waits(tmp_path: Path) -> None:
    vars(saves)["DeferredWrites"] = _Slow
    seen = []

    class Saves(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(checkpoints(tmp_path))
            threading.Timer(0.5, _Slow.go.release).start()
            trainer[0].save_model(str(tmp_path / "weights"))
            seen.append(checkpoints(tmp_path))

    trainer: list[Any] = []

    class Known(hf_trainer.Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            trainer.append(self)

    run(tmp_path, {"asynchronous": True}, max_steps=2, callbacks=[Saves()], trainer_class=Known)
    assert seen == [[], ["checkpoint-2"]]
    assert (tmp_path / "weights" / "model.safetensors").is_file()


# ---- when it is due ----------------------------------------------------------------------------------


@isolated
def test_after_steps_and_after_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path / "steps", CheckpointConfig(every_n_steps=3), save_strategy="no", save_total_limit=None)
    assert checkpoints(tmp_path / "steps") == ["checkpoint-3", "checkpoint-6"]

    now = [0.0]

    class Waits(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            now[0] += 1.5 if state.global_step == 4 else 0

    monkeypatch.setattr(scheduled, "SaveSchedule", functools.partial(SaveSchedule, clock=lambda: now[0]))
    config = CheckpointConfig(every=timedelta(seconds=1.6))
    run(tmp_path / "never", config, save_strategy="no", save_total_limit=None, callbacks=[Waits()])
    assert checkpoints(tmp_path / "never") == []
    config = CheckpointConfig(every=timedelta(seconds=1.4))
    run(tmp_path / "time", config, save_strategy="no", save_total_limit=None, callbacks=[Waits()])
    assert checkpoints(tmp_path / "time") == ["checkpoint-5"]


@isolated
def test_what_stays(tmp_path: Path) -> None:
    config = CheckpointConfig(every_n_steps=1, keep_last=2, keep_every=3)
    run(tmp_path, config, save_strategy="no", save_total_limit=None)
    assert checkpoints(tmp_path) == ["checkpoint-3", "checkpoint-6", "checkpoint-7", "checkpoint-8"]


# ---- before the end ----------------------------------------------------------------------------------


def send(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


class _Sends(hf_trainer.Trainer):
    """Receives a signal twice at one event of the third step."""

    place = ""

    def at(self, place: str) -> None:
        if self.place == place and self.state.global_step == (3 if place in ("save", "evaluation") else 2):
            send()
            send()

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        self.at("loader")
        return super().get_batch_samples(*args, **kwargs)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        self.at("forward")
        return super().compute_loss(*args, **kwargs)

    def _clip_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        self.at("optimizer")
        return super()._clip_grad_norm(*args, **kwargs)

    def _save_rng_state(self, output_dir: str) -> None:
        self.at("save")
        super()._save_rng_state(output_dir)

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        self.at("evaluation")
        return super().prediction_step(*args, **kwargs)


def _preempted(folder: Path, place: str, asynchronous: bool) -> None:
    class Sends(_Sends):
        pass

    Sends.place = place
    options: dict[str, Any] = {}
    if place == "save":
        options = {"save_strategy": "steps", "save_steps": 3}
    if place == "evaluation":
        options = _evaluating()
    before = signal.getsignal(signal.SIGTERM)
    try:
        run(
            folder,
            CheckpointConfig(save_on="preemption", asynchronous=asynchronous),
            trainer_class=Sends,
            **{"save_strategy": "no", **options},
        )
    except SystemExit as ended:
        assert signal.getsignal(signal.SIGTERM) is before
        sys.stdout.flush()
        os._exit(int(str(ended.code)))


def _evaluating() -> dict[str, Any]:
    return {"eval_strategy": "steps", "eval_steps": 3, "eval_dataset": vector_samples(8)}


@functools.cache
def _left_alone() -> tuple[list[float], list[float]]:
    """The logged losses, and the logged evaluation losses."""

    def child() -> Any:
        with tempfile.TemporaryDirectory() as folder:
            alone = run(Path(folder), save_strategy="no", **_evaluating())
        return alone.losses, alone.logged("eval_loss")

    losses, evaluations = run_in_child(child)
    return losses, evaluations


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("place", ["loader", "forward", "optimizer", "save", "evaluation"])
def test_a_signal_ends_the_training_at_the_end_of_the_step(place: str, asynchronous: bool, tmp_path: Path) -> None:
    evaluates = _evaluating() if place == "evaluation" else {}

    def rest() -> Any:
        again = run(tmp_path / "run", resume=True, seed=1, save_strategy="no", **evaluates)
        return again.losses, again.logged("eval_loss"), len(again.steps)

    outcome = outcome_of(lambda: _preempted(tmp_path / "run", place, asynchronous))
    assert outcome.error == "the process died with exit code 143", f"{outcome.error}\n{outcome.output}"
    assert checkpoints(tmp_path / "run") == ["checkpoint-3"]
    assert CheckpointStore(tmp_path / "run").load(3).step == 3
    losses, evaluations, steps = outcome_of(rest).value
    assert losses == _left_alone()[0]
    assert evaluations == (_left_alone()[1] if evaluates else [])
    assert steps == 5
    assert bool(evaluations) == bool(evaluates)


@isolated
def test_the_sync_point_of_a_tpu_ends_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(get_runtime().device), "preemption_sync_point", lambda self: lambda step: step == 3)
    with pytest.raises(SystemExit) as ended:
        run(tmp_path, {"save_on": "preemption"}, save_strategy="no")
    assert ended.value.code == 143
    assert CheckpointStore(tmp_path).load(3).step == 3


def test_a_signal_before_an_evaluation_saves_before_it(tmp_path: Path) -> None:
    """And again after it. If the process is killed during the evaluation, the first checkpoint is there."""

    class Killed(_Sends):
        place = "forward"

        def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
            os.kill(os.getpid(), signal.SIGKILL)

    def child() -> None:
        run(tmp_path, {"save_on": "preemption"}, save_strategy="no", trainer_class=Killed, **_evaluating())

    outcome = outcome_of(child)
    assert outcome.error == "the process died with signal 9", f"{outcome.error}\n{outcome.output}"
    assert CheckpointStore(tmp_path).load(3).step == 3


def test_a_kill_after_the_signal_leaves_what_was_there(tmp_path: Path) -> None:
    """The process is killed while it saves, as after the grace period of a preemption."""

    class Killed(_Sends):
        place = "forward"

        def _save_rng_state(self, output_dir: str) -> None:
            if self.state.global_step == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            super()._save_rng_state(output_dir)

    def child() -> None:
        run(tmp_path, {"save_on": "preemption"}, trainer_class=Killed)

    outcome = outcome_of(child)
    assert outcome.error == "the process died with signal 9", f"{outcome.error}\n{outcome.output}"
    assert checkpoints(tmp_path) == ["checkpoint-2"]
    expected = outcome_of(lambda: run(tmp_path / "whole").losses).value
    assert outcome_of(lambda: run(tmp_path, resume=True, seed=1).losses).value == expected


def test_after_the_deadline_no_save_is_begun(tmp_path: Path) -> None:
    class Late(_Sends):
        place = "forward"

        def _clip_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
            if self.state.global_step == 2:
                time.sleep(0.3)
            return super()._clip_grad_norm(*args, **kwargs)

    def child() -> None:
        config = CheckpointConfig(
            save_on="preemption", preemption_deadline=timedelta(seconds=0.2), preemption_exit_code=75
        )
        try:
            run(tmp_path, config, trainer_class=Late)
        except SystemExit as ended:
            os._exit(int(str(ended.code)))

    outcome = outcome_of(child)
    assert outcome.error == "the process died with exit code 75", f"{outcome.error}\n{outcome.output}"
    assert checkpoints(tmp_path) == ["checkpoint-2"]


@isolated
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_the_option_of_transformers_goes_on_working(asynchronous: bool, tmp_path: Path) -> None:
    class Impatient(_Sends):
        place = "forward"

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            for callback in self.callback_handler.callbacks:
                manager = getattr(callback, "jit_manager", None)
                if manager is not None:
                    # Three seconds distinguish the end by SIGTERM from the SIGKILL that follows it.
                    manager._enable_checkpoint()
                    manager.is_checkpoint_requested = False
                    manager.kill_wait = 0

        def at(self, place: str) -> None:
            super().at(place)
            # Each signal has started one, which asks for the checkpoint.
            for timer in threading.enumerate():
                if isinstance(timer, threading.Timer):
                    timer.join()

    before = signal.getsignal(signal.SIGTERM)
    ended = run(
        tmp_path,
        {"asynchronous": asynchronous},
        save_strategy="no",
        enable_jit_checkpoint=True,
        trainer_class=Impatient,
    )
    assert len(ended.steps) == 3
    assert checkpoints(tmp_path) == ["checkpoint-3"]
    assert CheckpointStore(tmp_path).load(3).step == 3
    assert signal.getsignal(signal.SIGTERM) is before


# ---- what hangs --------------------------------------------------------------------------------------


class _Hangs(_Sends):
    def at(self, place: str) -> None:
        if self.place == place and self.state.global_step >= 2:
            time_of_hangs.hang()

    # Handlers of the base class are called before ours.
    get_batch_samples = hf_trainer.Trainer.get_batch_samples
    prediction_step = hf_trainer.Trainer.prediction_step

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        self.at("forward" if self.model.training else "evaluation")
        return hf_trainer.Trainer.compute_loss(self, *args, **kwargs)

    def _get_num_items_in_batch(self, *args: Any, **kwargs: Any) -> Any:
        if self.model.training:
            self.at("loader")
        return super()._get_num_items_in_batch(*args, **kwargs)


@isolated
@pytest.mark.parametrize(
    ("place", "what"),
    [
        ("loader", "step [34]"),
        ("forward", "step 3"),
        ("save", "the save of checkpoint 'checkpoint-2'"),
        ("evaluation", "a step of the evaluation"),
    ],
)
def test_a_hang_ends_with_an_error(place: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    time_of_hangs.use_it(monkeypatch)

    class Hangs(_Hangs):
        pass

    Hangs.place = place
    with pytest.raises(StallError, match=what):
        run(
            tmp_path,
            CheckpointConfig(stall_deadline=timedelta(hours=1)),
            trainer_class=Hangs,
            eval_strategy="steps",
            eval_steps=2,
            eval_dataset=vector_samples(8),
        )


# ---- exact resume ------------------------------------------------------------------------------------


@isolated
def test_the_mean_since_the_last_log_goes_on(tmp_path: Path) -> None:
    options: dict[str, Any] = {"logging_steps": 3, "save_total_limit": None}
    whole = run(tmp_path / "whole", **options)
    for step in (2, 4, 6):
        resumed = run(tmp_path / "rest", resume=str(tmp_path / f"whole/checkpoint-{step}"), seed=1, **options)
        assert resumed.losses == whole.losses
        assert len(whole.losses) == 2
        # The mean over the steps of the resumed run, as in transformers.
        (mean,) = resumed.logged("train_loss")
        assert 0 < mean < 2


@isolated
def test_early_stopping_goes_on(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "max_steps": 8,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "eval_dataset": vector_samples(4),
        "trainer_class": Scores,
        "load_best_model_at_end": True,
        "save_total_limit": None,
        "restore_callback_states_from_checkpoint": True,
    }
    whole = run(tmp_path / "whole", callbacks=[EarlyStoppingCallback(2)], **options)
    assert len(whole.steps) == 6
    resumed = run(
        tmp_path / "rest",
        callbacks=[EarlyStoppingCallback(2)],
        resume=str(tmp_path / "whole/checkpoint-4"),
        seed=1,
        **options,
    )
    assert len(resumed.steps) == 2
    assert resumed.losses == whole.losses


# ---- options -----------------------------------------------------------------------------------------


@isolated
def test_what_cannot_take_effect_raises(tmp_path: Path) -> None:
    def make(**options: Any) -> Any:
        args = arguments(str(tmp_path), **options.pop("args", {}))
        return hf_trainer.Trainer(Classifier(), args, train_dataset=vector_samples(8), **options)

    with pytest.raises(ConfigError, match="asynchronous=True: only with safe_checkpoints=True"):
        make(checkpoint={"asynchronous": True}, safe_checkpoints=False)
    with pytest.raises(ConfigError, match="keep_last=2 and save_total_limit=3"):
        make(checkpoint={"keep_last": 2}, args={"save_total_limit": 3})
    with pytest.raises(ConfigError, match="unknown option"):
        make(checkpoint={"async": True})
    with pytest.raises(ConfigError, match="not JSON"):
        XLAArguments(checkpoint="async")
    with pytest.raises(ConfigError, match="twice"):
        make(checkpoint={"asynchronous": True}, xla_args=XLAArguments(checkpoint='{"asynchronous": true}'))
    made = make(xla_args=XLAArguments(checkpoint='{"asynchronous": true, "every": 60}'))
    assert made.checkpoint_config == CheckpointConfig(asynchronous=True, every=timedelta(minutes=1))


def test_several_processes() -> None:
    from hf_trainer.options import check_checkpoint_options

    with pytest.warns(CheckpointWarning, match="2 processes train together"):
        check_checkpoint_options(CheckpointConfig(), safe=True, processes=2, in_parts=False, limit=None)
    with pytest.raises(UnsupportedOptionError, match="2 processes"):
        check_checkpoint_options(CheckpointConfig(every_n_steps=2), safe=True, processes=2, in_parts=False, limit=None)
    with pytest.raises(UnsupportedOptionError, match="parts come to the host one at a time"):
        check_checkpoint_options(CheckpointConfig(asynchronous=True), safe=True, processes=1, in_parts=True, limit=None)
