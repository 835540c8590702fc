"""Where the time of a trainer's training goes: stalls are attributed, all adds up, and nothing is executed for it."""

from __future__ import annotations

import json
import linecache
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

import hf_trainer
from tests.hf_trainer.scenarios import Classifier, Run, arguments, ours, vector_samples
from tests.insight import time_of_stalls
from tests.isolation import isolated
from xla_adapters.errors import ConfigError

STEPS = 8
STALL = 100.0
SCALARS = {"goodput", "input_wait", "compiles", "compile_seconds", "seconds_per_step", "samples_per_second"}


class SlowData:
    def __init__(self) -> None:
        self.samples = vector_samples(4 * STEPS)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        if index == 0:
            time_of_stalls.pass_by(STALL)
        return self.samples[index]


class SlowCallback(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, *others: Any, **kwargs: Any) -> None:
        if state.global_step == 4:
            time_of_stalls.pass_by(STALL)


class SlowSave(hf_trainer.Trainer):
    def save_model(self, *args: Any, **kwargs: Any) -> None:
        time_of_stalls.pass_by(STALL)
        super().save_model(*args, **kwargs)


class SlowEvaluation(hf_trainer.Trainer):
    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        time_of_stalls.pass_by(STALL)
        return super().evaluation_loop(*args, **kwargs)


def training(folder: Path, *, data: Any = None, stock: dict[str, Any] | None = None, **options: Any) -> Run:
    args = arguments(str(folder), **{"max_steps": STEPS, "logging_steps": 4, **(stock or {})})
    return ours(Classifier(), data if data is not None else vector_samples(4 * STEPS), args=args, **options)


@isolated
@pytest.mark.parametrize("stalled", ["input wait", "callbacks", "saves", "evaluation"])
def test_a_stall_is_attributed(stalled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, dict[str, Any]] = {
        "input wait": {"data": SlowData()},
        "callbacks": {"callbacks": [SlowCallback()]},
        "saves": {"trainer_class": SlowSave, "stock": {"save_strategy": "steps", "save_steps": STEPS}},
        "evaluation": {
            "trainer_class": SlowEvaluation,
            "eval_dataset": vector_samples(4),
            "stock": {"eval_strategy": "steps", "eval_steps": STEPS},
        },
    }
    time_of_stalls.use_it(monkeypatch)
    report = training(tmp_path, **options[stalled]).trainer.xla_report()
    assert sum(report.wall.values()) == pytest.approx(STALL)
    compiled = sum(event.seconds for event in report.compiles)
    expected = dict.fromkeys(report.wall, 0.0) | {stalled: STALL, "compile": compiled}
    # The clock of the test stands still while XLA compiles, in steps of the training and of the evaluation.
    for event in report.compiles:
        expected["steps" if event.step == "train_step" else "evaluation"] -= event.seconds
    assert report.wall == pytest.approx(expected)
    assert compiled > 0


