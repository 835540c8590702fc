"""The programs that time steps: small settings, their targets, what they compare."""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import compile_time, harness, host_overhead, models, report, runs, timed_loops
from benchmarks.harness import Plan, Timing, run_interleaved
from benchmarks.sizes import FAMILIES, VIT, Classified, Size, sizes
from benchmarks.timed_loops import CPU, INDUCTOR, INLINED, LAZY, OPENXLA, STEP
from benchmarks.timed_trainers import HF_REPLAYED, HF_STOCK, HF_TRACED, LIGHTNING_REPLAYED, MODES
from tests.isolation import isolated

_SMALL = ["--warmup", "5", "--steps", "2", "--rounds", "2"]
_needs_jax = pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="jax is not installed")


def _document(path: Path) -> Any:
    return json.loads(path.read_text())


def _timing(ms: float, **options: Any) -> Timing:
    return Timing(ms, ms, ms, [(ms, ms, ms)], 1.0, 1.0, 2.0, **{"compiles": 1, "executions": 1.0, **options})


# ---- turns ---------------------------------------------------------------------------------------


def _player(log: Path, name: str, turns: int) -> Callable[[Callable[[], None]], str]:
    def play(pause: Callable[[], None]) -> str:
        for number in range(turns):
            with log.open("a") as stream:
                stream.write(f"{name}{number} ")
            pause()
        return name

    return play


def test_runs_take_turns_forth_and_back(tmp_path: Path) -> None:
    log = tmp_path / "log"
    runs = {name: _player(log, name, 3) for name in "ab"}
    outcomes = run_interleaved(runs, 2, timeout=240, say=lambda line: None)
    assert log.read_text().split() == ["b0", "a0", "a1", "b1", "b2", "a2"]
    assert {name: outcome.value for name, outcome in outcomes.items()} == {"a": "a", "b": "b"}


def test_a_run_that_fails_or_hangs_leaves_the_others_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging, now = tmp_path / "hanging", 0.0

    def hangs(pause: Callable[[], None]) -> None:
        while True:
            hanging.touch()
            time.sleep(0.05)

    def monotonic() -> float:
        """Time passes only while one hangs."""
        nonlocal now
        if hanging.exists():
            hanging.unlink()
            now += 1000
        return now

    def fails(pause: Callable[[], None]) -> None:
        pause()
        raise ValueError("no")

    runs = {
        "fails": fails,
        "hangs": hangs,
        "works": _player(tmp_path / "log", "w", 2),
    }
    monkeypatch.setattr(harness, "time", SimpleNamespace(monotonic=monotonic))
    outcomes = run_interleaved(runs, 1, timeout=240, say=lambda line: None)
    assert outcomes["fails"].short_error == "ValueError: no"
    assert "still running" in str(outcomes["hangs"].error)
    assert outcomes["works"].value == "w"


# ---- what is compared ----------------------------------------------------------------------------


@pytest.mark.long
@_needs_jax
def test_jax_trains_the_same_model() -> None:
    size, plan = Size(2, 16, length=8, batch=2, dropout=0.0), Plan(warmup=5, steps=2, rounds=1)
    both = {name: functools.partial(runs.run, name, size, plan) for name in (runs.JAX, STEP)}
    outcomes = run_interleaved(both, plan.rounds, timeout=200, say=print)
    jax, ours = (outcome.value for outcome in outcomes.values())
    assert len(jax.losses) == plan.total
    assert jax.losses == pytest.approx(ours.losses, abs=2e-5)
    assert jax.losses[-1] != pytest.approx(jax.losses[0], abs=1e-3)


class _Image(nn.Module):
    """Classifies images; says so in each pass, if asked to."""

    def __init__(self, *, loud: bool) -> None:
        super().__init__()
        self.loud = loud
        self.linear = nn.Linear(3 * 8 * 8, 10)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        if self.loud:
            print(pixels.shape)
        return self.linear(pixels.flatten(1))


@isolated
@pytest.mark.parametrize("loud", [False, True])
def test_image_models_are_replayed_or_said_not_to_be(loud: bool) -> None:
    plan = Plan(warmup=5, steps=2, rounds=1)
    batches = Size(1, 8, batch=2, family=VIT, classes=10, pixels=8).batches(plan.total)
    run = functools.partial(timed_loops.run, STEP, lambda: Classified(_Image(loud=loud)), batches, plan, lambda: None)
    if loud:
        with pytest.raises(RuntimeError, match=r"replayed 0 times only: .* it uses print"):
            run()
    else:
        assert run().executions == 1


def test_what_is_not_installed_is_left_out_and_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    size = Size(12, 32)
    found = runs.measure([host_overhead.PINNED[-1]], size, Plan(), 1)
    assert "xla-adapters[bench]" in found.failed["JAX on 1 core"]
    made = report.Report("host_overhead")
    host_overhead.add_targets(made, size, found)
    assert made.targets
    assert not any(target.met for target in made.targets)
    row = runs.measure(models.RUNS, models.MODELS["ResNet-18"], Plan(), 1)
    assert set(row.failed) == set(models.RUNS)
    assert "xla-adapters[bench]" in models.table_of({"ResNet-18": row}, 8)


