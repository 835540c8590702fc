"""Committed checkpoints: their contents, their rotation, and resuming from them."""

from __future__ import annotations

import json
import logging
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import HfArgumentParser, TrainerCallback

import hf_trainer
from hf_trainer import XLAArguments
from hf_trainer.checkpoints.exact_resume import EXACT_RESUME
from hf_trainer.checkpoints.stores import SETTINGS
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
from xla_adapters import ConfigError, XLAConfig
from xla_adapters.checkpoint import (
    MANIFEST,
    CheckpointMismatchWarning,
    CheckpointStore,
    CheckpointWarning,
    differences,
    manifest,
)
from xla_adapters.config import REMOVED_OPTIONS
from xla_adapters.errors import CheckpointDamagedError, CheckpointNotFoundError, CheckpointWriteError


def run(folder: Path, *, resume: bool | Path | None = None, **options: Any) -> Run:
    """Six steps, saved after every second one. Options are those of the trainer, or of its arguments."""
    names = ("safe_checkpoints", "trainer_class", "eval_dataset", "rng_algorithm")
    own = {name: options.pop(name) for name in names if name in options}
    defaults = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2}
    return ours(
        Classifier(dropout=0.4),
        vector_samples(16),
        args=arguments(str(folder), **{**defaults, **options}),
        train_options={"resume_from_checkpoint": str(resume) if isinstance(resume, Path) else resume},
        **own,
    )


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("checkpoint-*"))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@isolated
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


@isolated
@pytest.mark.parametrize("limit", [1, 2, 3, None])
def test_the_best_and_the_newest_stay_as_in_transformers(limit: int | None, tmp_path: Path) -> None:
    options = {"max_steps": 8, **keeping_the_best(limit)}
    safe = run(tmp_path / "safe", **options)
    run(tmp_path / "stock", safe_checkpoints=False, **options)
    assert checkpoints(tmp_path / "safe") == checkpoints(tmp_path / "stock")
    best = str(tmp_path / "safe" / "checkpoint-2")
    assert safe.trainer.state.best_model_checkpoint == best
    for name in checkpoints(tmp_path / "safe"):
        state = json.loads((tmp_path / "safe" / name / "trainer_state.json").read_text())
        assert state["best_model_checkpoint"] == best


@isolated
def test_what_is_not_a_checkpoint_of_the_run_stays(tmp_path: Path) -> None:
    run(tmp_path, max_steps=2)
    shutil.copytree(tmp_path / "checkpoint-2", tmp_path / "kept-by-hand")
    run(tmp_path, save_total_limit=1)
    assert checkpoints(tmp_path) == ["checkpoint-6"]
    assert (tmp_path / "kept-by-hand").is_dir()


@isolated
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


@isolated
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


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped": flip,
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "deleted": Path.unlink,
}


@isolated
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


@isolated
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


@isolated
def test_checkpoints_of_transformers_are_loaded_unchecked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    losses = run(tmp_path, safe_checkpoints=False).losses
    shutil.rmtree(tmp_path / "checkpoint-6")
    with pytest.warns(CheckpointWarning, match="no manifest"):
        assert run(tmp_path, resume=True).losses == losses
    with pytest.raises(CheckpointNotFoundError, match=r"No valid checkpoint found in output directory"):
        run(tmp_path / "nothing", resume=True)
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="hf_trainer.checkpoints.resume_check"):
        resumed = run(tmp_path, resume=tmp_path / "checkpoint-4")
    assert resumed.losses == losses
    assert [record.getMessage() for record in caplog.records if "no manifest" in record.getMessage()] == [
        f"{tmp_path / 'checkpoint-4'} has no manifest: it is loaded as it is, unchecked"
    ]


@isolated
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


@isolated
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


@isolated
def test_the_same_configuration_is_the_same_in_the_manifest(tmp_path: Path) -> None:
    trainer = run(tmp_path).trainer
    (*_, newest) = CheckpointStore(tmp_path).checkpoints()
    again = hf_trainer.Trainer(Classifier(), trainer.args, train_dataset=vector_samples(16))
    assert (
        differences(newest.manifest, settings=again._xla.stores.settings, distributions=("transformers", "accelerate"))
        == []
    )


@isolated
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


@isolated
def test_what_is_pushed_is_the_checkpoint_under_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pushed: list[tuple[str, bool]] = []

    def push(self: Any, folder: str) -> None:
        pushed.append((folder, (Path(folder) / MANIFEST).is_file()))

    monkeypatch.setattr(transformers.Trainer, "_push_from_checkpoint", push)
    monkeypatch.setattr(transformers.Trainer, "init_hf_repo", lambda self, token=None: None)
    monkeypatch.setattr(transformers.Trainer, "push_to_hub", lambda self, *args, **kwargs: None)
    run(tmp_path, push_to_hub=True)
    assert pushed == [(str(tmp_path / f"checkpoint-{step}"), True) for step in (2, 4, 6)]


@isolated
def test_from_pretrained_reads_it(tmp_path: Path) -> None:
    args = arguments(str(tmp_path), save_strategy="steps", save_steps=4)
    trained = ours(gpt2(), token_samples(16), args=args).parameters()
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "checkpoint-4")
    assert all(value.equal(trained[name]) for name, value in loaded.state_dict().items())


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
