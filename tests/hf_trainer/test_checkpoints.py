"""Committed checkpoints: their contents, their rotation, resuming from them, and the options of `checkpoint=`."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import threading
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from safetensors import safe_open
from torch.utils.data import Dataset
from transformers import EarlyStoppingCallback, HfArgumentParser, TrainerCallback

import hf_trainer
from hf_trainer import XLAArguments
from hf_trainer import checkpoints as safe
from hf_trainer import data as loaders
from hf_trainer.checkpoints import SETTINGS
from hf_trainer.resume import EXACT_RESUME
from hf_trainer.saving import DeferredWrites
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
from tests.isolation import isolated, run_in_child
from tests.support import flip
from tests.tiny_models import tiny
from tests.trainers import checkpoint, train
from xla_adapters import ConfigError, XLAConfig
from xla_adapters.checkpoint import (
    MANIFEST,
    CheckpointConfig,
    CheckpointMismatchWarning,
    CheckpointStore,
    CheckpointWarning,
    differences,
    manifest,
)
from xla_adapters.config import REMOVED_OPTIONS
from xla_adapters.errors import (
    CheckpointDamagedError,
    CheckpointNotFoundError,
    CheckpointWriteError,
    UnsupportedOptionError,
)

pytestmark = pytest.mark.isolated


def run(folder: Path, *, resume: bool | Path | None = None, seed: int = 0, **options: Any) -> Run:
    """Six steps, saved after every second one. Options are those of the trainer, or of its arguments."""
    names = ("safe_checkpoints", "checkpoint", "trainer_class", "eval_dataset", "rng_algorithm", "callbacks")
    own = {name: options.pop(name) for name in names if name in options}
    defaults = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2}
    return ours(
        Classifier(dropout=0.4, seed=seed),
        vector_samples(16),
        args=arguments(str(folder), **{**defaults, **options}),
        train_options={"resume_from_checkpoint": str(resume) if isinstance(resume, Path) else resume},
        **own,
    )


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("checkpoint-*"))


def test_the_files_are_those_of_transformers_and_the_manifest(tmp_path: Path) -> None:
    run(tmp_path / "safe", hub_token="hf_very_secret", run_name="a-private-name")
    run(tmp_path / "stock", safe_checkpoints=False)
    for step in (2, 4, 6):
        safe, stock = (tmp_path / kind / f"checkpoint-{step}" for kind in ("safe", "stock"))
        names = [{str(file.relative_to(folder)) for file in folder.rglob("*")} for folder in (safe, stock)]
        assert names[0] == names[1] | {MANIFEST, EXACT_RESUME}
        manifest = CheckpointStore(tmp_path / "safe").load(safe.name).manifest
        assert manifest.step == step
        assert manifest.settings["arguments"]["learning_rate"] == 1e-2
        assert "transformers" in manifest.versions
        text = (safe / MANIFEST).read_text()
        assert not any(word in text.lower() for word in ("token", "secret", "private", str(tmp_path)))
        states = [json.loads((folder / "trainer_state.json").read_text()) for folder in (safe, stock)]
        assert [entry.get("loss") for entry in states[0]["log_history"]] == [
            entry.get("loss") for entry in states[1]["log_history"]
        ]
    assert all(path.name.startswith(("checkpoint-", "xla-")) for path in (tmp_path / "safe").iterdir())


@pytest.mark.parametrize("limit", [1, 2, 3, None])
def test_the_best_and_the_newest_stay_as_in_transformers(limit: int | None, tmp_path: Path) -> None:
    options = {"max_steps": 8, **keeping_the_best(limit)}
    ways: dict[str, Any] = {"safe": {}, "async": {"checkpoint": {"asynchronous": True}}}
    stock = run(tmp_path / "stock", safe_checkpoints=False, **options).parameters()
    for name, own in ways.items():
        done = run(tmp_path / name, **own, **options)
        assert checkpoints(tmp_path / name) == checkpoints(tmp_path / "stock")
        best = tmp_path / name / "checkpoint-2"
        assert done.trainer.state.best_model_checkpoint == str(best)
        saved = safetensors.torch.load_file(best / "model.safetensors")
        for key, value in done.parameters().items():
            assert torch.equal(value, saved[key])
            assert torch.equal(value, stock[key])
        for saved_step in checkpoints(tmp_path / name):
            state = json.loads((tmp_path / name / saved_step / "trainer_state.json").read_text())
            assert state["best_model_checkpoint"] == str(best)


def test_what_is_not_a_checkpoint_of_the_run_stays(tmp_path: Path) -> None:
    run(tmp_path, max_steps=2)
    shutil.copytree(tmp_path / "checkpoint-2", tmp_path / "kept-by-hand")
    run(tmp_path, save_total_limit=1)
    assert checkpoints(tmp_path) == ["checkpoint-6"]
    assert (tmp_path / "kept-by-hand").is_dir()


def test_true_resumes_from_the_newest_valid_one(tmp_path: Path) -> None:
    losses = run(tmp_path).losses
    flip(tmp_path / "checkpoint-6" / "optimizer.pt")
    (tmp_path / "checkpoint-4" / "model.safetensors").unlink()
    with pytest.warns(CheckpointWarning) as said:
        resumed = run(tmp_path, resume=True)
    told = " ".join(str(warning.message) for warning in said)
    assert "checkpoint-6 is damaged" in told
    assert "optimizer.pt is not what was written" in told
    assert "model.safetensors is missing" in told
    assert resumed.losses == losses
    assert len(resumed.steps) == 4
    assert checkpoints(tmp_path) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    assert {path.name for path in tmp_path.glob("_damaged-*")} == {"_damaged-checkpoint-4", "_damaged-checkpoint-6"}


def test_a_path_is_verified(tmp_path: Path) -> None:
    run(tmp_path)
    flip(tmp_path / "checkpoint-4" / "model.safetensors")
    (tmp_path / "link").symlink_to(tmp_path / "checkpoint-4")
    for path in (tmp_path / "checkpoint-4", tmp_path / "link"):
        with pytest.raises(
            CheckpointDamagedError, match=r"model\.safetensors is not what was written.*remove xla_adapters"
        ):
            run(tmp_path, resume=path)
    assert checkpoints(tmp_path) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]


@pytest.mark.parametrize("resume", ["path", "newest"])
def test_a_checkpoint_that_the_user_has_converted(resume: str, tmp_path: Path) -> None:
    whole = run(tmp_path, max_steps=6)
    folder = tmp_path / "checkpoint-4"
    shutil.rmtree(tmp_path / "checkpoint-6")
    torch.save(safetensors.torch.load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    asked = folder if resume == "path" else True
    if resume == "path":
        with pytest.raises(CheckpointDamagedError, match=r"model\.safetensors is missing.*trust_files=True"):
            run(tmp_path, resume=asked)
    with pytest.warns(CheckpointWarning, match="checkpoint-4 differs from its manifest"):
        resumed = run(tmp_path, resume=asked, checkpoint={"trust_files": True})
    assert resumed.losses == whole.losses


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped": flip,
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "deleted": Path.unlink,
}


def test_every_file_flipped_cut_off_or_deleted_is_refused(tmp_path: Path) -> None:
    trainer = run(tmp_path, max_steps=2).trainer
    folder = tmp_path / "checkpoint-2"
    names = {path.name for path in folder.iterdir()}
    assert len(names) > 6

    class Began(Exception):
        """The checkpoint was accepted."""

    class Stops(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            raise Began

    trainer.add_callback(Stops())

    def refused() -> set[str]:
        found = set()
        for kind, damage in DAMAGES.items():
            for file in sorted(folder.iterdir()):
                data = file.read_bytes()
                damage(file)
                try:
                    trainer.train(resume_from_checkpoint=str(folder))
                except CheckpointDamagedError:
                    found.add(f"{kind} {file.name}")
                except Exception:  # noqa: BLE001 (accepted; what torch made of it does not matter)
                    pass
                file.write_bytes(data)
        return found

    # A checkpoint without a manifest counts as one of transformers' own, and is loaded with a warning.
    assert refused() == {f"{kind} {name}" for kind in DAMAGES for name in names} - {f"deleted {MANIFEST}"}
    # Without the check the damage is not noticed.
    vars(manifest)["problems"] = lambda *args: []
    assert "flipped model.safetensors" not in refused()


def test_a_damaged_best_model_is_not_loaded(tmp_path: Path) -> None:
    class Damages(Scores):
        def _load_best_model(self) -> None:
            flip(Path(str(self.state.best_model_checkpoint)) / "model.safetensors")
            super()._load_best_model()

    with pytest.raises(CheckpointDamagedError, match=r"model\.safetensors"):
        run(
            tmp_path,
            load_best_model_at_end=True,
            eval_strategy="steps",
            eval_steps=2,
            eval_dataset=vector_samples(4),
            trainer_class=Damages,
        )


def test_checkpoints_of_transformers_are_loaded_unchecked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    losses = run(tmp_path, safe_checkpoints=False).losses
    shutil.rmtree(tmp_path / "checkpoint-6")
    with pytest.warns(CheckpointWarning, match="no manifest"):
        assert run(tmp_path, resume=True).losses == losses
    with pytest.raises(CheckpointNotFoundError, match=r"No valid checkpoint found .* Leave the argument out"):
        run(tmp_path / "nothing", resume=True)
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="hf_trainer.checkpoints"):
        resumed = run(tmp_path, resume=tmp_path / "checkpoint-4")
    assert resumed.losses == losses
    assert [record.getMessage() for record in caplog.records if "no manifest" in record.getMessage()] == [
        f"{tmp_path / 'checkpoint-4'} has no manifest: it is loaded as it is, unchecked"
    ]


def test_another_configuration_is_shown(tmp_path: Path) -> None:
    run(tmp_path)
    with pytest.warns(CheckpointMismatchWarning) as said:
        run(tmp_path, resume=tmp_path / "checkpoint-4", learning_rate=2e-2, max_steps=7)
    (message,) = [str(w.message) for w in said if issubclass(w.category, CheckpointMismatchWarning)]
    assert [line.strip() for line in message.splitlines()[1:]] == [
        "- arguments.learning_rate: 0.01",
        "+ arguments.learning_rate: 0.02",
        "- arguments.max_steps: 6",
        "+ arguments.max_steps: 7",
    ]


def test_options_that_are_gone_are_no_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = XLAConfig.of_numbers
    with monkeypatch.context() as earlier:
        earlier.setattr(
            XLAConfig, "of_numbers", lambda config: {**numbers(config), **dict.fromkeys(REMOVED_OPTIONS, 1)}
        )
        run(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CheckpointMismatchWarning)
        run(tmp_path, resume=tmp_path / "checkpoint-4")


def test_other_random_numbers_are_shown(tmp_path: Path) -> None:
    run_in_child(lambda: run(tmp_path, rng_algorithm="philox") and None)

    def resumed(algorithm: str) -> list[str]:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            run(tmp_path, resume=tmp_path / "checkpoint-4", rng_algorithm=algorithm)
        return [str(w.message) for w in said if issubclass(w.category, CheckpointMismatchWarning)]

    assert run_in_child(lambda: resumed("philox")) == []
    (message,) = run_in_child(lambda: resumed("three_fry"))
    assert [line.strip() for line in message.splitlines()[1:]] == [
        "- xla.rng_algorithm: 'philox'",
        "+ xla.rng_algorithm: 'three_fry'",
    ]


def test_the_same_configuration_is_the_same_in_the_manifest(tmp_path: Path) -> None:
    trainer = run(tmp_path).trainer
    (*_, newest) = CheckpointStore(tmp_path).checkpoints()
    again = hf_trainer.Trainer(Classifier(), trainer.args, train_dataset=vector_samples(16))
    assert (
        differences(newest.manifest, settings=again._xla.stores.settings, distributions=("transformers", "accelerate"))
        == []
    )


def test_a_save_that_fails_leaves_nothing_and_names_the_cause(tmp_path: Path) -> None:
    class Full(Scores):
        def _save_rng_state(self, output_dir: str) -> None:
            if self.state.global_step == 4:
                raise OSError(28, "No space left on device")
            super()._save_rng_state(output_dir)

    trainer = Full(
        Classifier(),
        arguments(str(tmp_path), save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2),
        train_dataset=vector_samples(16),
        eval_dataset=vector_samples(4),
    )
    with pytest.raises(CheckpointWriteError, match="No space left on device"):
        trainer.train()
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"checkpoint-2"}
    assert trainer._get_output_dir(None) == str(tmp_path)
    assert "_tmp-" not in str(trainer.state.best_model_checkpoint)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_what_is_pushed_is_the_checkpoint_under_its_name(
    asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed: list[tuple[str, bool]] = []

    def push(self: Any, folder: str) -> None:
        pushed.append((folder, (Path(folder) / MANIFEST).is_file()))

    monkeypatch.setattr(transformers.Trainer, "_push_from_checkpoint", push)
    monkeypatch.setattr(transformers.Trainer, "init_hf_repo", lambda self, token=None: None)
    monkeypatch.setattr(transformers.Trainer, "push_to_hub", lambda self, *args, **kwargs: None)
    run(tmp_path, checkpoint={"asynchronous": asynchronous}, push_to_hub=True, hub_model_id="me/mine")
    assert pushed == [(str(tmp_path / f"checkpoint-{step}"), True) for step in (2, 4, 6)]


def test_weights_of_transformers_models_are_read_by_from_pretrained(tmp_path: Path) -> None:
    runs = {}
    for kind in (False, True):
        args = arguments(str(tmp_path / str(kind)), save_strategy="steps", save_steps=2)
        runs[kind] = ours(gpt2(dropout=0.3), token_samples(16), args=args, checkpoint={"asynchronous": kind})
    files = [tmp_path / str(kind) / "checkpoint-2" / "model.safetensors" for kind in (False, True)]
    one, other = (safetensors.torch.load_file(file) for file in files)
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    for kind, trained in runs.items():
        loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / str(kind) / "checkpoint-4")
        assert all(value.equal(trained.parameters()[name]) for name, value in loaded.state_dict().items())


def test_the_option() -> None:
    parser = HfArgumentParser(XLAArguments)
    (parsed,) = parser.parse_args_into_dataclasses(["--safe_checkpoints", "false"])
    assert parsed.safe_checkpoints is False
    assert XLAArguments().safe_checkpoints is True
    with pytest.raises(ConfigError, match="safe_checkpoints='yes'"):
        XLAArguments(safe_checkpoints="yes")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="twice"):
        hf_trainer.Trainer(xla_args=XLAArguments(), safe_checkpoints=False)


def test_the_settings_hold_no_secrets() -> None:
    assert not [name for name in SETTINGS if any(word in name for word in ("token", "hub", "dir", "name", "key"))]


# ---- `checkpoint=` ------------------------------------------------------------------------------------


class _Slow(DeferredWrites):
    """A writer that waits until the training lets it go on: once for each checkpoint."""

    go = threading.Semaphore(0)
    begun = 0

    def finish(self, target: Path) -> None:
        type(self).begun += 1
        assert self.go.acquire(timeout=240)
        super().finish(target)


def test_save_model_waits(tmp_path: Path) -> None:
    vars(safe)["DeferredWrites"] = _Slow
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

    run(tmp_path, checkpoint={"asynchronous": True}, max_steps=2, callbacks=[Saves()], trainer_class=Known)
    assert seen == [[], ["checkpoint-2"]]
    assert (tmp_path / "weights" / "model.safetensors").is_file()


def test_what_stays(tmp_path: Path) -> None:
    config = CheckpointConfig(every_n_steps=1, keep_last=2, keep_every=3)
    run(tmp_path, checkpoint=config, max_steps=8, save_strategy="no")
    assert checkpoints(tmp_path) == ["checkpoint-3", "checkpoint-6", "checkpoint-7", "checkpoint-8"]


class _Impatient(hf_trainer.Trainer):
    """Gets a signal twice in the third step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for callback in self.callback_handler.callbacks:
            manager = getattr(callback, "jit_manager", None)
            if manager is not None:
                # Three seconds distinguish the end by SIGTERM from the SIGKILL that follows it.
                manager._enable_checkpoint()
                manager.is_checkpoint_requested = False
                manager.kill_wait = 0

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step == 2:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGTERM)
        # Each signal has started one, which asks for the checkpoint.
        for timer in threading.enumerate():
            if isinstance(timer, threading.Timer):
                timer.join()
        return super().compute_loss(*args, **kwargs)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_the_option_of_transformers_goes_on_working(asynchronous: bool, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    options: dict[str, Any] = {"save_strategy": "no", "enable_jit_checkpoint": True, "trainer_class": _Impatient}
    ended = run(tmp_path, checkpoint={"asynchronous": asynchronous}, **options)
    assert len(ended.steps) == 3
    assert checkpoints(tmp_path) == ["checkpoint-3"]
    assert CheckpointStore(tmp_path).load(3).step == 3
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_mean_since_the_last_log_goes_on(tmp_path: Path) -> None:
    options: dict[str, Any] = {"logging_steps": 3, "max_steps": 8}
    whole = run(tmp_path / "whole", **options)
    for step in (2, 4, 6):
        resumed = run(tmp_path / "rest", resume=tmp_path / f"whole/checkpoint-{step}", seed=1, **options)
        assert resumed.losses == whole.losses
        assert len(whole.losses) == 2
        # The mean over the steps of the resumed run, as in transformers.
        (mean,) = resumed.logged("train_loss")
        assert 0 < mean < 2


def test_early_stopping_goes_on(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "max_steps": 8,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "eval_dataset": vector_samples(4),
        "trainer_class": Scores,
        "load_best_model_at_end": True,
        "restore_callback_states_from_checkpoint": True,
    }
    whole = run(tmp_path / "whole", callbacks=[EarlyStoppingCallback(2)], **options)
    assert len(whole.steps) == 6
    resumed = run(
        tmp_path / "rest",
        callbacks=[EarlyStoppingCallback(2)],
        resume=tmp_path / "whole/checkpoint-4",
        seed=1,
        **options,
    )
    assert len(resumed.steps) == 2
    assert resumed.losses == whole.losses


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


# ---- renamed weights --------------------------------------------------------------------------------


def images(count: int) -> list[dict[str, Any]]:
    pixels = torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    return [{"pixel_values": image, "labels": index % 3} for index, image in enumerate(pixels)]


def trainer(folder: Path, **options: Any) -> hf_trainer.Trainer:
    args = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=4,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        logging_steps=1,
        save_steps=2,
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    return hf_trainer.Trainer(
        tiny("vit", num_channels=1, hidden_dropout_prob=0.1, num_labels=3),
        args,
        train_dataset=images(16),
        eval_dataset=images(4),
    )


@isolated
def test_renamed_weights_resume_exactly(tmp_path: Path) -> None:
    whole = trainer(tmp_path)
    whole.train()
    with safe_open(tmp_path / "checkpoint-2" / "model.safetensors", "pt") as weights:
        assert set(weights.keys()) != set(whole.model.state_dict())
    resumed = trainer(tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value.cpu(), resumed.model.state_dict()[name].cpu()), name


@isolated
def test_renamed_weights_of_the_best_model_are_loaded(tmp_path: Path) -> None:
    # A learning rate this high makes each step worse, so the first checkpoint is the best.
    best = trainer(
        tmp_path,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        eval_strategy="steps",
        eval_steps=2,
        learning_rate=1.0,
        lr_scheduler_type="constant",
    )
    best.train()
    assert best.state.best_model_checkpoint is not None
    reloaded = type(best.model).from_pretrained(best.state.best_model_checkpoint)
    for name, value in reloaded.state_dict().items():
        assert torch.equal(value, best.model.state_dict()[name].cpu()), name


# ---- data -------------------------------------------------------------------------------------------


class _Counted(Dataset[Any]):
    """Counts the samples that are read; reading may draw a random number."""

    def __init__(self, draws: bool) -> None:
        self.data = vector_samples(24)
        self.draws = draws
        self.read = 0

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        self.read += 1
        sample = self.data[index]
        return {**sample, "x": sample["x"] + 0.1 * torch.rand(1)} if self.draws else sample


@isolated
def test_what_draws_nothing_is_left_out_by_the_sampler(tmp_path: Path) -> None:
    read = []
    for draws in (False, True):
        folder, data = tmp_path / str(draws), _Counted(draws)
        train("hf", folder, data=_Counted(draws), steps=10, save_every=2)
        train("hf", folder, data=data, steps=10, resume=checkpoint("hf", folder, 4))
        read.append(data.read)
    # Two batches of the first epoch and four of the second; its loader reads one ahead.
    assert read[0] <= 4 * (2 + 4 + 1)
    assert read[1] > 4 * (6 + 4)


@isolated
def test_two_epochs_draw_different_numbers() -> None:
    seen = [float(batch[0]) for _ in range(2) for batch in _loader([0] * 3)]
    assert len(set(seen)) == 6


def _loader(rows: list[int]) -> loaders.DeviceLoader:
    made = torch.utils.data.DataLoader(rows, batch_size=1, collate_fn=lambda samples: torch.rand(1))  # type: ignore[arg-type]
    return loaders.DeviceLoader(made, torch.device("cpu"))
