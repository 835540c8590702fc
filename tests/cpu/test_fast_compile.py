"""Steps that are compiled in blocks, after `initialize(fast_compile=True)`: the same training, one graph, donated."""

from __future__ import annotations

import functools
import importlib
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import xla_adapters
from tests.isolation import isolated, run_in_child
from xla_adapters import CompiledStep, XLAConfig, get_runtime
from xla_adapters.cpu.graph_passes.outlining import Outlined

LAYERS, STEPS = 6, 10


class _Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 16))
            for _ in range(LAYERS)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return hidden


def _trained(fast: bool | str, options: dict[str, Any] | None = None, steps: int = STEPS) -> dict[str, Any]:
    xla_adapters.initialize(fast_compile=fast)  # type: ignore[arg-type]
    torch.manual_seed(0)
    get_runtime().random.set_seed(0)
    model = _Deep().to("xla")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def body(batch: torch.Tensor) -> torch.Tensor:
        loss = (model(batch) - 1).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step = CompiledStep(body, config=XLAConfig(**(options or {})))
    batches = [torch.randn(4, 16).to("xla") for _ in range(steps)]
    assert get_runtime().replay_works
    with xla_adapters.count() as counters:
        losses = [step(batch) for batch in batches]
    return {
        "losses": torch.stack(losses).tolist(),
        "weights": {name: value.detach().cpu() for name, value in model.named_parameters()},
        "moments": [state["exp_avg_sq"].cpu() for state in optimizer.state.values()],
        "compiles": counters.compiles,
        "executions": counters.executions,
        "replays": step.program.replays,
        "in blocks": len(get_runtime().executables._calls),  # type: ignore[attr-defined]
    }


def _assert_alike(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert other["losses"] == pytest.approx(one["losses"], rel=1e-4)
    for name, value in one["weights"].items():
        torch.testing.assert_close(other["weights"][name], value, rtol=1e-3, atol=1e-4, msg=name)
    for value, moment in zip(one["moments"], other["moments"], strict=True):
        torch.testing.assert_close(moment, value, rtol=1e-2, atol=1e-6)


def _make_torch_xla_forget() -> None:
    """Compiles more than it keeps (`XLA_COMPILATION_CACHE_SIZE`)."""
    get_runtime().tracing.set_eager(True)
    for size in range(3, 20):
        torch.ones(size, device="xla").tanh().cpu()


@pytest.mark.parametrize("how", [True, "blocks"])
def test_the_same_training_in_one_graph(how: bool | str) -> None:
    usual, fast = (run_in_child(functools.partial(_trained, fast)) for fast in (False, how))
    assert (usual["in blocks"], fast["in blocks"]) == (0, 1)
    for name in ("compiles", "executions", "replays"):
        assert fast[name] == usual[name]
    assert (fast["compiles"], fast["executions"], fast["replays"]) == (1, STEPS, STEPS - 2)
    _assert_alike(usual, fast)


def test_what_is_compiled_holds_the_calls(tmp_path: Path) -> None:
    """XLA puts calls in line unless it is told not to, by an attribute that it documents nowhere."""
    env = {"XLA_FLAGS": f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text"}
    run_in_child(functools.partial(_trained, True), env=env)
    texts = [file.read_text() for file in tmp_path.glob("*after_optimizations.txt")]
    (compiled,) = (text for text in texts if "to_apply=%outlined" in text)
    entry = compiled[compiled.index("ENTRY") :]
    assert len(re.findall(r" call\(.*to_apply=%outlined\.", entry)) >= 2 * (LAYERS - 1)
    assert entry.count(" fusion(") < compiled.count(" fusion(") / 2
    # Results take the place of the state.
    assert "input_output_alias=" in compiled.partition("\n")[0]


def test_what_is_traced_each_time_runs_the_same_executable() -> None:
    traced, replayed = (
        run_in_child(functools.partial(_trained, True, {"step_replay": replay})) for replay in (False, True)
    )
    assert (traced["replays"], traced["in blocks"]) == (0, 0)
    assert replayed["replays"] >= STEPS - 2
    _assert_alike(traced, replayed)


@isolated(env={"XLA_COMPILATION_CACHE_SIZE": "8"})
def test_an_executable_that_was_forgotten_is_compiled_again() -> None:
    found = _trained(True)
    assert found["in blocks"] == 1
    _make_torch_xla_forget()
    again = _trained(True)
    assert again["losses"] == found["losses"]
    assert again["compiles"] >= 1
    for name, value in found["weights"].items():
        assert torch.equal(again["weights"][name], value)


@isolated
def test_what_cannot_be_compiled_in_blocks_is_compiled_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Should XLA ever refuse what was made of a graph."""
    tuning = importlib.import_module("xla_adapters.cpu.tuning")
    proper = tuning.outline

    def broken(graph: bytes) -> Outlined | None:
        found = proper(graph)
        if found is None:
            return None
        # Operations of two operands that had one.
        return Outlined(found.module.replace(b"\x12\x05rsqrt", b"\x12\x05power"), found.functions, found.instructions)

    monkeypatch.setattr(tuning, "outline", broken)
    with pytest.warns(UserWarning, match="taken apart into blocks could not be compiled"):
        found = _trained(True)
    assert found["in blocks"] == 0
    assert found["replays"] == STEPS - 2


@isolated(env={"XLA_COMPILATION_CACHE_SIZE": "8"})
def test_what_cannot_be_compiled_in_blocks_any_more_is_compiled_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _trained(True)
    assert found["in blocks"] == 1
    _make_torch_xla_forget()

    def refuses(*args: object) -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr(get_runtime().executables, "_compile_computation", refuses)
    with pytest.warns(UserWarning, match="no room"):
        again = _trained(True)
    assert again["in blocks"] == 0
    _assert_alike(found, again)


@isolated(env={"CPU_NUM_DEVICES": "2"})
def test_sharded_graphs_are_compiled_as_a_whole(caplog: pytest.LogCaptureFixture) -> None:
    xla_adapters.initialize(spmd=True, fast_compile=True)
    with caplog.at_level(logging.INFO, "xla_adapters"):
        found = _trained(True)
    assert found["in blocks"] == 0
    assert found["replays"] == STEPS - 2
    assert "in blocks" not in caplog.text
