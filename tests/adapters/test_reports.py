"""What both trainers tell of a run: where its time goes, its transfers, files and profiles."""

from __future__ import annotations

import json
import linecache
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_strategy.checkpoints import XLAEagerCheckpointIO
from tests.device import DEVICE
from tests.insight import time_of_stalls
from tests.trainers import Moment, each_trainer, train, training
from xla_adapters import XLAConfig, get_runtime
from xla_adapters.errors import ConfigError

pytestmark = pytest.mark.isolated

STEPS = 8
STALL = 100.0


@each_trainer
@pytest.mark.parametrize(
    ("at", "where"),
    [
        ("load", "input wait"),
        ("step begin", "callbacks"),
        ("step end", "callbacks"),
        ("save", "saves"),
        ("evaluation", "evaluation"),
    ],
)
def test_a_stall_is_attributed(kind: str, at: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stalls: list[int] = []

    def stall(moment: Moment) -> None:
        if not stalls and moment.step in (4, STEPS):
            stalls.append(moment.step)
            time_of_stalls.pass_by(STALL)

    time_of_stalls.use_it(monkeypatch)
    options: dict[str, Any] = {"evaluation": {"evaluate_every": STEPS}, "saves": {"save_every": STEPS}}.get(where, {})
    if (kind, at) == ("lightning", "save"):
        # The moment of the harness is a callback there.
        at, stock = "", XLAEagerCheckpointIO.save_checkpoint

        def slow(*args: Any, **kwargs: Any) -> None:
            stalls.append(STEPS)
            time_of_stalls.pass_by(STALL)
            stock(*args, **kwargs)

        monkeypatch.setattr(XLAEagerCheckpointIO, "save_checkpoint", slow)
    report = train(kind, tmp_path, steps=STEPS, at={at: stall} if at else {}, **options).report
    assert len(stalls) == 1
    assert sum(report.wall.values()) == pytest.approx(STALL)
    compiled = sum(event.seconds for event in report.compiles)
    expected = dict.fromkeys(report.wall, 0.0) | {where: STALL, "compile": compiled}
    # The clock of the test stands still while XLA compiles, in steps of the training and of the evaluation.
    for event in report.compiles:
        expected["steps" if event.step == "train_step" else "evaluation"] -= event.seconds
    assert report.wall == pytest.approx(expected)
    assert compiled > 0
    assert kind == "hf" or report.steps["steps"] == STEPS


@each_trainer
def test_transfers_have_their_lines(kind: str) -> None:
    def upload(moment: Moment) -> None:
        torch.ones(3).to(DEVICE)  # the line that uploads

    def read(moment: Moment) -> None:
        next(moment.model.parameters()).detach().cpu()  # the line that reads

    report = train(kind, steps=STEPS, at={"step begin": upload, "step end": read}).report
    for call, direction, size, mark in (
        (".cpu()", "to the host", 8 * 4 * 4, "# the line that reads\n"),
        ("to", "to the device", 12, "# the line that uploads\n"),
    ):
        (found,) = [item for item in report.transfers if item.call == call and "trainers.py" not in item.line]
        file, _, number = found.line.rpartition(":")
        assert file == __file__
        assert linecache.getline(file, int(number)).endswith(mark)
        assert (found.direction, found.is_sampled) == (direction, True)
        assert 1 <= found.count <= STEPS
        assert found.bytes == found.count * size
    assert "# the line" not in str(report)
    assert f"{__file__}:" in str(report)
    if kind == "hf":
        # It reads the loss for its logs.
        logs = [item for item in report.transfers if item.call == "the trainer"]
        assert sum(item.count for item in logs) >= STEPS
        assert not any(item.is_sampled for item in logs)


@each_trainer
def test_the_parts_are_all_of_the_time(kind: str) -> None:
    run = train(kind, evaluate_every=4)
    report = run.report
    if kind == "hf":
        assert run.trainer.state.log_history[-1]["train_runtime"] <= report.wall_seconds
    assert report.wall_seconds <= run.counts.wall_seconds
    assert report.wall["compile"] == pytest.approx(sum(event.seconds for event in report.compiles))
    assert all(seconds > 0 for name, seconds in report.wall.items() if name != "saves")


@each_trainer
def test_recording_executes_and_transfers_nothing(kind: str, tmp_path: Path) -> None:
    # The first training of a process compiles, and does other things once.
    train(kind, tmp_path / "first", xla_report=False, evaluate_every=4)
    off, on = (train(kind, tmp_path / str(way), xla_report=way, evaluate_every=4) for way in (False, True))
    assert on.losses == off.losses
    for name in ("compiles", "executions", "eager_ops", "transfers_to_host", "transfers_to_device"):
        assert getattr(on.counts, name) == getattr(off.counts, name), name
    assert on.counts.executions == STEPS + 2 * 2
    assert not list(tmp_path.glob("False/xla-*"))
    assert off.report.wall_seconds == 0
    assert on.report.rates["mfu"] is None


@each_trainer
def test_a_training_that_fails_has_its_page_too(kind: str, tmp_path: Path) -> None:
    def fail(moment: Moment) -> None:
        if moment.step == 3:
            raise ValueError("the <callback> failed")

    stock: dict[str, Any] = {} if kind == "hf" else {"logger": CSVLogger(tmp_path)}
    run = training(kind, tmp_path, at={"step end": fail}, stock=stock)
    with pytest.raises(ValueError, match="failed"):
        run.run()
    folder = tmp_path if kind == "hf" else Path(run.trainer.log_dir)
    assert "ValueError: the &lt;callback&gt; failed" in (folder / "xla-report.html").read_text()
    last = json.loads((folder / "xla-events.jsonl").read_text().splitlines()[-1])
    assert last["event"] == "end"
    assert kind == "lightning" or last["steps"]["steps"] == 2
    assert run.report.about["ended by"] == "ValueError: the <callback> failed"


@each_trainer
def test_the_option_is_checked(kind: str) -> None:
    with pytest.raises(ConfigError, match="xla_report='yes' is not a valid value"):
        train(kind, xla_report="yes")


# ---- profiles ----------------------------------------------------------------------------------------


def _sizes(folder: Path) -> list[int]:
    return [path.stat().st_size for path in (folder / "xla-profile").rglob("*") if path.is_file()]


@each_trainer
def test_a_profile_lies_in_the_folder_of_the_run(kind: str, tmp_path: Path) -> None:
    run = train(kind, tmp_path, config=XLAConfig(profile_steps=(3, 6)))
    run.assert_one_graph()
    assert len(_sizes(tmp_path)) == 2
    assert all(_sizes(tmp_path))


@each_trainer
@pytest.mark.parametrize("place", ["forward", "step end"])
def test_an_error_among_profiled_steps_leaves_no_open_profile(kind: str, place: str, tmp_path: Path) -> None:
    def fail(moment: Moment) -> None:
        if moment.step == 4:
            raise KeyError("by the user")

    with pytest.raises(KeyError, match="by the user"):
        train(kind, tmp_path, config=XLAConfig(profile_steps=(3, 6)), at={place: fail})
    assert len(_sizes(tmp_path)) == 2
    device = get_runtime().device
    assert device.start_profile(str(tmp_path / "next"))
    device.stop_profile()


@each_trainer
def test_what_the_last_step_leaves_comes_to_the_host_in_the_training(kind: str) -> None:
    """A failed check of a model, say, though nothing is logged or saved after it. What may get lost costs no copy."""
    transfers, received = get_runtime().transfers, []

    def leave(moment: Moment) -> None:
        number = torch.full((), float(moment.step)).to(DEVICE)
        if moment.step in (1, 4):
            transfers.piggy_back([number], lambda copies: received.append(copies[0].item()), must_arrive=must_arrive)

    stock = {"logging_strategy": "no"} if kind == "hf" else {"logger": False}
    for must_arrive in (False, True):
        received.clear()
        train(kind, steps=4, at={"step end": leave}, stock=stock)
        assert (4.0 in received) == must_arrive
