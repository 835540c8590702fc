"""`profile_steps`: which calls are in the profile, and that none stays open."""

from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import xla_adapters
from tests.isolation import isolated
from xla_adapters import CompiledStep, ConfigError, XLAConfig


def _profiles(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.xplane.pb"))


def _executions(folder: Path) -> int:
    """How many executions of a step's graph the profile shows."""
    (path,) = folder.rglob("*.trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return sum(event.get("name") == "PjRtComputationClient::ExecuteComputation" for event in events)


def _spans(folder: Path) -> list[tuple[str, float, float]]:
    """The spans that are named in the profile by us, in order: name, begin and end in microseconds."""
    (path,) = folder.rglob("*.trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = {"forward", "backward", "optimizer", "replay", "data and other code between steps"}
    found = [
        (event["name"], event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("name") in names or str(event.get("name")).startswith("train ")
    ]
    return sorted(found, key=lambda span: span[1:])


def _is_recording(folder: Path) -> bool:
    """Whether the process records a profile; the folder is for one that it tries to record."""
    device = xla_adapters.get_runtime().device
    if not device.start_profile(str(folder)):
        return True
    xla_adapters.get_runtime().device.stop_profile()
    return False


def _compiled(config: XLAConfig) -> Any:
    xla_adapters.initialize()
    # Its self-test executes graphs.
    assert xla_adapters.get_runtime().replay_works
    model = nn.Linear(4, 2).to("xla")

    def train(batch: torch.Tensor) -> torch.Tensor:
        loss = model(batch).square().mean()
        loss.backward()
        model.zero_grad()
        return loss.detach()

    return CompiledStep(train, config=config)


@isolated
def test_replayed_steps_are_in_the_profile_and_stay_one_execution(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    step = _compiled(XLAConfig(profile_steps=(5, 7)))
    batch = torch.randn(3, 4).to("xla")
    with caplog.at_level(logging.INFO, "xla_adapters"):
        for number in range(1, 10):
            with xla_adapters.count() as counted:
                step(batch)
            assert counted.executions == 1
            assert bool(_profiles(tmp_path)) == (number >= 7)
    assert step.replays >= 5
    assert len(_profiles(tmp_path / "xla-profile")) == 1
    assert _profiles(tmp_path)[0].stat().st_size > 0
    assert _executions(tmp_path) == 3
    told = [record.getMessage() for record in caplog.records if "profile" in record.getMessage()]
    assert len(told) == 1
    assert f"steps 5 to 7 is in {tmp_path / 'xla-profile'}" in told[0]


@isolated
def test_the_profile_names_phases(tmp_path: Path) -> None:
    xla_adapters.initialize()
    assert xla_adapters.get_runtime().replay_works
    model = nn.Linear(4, 2).to("xla")
    updates = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(batch: torch.Tensor) -> None:
        model(batch).square().mean().backward()
        updates.step()
        updates.zero_grad()

    between = "data and other code between steps"
    for first, phases in ((2, ["forward", "backward", "optimizer"]), (6, ["replay"])):
        folder = tmp_path / str(first)
        step = CompiledStep(train, config=XLAConfig(profile_steps=(first, first + 1), profile_folder=str(folder)))
        compiles = []
        for _ in range(8):
            with xla_adapters.count() as counted:
                # Of the first call in this process only.
                step(torch.randn(3, 4).to("xla"))
            compiles.append(counted.compiles)
        assert compiles[1:] == [0] * 7, "the profile changes no graph"
        spans = _spans(folder)
        steps = [span for span in spans if span[0].startswith("train ")]
        assert [name for name, *_ in steps] == [f"train {first}", f"train {first + 1}"]
        inside = [span[0] for span in spans if steps[0][1] <= span[1] and span[2] <= steps[0][2]]
        assert [name for name in inside if name in phases] == phases
        assert any(name == between and steps[0][2] <= begin and end <= steps[1][1] for name, begin, end in spans)
        if phases == ["replay"]:
            assert {name for name, *_ in spans} == {"replay", between, *(name for name, *_ in steps)}


@isolated
def test_an_error_ends_the_profile_and_keeps_it(tmp_path: Path) -> None:
    xla_adapters.initialize()
    weight = torch.ones(3, device="xla")
    with xla_adapters.eager():
        with pytest.raises(KeyError):
            for number in range(1, 9):
                with xla_adapters.step(profile_steps=(2, 6), profile_folder=str(tmp_path)):
                    weight.mul_(2)
                    if number == 4:
                        raise KeyError
        assert weight.tolist() == [8, 8, 8]
    assert len(_profiles(tmp_path)) == 1
    assert _executions(tmp_path) == 2
    assert not _is_recording(tmp_path / "other")


@isolated
def test_steps_of_a_loop_count_and_inner_ones_do_not(tmp_path: Path) -> None:
    xla_adapters.initialize()
    weight = torch.ones(3, device="xla")
    options: dict[str, Any] = {"profile_steps": (2, 2), "profile_folder": str(tmp_path)}
    for number in range(3):
        with xla_adapters.step(**options), xla_adapters.step(name="inner", **options):
            weight.mul_(2)
        assert len(_profiles(tmp_path)) == (number >= 1)
    assert _executions(tmp_path) == 1


@isolated
def test_a_profile_of_the_users_own_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    step = _compiled(XLAConfig(profile_steps=(1, 1), profile_folder=str(tmp_path / "ours")))
    device = xla_adapters.get_runtime().device
    assert device.start_profile(str(tmp_path / "own"))
    step(torch.randn(3, 4).to("xla"))
    assert "has no effect, since a profile is being recorded already" in caplog.text
    device.stop_profile()
    assert len(_profiles(tmp_path / "own")) == 1
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("steps", [(0, 3), (4, 3), (1,), 5, (1.0, 2), (True, 2), "12"])
def test_wrong_steps_are_refused(steps: Any) -> None:
    with pytest.raises(ConfigError, match=r"profile_steps=.*the first step and the last"):
        XLAConfig(profile_steps=steps)


def test_what_would_have_no_effect_is_refused() -> None:
    with pytest.raises(ConfigError, match="without profile_steps"):
        XLAConfig(profile_folder="here")
    with pytest.raises(ConfigError, match="needs xla_mode='eager\\+compile'"):
        XLAConfig(profile_steps=(1, 2), xla_mode="lazy")


def test_the_folder_of_the_run() -> None:
    assert XLAConfig.from_dict({"profile_steps": [1, 2]}).of_run("out").profile_folder == "out/xla-profile"
    assert XLAConfig(profile_steps=(1, 2), profile_folder="here").of_run("out").profile_folder == "here"
    assert XLAConfig().of_run("out") == XLAConfig()


def test_a_run_with_a_profile_may_resume_one_without() -> None:
    assert XLAConfig(profile_steps=(1, 2)).of_numbers() == XLAConfig().of_numbers()