class ReadingCallback(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kwargs["model"].layers[3].bias.detach().cpu()  # the line that reads


@isolated
def test_transfers_have_their_lines(tmp_path: Path) -> None:
    lines = training(tmp_path, callbacks=[ReadingCallback()]).trainer.xla_report().transfers
    (read,) = [item for item in lines if item.call == ".cpu()"]
    file, _, number = read.line.rpartition(":")
    assert file == __file__
    assert linecache.getline(file, int(number)).endswith("# the line that reads\n")
    assert (read.direction, read.is_sampled) == ("to the host", True)
    assert 1 <= read.count <= STEPS
    assert read.bytes == read.count * Classifier().layers[3].bias.nbytes
    # The trainer reads the loss for its logs.
    logs = [item for item in lines if item.call == "the trainer"]
    assert sum(item.count for item in logs) >= STEPS // 4
    assert not any(item.is_sampled for item in logs)


@isolated
def test_the_parts_are_all_of_the_time(tmp_path: Path) -> None:
    run = training(tmp_path)
    report = run.trainer.xla_report()
    assert run.trainer.state.log_history[-1]["train_runtime"] <= report.wall_seconds <= run.counts.wall_seconds
    assert report.wall["compile"] == pytest.approx(sum(event.seconds for event in report.compiles))
    assert all(seconds > 0 for name, seconds in report.wall.items() if name not in ("evaluation", "saves"))


@isolated
def test_recording_executes_and_transfers_nothing(tmp_path: Path) -> None:
    # The first training of a process compiles, and does other things once.
    training(tmp_path / "first", xla_report=False)
    off = training(tmp_path / "off", xla_report=False)
    on = training(tmp_path / "on")
    assert on.losses == off.losses
    for name in ("compiles", "executions", "eager_ops", "transfers_to_host", "transfers_to_device"):
        assert getattr(on.counts, name) == getattr(off.counts, name), name
    assert on.counts.executions == STEPS
    assert not list(tmp_path.glob("off/xla-*"))
    assert off.trainer.xla_report().wall_seconds == 0
    assert not any(name.startswith("xla/") for entry in off.trainer.state.log_history for name in entry)


@isolated
def test_the_logs_say_what_the_time_since_the_last_one_went_to(tmp_path: Path) -> None:
    stock = {"eval_strategy": "steps", "eval_steps": 4}
    run = training(tmp_path / "run", stock={**stock, "report_to": ["tensorboard"]}, eval_dataset=vector_samples(4))
    entries = [entry for entry in run.trainer.state.log_history if "loss" in entry]
    assert [{name for name in entry if name.startswith("xla/")} for entry in entries] == [
        {f"xla/{name}" for name in SCALARS}
    ] * 2
    assert [entry["xla/compiles"] for entry in entries] == [1, 1]
    for entry in entries:
        assert 0 < entry["xla/goodput"] < 1
        assert entry["xla/seconds_per_step"] * entry["xla/samples_per_second"] == pytest.approx(4, rel=1e-2)
    assert not any(
        name.startswith("xla/") for entry in run.trainer.state.log_history if "loss" not in entry for name in entry
    )
    alone = training(tmp_path / "alone", stock=stock, eval_dataset=vector_samples(4))
    assert not any(name.startswith("xla/") for entry in alone.trainer.state.log_history for name in entry)


@isolated
def test_the_files_have_the_events_and_the_page(tmp_path: Path) -> None:
    run = training(tmp_path, stock={"save_strategy": "steps", "save_steps": 4})
    lines = [json.loads(line) for line in (tmp_path / "xla-events.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines] == ["compile", "save", "save", "end"]
    assert lines[0]["graph"]["hash"] == run.trainer.xla_report().compiles[0].graph.hash
    assert lines[-1]["steps"]["steps"] == STEPS
    assert [save["step"] for save in lines[-1]["checkpoints"]] == [4, 8]
    page = (tmp_path / "xla-report.html").read_text()
    assert len(page) < 200_000
    assert page.count("<svg") == 4
    assert "prefers-color-scheme: dark" in page
    # Nothing is loaded from elsewhere.
    assert not re.findall(r'(?:src|href)="(?!#)|<script|@import|url\(', page)
    for text in ("Where the time went", "first call of the phase &#39;update&#39;", "checkpoint-4", "Classifier"):
        assert text in page


@isolated
def test_a_training_that_fails_has_its_page_too(tmp_path: Path) -> None:
    class Fails(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, *others: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                raise ValueError("the <callback> failed")

    with pytest.raises(ValueError, match="failed"):
        training(tmp_path, callbacks=[Fails()])
    assert "ValueError: the &lt;callback&gt; failed" in (tmp_path / "xla-report.html").read_text()
    last = json.loads((tmp_path / "xla-events.jsonl").read_text().splitlines()[-1])
    assert (last["event"], last["steps"]["steps"]) == ("end", 2)


@isolated
def test_without_pygal_the_page_has_its_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from xla_adapters.insight import run_report

    monkeypatch.setattr(run_report, "find_spec", lambda name: None)
    training(tmp_path)
    page = (tmp_path / "xla-report.html").read_text()
    assert "<svg" not in page
    assert "pip install &#34;xla-adapters[report]&#34;" in page
    assert "Where the time went" in page


@isolated
def test_a_recompile_is_in_the_report(tmp_path: Path) -> None:
    run = training(tmp_path, data=vector_samples(4 * STEPS - 2), stock={"num_train_epochs": 2, "max_steps": -1})
    report = run.trainer.xla_report()
    assert len(report.compiles) == run.counts.compiles == 2
    assert "(4, 4) float32 -> (2, 4) float32" in str(report)
    assert report.rates["mfu"] is None
    assert report.programs[0].replays > 0


def test_the_option_is_checked() -> None:
    with pytest.raises(ConfigError, match="xla_report='yes' is not a valid value"):
        hf_trainer.Trainer(Classifier(), xla_report="yes")