# ---- targets -------------------------------------------------------------------------------------


def test_host_overhead_targets_come_from_the_runs() -> None:
    pinned = {name: _timing(10.0) for name in host_overhead.PINNED}
    timings = {HF_STOCK: _timing(300.0), HF_REPLAYED: _timing(16.0), "JAX": _timing(1.0), **pinned}
    timings |= {name: _timing(19.0 + number) for number, name in enumerate(OPENXLA)}
    made = report.Report("host_overhead")
    host_overhead.add_targets(made, Size(12, 32), runs.Found(timings))
    values = {target.name.removeprefix("12x32 "): (target.value, target.met) for target in made.targets}
    assert values["HF replayed: host CPU to HF stock"] == (pytest.approx(16 / 300), True)
    assert values["HF replayed: wall to HF stock"] == (pytest.approx(16 / 300), True)
    assert values["HF replayed: process CPU to JAX, on 1 core"] == (1.0, True)
    assert values["HF replayed: process CPU to the best openxla"] == (pytest.approx(16 / 19), False)
    assert values["HF replayed: executions per step"] == (1.0, True)
    assert values[f"{LIGHTNING_REPLAYED}: compiles"] == (None, False)


def test_models_targets_come_from_the_runs() -> None:
    model = "GPT-2"
    timings = {STEP: _timing(10.0), LAZY: _timing(20.0), CPU: _timing(5.0), OPENXLA[0]: _timing(9.0)}
    found = runs.Found(timings, {INDUCTOR: "crashed"})
    made = report.Report("models")
    models.add_targets(made, model, found, (STEP, LAZY, CPU, OPENXLA[0], INDUCTOR))
    assert [(target.value, target.met) for target in made.targets] == [(2.0, True), (0.9, False)]
    table = models.table_of({model: found}, 3)
    assert "crashed" in table
    assert table.splitlines()[2].split()[1:10] == ["300", "150", "333.3", "600", "-", "2", "0.9", "0.5", "-"]


@pytest.mark.parametrize(
    ("losses", "executions", "met"),
    [
        ([4.0, 2.0, 1.0, 0.5], 1.0, [True] * 5),
        ([4.0, 2.0, 1.0, 0.6], 1.0, [True, True, False, True, True]),
        ([4.0, 2.1, 1.0, 0.5], 3.0, [True, False, False, True, False]),
        ([4.0, 2.0, math.nan, 0.5], 1.0, [True, True, False, True, False]),
    ],
)
def test_a_run_with_dynamo_must_be_the_same_step(losses: list[float], executions: float, met: list[bool]) -> None:
    model = "GPT-2"
    ours = [4.0, 2.0, 1.0, 0.5]
    # Rounding has grown in the last step.
    found = runs.Found({STEP: _timing(1.0, losses=ours), CPU: _timing(1.0, losses=[4.0, 2.0, 1.0, 0.4])})
    found.timings[INLINED] = _timing(2.0, losses=losses, executions=executions)
    made = report.Report("models")
    models.add_targets(made, model, found, (STEP, INLINED, CPU), dropout=False)
    assert [target.met for target in made.targets] == met
    table = models.table_with_dynamo({model: found}, 3)
    assert table.splitlines()[2].split()[1:5] == ["1", f"{executions:g}", "1,500", "3,000"]
    missed = report.Report("models")
    models.add_targets(missed, model, runs.Found({}), (STEP, INLINED, CPU), dropout=False)
    assert [target.met for target in missed.targets] == [False] * 5


@isolated
def test_without_dropout_nothing_is_dropped() -> None:
    size = Size(1, 16, length=4, batch=1, family="bert")
    (batch,) = size.batches(1)
    kept, dropped = (replace(size, dropout=dropout).model().train() for dropout in (0.0, 0.1))
    assert kept(**batch).loss == kept(**batch).loss
    assert dropped(**batch).loss != dropped(**batch).loss


def test_sizes_say_what_they_do_not_understand() -> None:
    assert [(size.layers, size.width, size.batch) for size in sizes("2x128, 12x32", batch=3)] == [
        (2, 128, 3),
        (12, 32, 3),
    ]
    with pytest.raises(ValueError, match="'12' is not LAYERSxWIDTH"):
        sizes("2x128,12")
    with pytest.raises(ValueError, match="no family is called 'alpaca'"):
        sizes("alpaca 2x128")
    assert [str(size) for size in sizes("llama 2x128,2x16")] == ["llama 2x128", "2x16"]


# ---- the programs --------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_host_overhead_times_every_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "h.json"
    # Three steps are recorded, and five of those behind wait for each other.
    small = ["--depths", "1x16", "--length", "8", "--batch", "2", "--warmup", "10", "--steps", "5", "--rounds", "1"]
    assert host_overhead.main([*small, "--json", str(path)]) == 0
    document = _document(path)
    found = document["results"]["models"]["1x16"]
    left_out = {name for name in host_overhead.RUNS if runs.missing(name, Size(2, 16)) is not None}
    assert set(found["failed"]) == left_out
    assert set(found["timings"]) == set(host_overhead.RUNS) - left_out
    losses = {name: timing["losses"] for name, timing in found["timings"].items()}
    assert all(len(values) in (1, 15) for values in losses.values())
    for name in (HF_TRACED, HF_REPLAYED, LIGHTNING_REPLAYED, STEP):
        assert (found["timings"][name]["compiles"], found["timings"][name]["executions"]) == (1, 1), name
    assert all(timing["compiles_while_timed"] in (0, None) for timing in found["timings"].values())
    assert "JAX on 1 core" in capsys.readouterr().out


@pytest.mark.long
def test_models_times_runs(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    names = [STEP, INLINED, LAZY, OPENXLA[0], CPU]
    command = ["--runs", ",".join(names), "--models", "GPT-2", "--length", "8", "--batch", "1", "--json", str(path)]
    assert models.main([*_SMALL, *command]) == 0
    found = _document(path)["results"]["models"]["GPT-2"]
    assert found["failed"] == {}
    assert set(found["timings"]) == set(names)
    # Dropout draws other numbers in each.
    means = [sum(timing["losses"]) / len(timing["losses"]) for timing in found["timings"].values()]
    assert means == pytest.approx([means[0]] * len(means), rel=0.05)


def test_compile_time_by_depth() -> None:
    made = report.Report("compile_time", settings={})
    found = {
        Size(layers, 32): {name: [replace(_timing(1.0), first_step_cpu_seconds=seconds)]}
        for name, layers, seconds in ((HF_REPLAYED, 12, 10.0), (HF_REPLAYED, 48, 25.0))
    }
    compile_time.add_growth(made, {**found, Size(48, 64): found[Size(48, 32)]})
    (target,) = made.targets
    assert (target.name, target.value, target.met) == ("HF replayed: CPU of the first step, 48x32 to 12x32", 2.5, False)


def test_compile_time_of_other_families() -> None:
    made = report.Report("compile_time", settings={})
    found = {
        Size(layers, 32, family=family): {HF_REPLAYED: [replace(_timing(1.0), first_step_cpu_seconds=seconds)]}
        for family, layers, seconds in (("llama", 12, 10.0), ("llama", 48, 15.0), ("bert", 48, 30.0))
    }
    compile_time.add_growth(made, found)
    (target,) = made.targets
    title = "HF replayed: CPU of the first step, llama 48x32 to llama 12x32"
    assert (target.name, target.value, target.met) == (title, 1.5, True)


def test_jax_has_no_other_families(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert runs.missing("JAX on 1 core", Size(12, 32)) is None
    assert "JAX's model is gpt2" in str(runs.missing("JAX on 1 core", Size(12, 32, family="llama")))


@isolated
@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_as_deep_and_wide_as_is_said(family: str) -> None:
    size = Size(4, 16, length=8, batch=2, heads=8, dropout=0.0, family=family)
    model: Any = size.model()
    assert (model.config.num_hidden_layers, model.config.hidden_size) == (4, 16)
    assert model.config.num_attention_heads == size.heads
    again = dict(size.model().named_parameters())
    assert all(torch.equal(again[name], value) for name, value in model.named_parameters())


@pytest.mark.long
def test_compile_time_and_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, chosen = tmp_path / "o.json", ["--runs", f"{HF_TRACED},{HF_REPLAYED}", "--depths", "1x16", "--repeats", "1"]
    assert compile_time.main([*_SMALL, *chosen, "--length", "8", "--json", str(path)]) == 0
    targets = {target["name"]: target["value"] for target in _document(path)["targets"]}
    assert targets["1x16 HF replayed: peak of the run to HF traced"] == pytest.approx(1, rel=0.3)
    assert targets["1x16 HF replayed: graphs compiled"] == 1
    assert "steps MB" in capsys.readouterr().out
    for timing in (values[0] for values in _document(path)["results"]["1x16"].values()):
        assert 0 < timing["compile_seconds"] < timing["first_step_seconds"] <= timing["warmup_seconds"]


@pytest.mark.long
def test_host_overhead_times_every_mode(tmp_path: Path) -> None:
    path, names = tmp_path / "m.json", [*MODES, HF_STOCK, CPU]
    size = ["--depths", "llama 1x16", "--length", "8", "--batch", "2", "--vocabulary", "64", "--dropout", "0"]
    assert host_overhead.main([*_SMALL, *size, "--runs", ",".join(names), "--json", str(path)]) == 0
    found = _document(path)["results"]["models"]["llama 1x16"]
    assert found["failed"] == {}
    assert set(found["timings"]) == set(names)
    for name in ("HF lazy", "HF eager+compile", HF_STOCK):
        assert found["timings"][name]["compiles_while_timed"] == 0, name


def test_modes_have_targets() -> None:
    names = ("HF eager", "HF lazy", "HF eager+compile")
    found = runs.Found(dict(zip(names, map(_timing, (4.0, 1.0, 2.0)), strict=True)))
    made = report.Report("host_overhead")
    host_overhead.add_targets(made, Size(2, 128, family="llama"), found, names)
    assert [(target.value, target.met) for target in made.targets] == [(2.0, False), (None, False), (0.5, True)]
