"""A step that is run many times explains each compile."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
import torch

import xla_adapters
from tests.device import DEVICE
from tests.isolation import isolated
from xla_adapters import GraphLimitError, StepProgram, XLAConfig


class Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelno, record.getMessage()))


@isolated
def test_each_new_graph_is_explained_once() -> None:
    records = Records()
    logger = logging.getLogger("xla_adapters")
    logger.addHandler(records)
    logger.setLevel(logging.INFO)
    program = StepProgram("train", XLAConfig())
    weight = torch.ones(4).to(DEVICE)
    with xla_adapters.eager():
        for phase, rows, dtype, fact in (
            ("update", 2, torch.float32, 1),
            ("update", 2, torch.float32, 1),
            ("update", 3, torch.float32, 1),
            ("update", 3, torch.bfloat16, 1),
            ("accumulate", 2, torch.float32, 2),
            ("update", 2, torch.float32, 1),
        ):
            batch = {"x": torch.ones(rows, 4, dtype=dtype)}
            program.open(inputs=batch, phase=phase, facts={"frozen": fact})
            result = (batch["x"].to(DEVICE) * weight).sum()
            result = result.sin() if phase == "accumulate" else result
            program.close()
            assert torch.isfinite(result).item()
    assert [event.number for event in program.events] == [1, 2, 3, 4]
    assert program.calls == 6
    assert program.graphs == 4
    said = [(level, text) for level, text in records.lines if text.startswith("train: ")]
    assert [level for level, _ in said] == [logging.INFO, logging.WARNING, logging.WARNING, logging.INFO]
    texts = [text for _, text in said]
    assert "first call of the phase 'update'" in texts[0]
    assert "x: (2, 4) float32 -> (3, 4) float32" in texts[1]
    assert "x: (3, 4) float32 -> (3, 4) bfloat16" in texts[2]
    assert "first call of the phase 'accumulate'" in texts[3]


@isolated
def test_a_change_the_batch_does_not_show_is_said_to_be_one() -> None:
    program = StepProgram("train", XLAConfig())
    weight = torch.ones(4).to(DEVICE)
    with xla_adapters.eager():
        for power in (2, 3):
            program.open(inputs={"x": weight})
            result = weight**power
            program.close()
            assert result.sum().item() == 4
    assert "a Python number that is a part of the graph changed, in pow: 2 -> 3" in program.events[1].reason
    assert f"{__file__}:" in program.events[1].reason


@isolated
def test_max_graphs_refuses_the_next_one_and_undoes_the_step() -> None:
    program = StepProgram("train", XLAConfig(max_graphs=1))
    weight = torch.ones(4).to(DEVICE)
    with xla_adapters.eager():
        for _ in range(2):
            program.open()
            weight.mul_(torch.full((4,), 2.0).to(DEVICE))
            program.close()
        with xla_adapters.count() as counters:
            program.open()
            weight.mul_(torch.full((1,), 2.0).to(DEVICE))
            with pytest.raises(GraphLimitError, match="max_graphs=1"):
                program.close()
        assert counters.compiles == counters.executions == 0
        assert weight.tolist() == [4.0] * 4
        program.open()
        weight.mul_(torch.full((4,), 2.0).to(DEVICE))
        program.close()
        assert weight.tolist() == [8.0] * 4


@isolated
def test_max_graphs_counts_graphs_and_not_passes() -> None:
    with xla_adapters.eager():
        model = torch.nn.Linear(4, 2).to(DEVICE)
        optimizer = torch.optim.AdamW(model.parameters())
        batch = torch.ones(3, 4).to(DEVICE)
        for _ in range(4):
            with xla_adapters.step(max_graphs=1, name="train"):
                model(batch).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        for rows in (3, 4):
            inputs = torch.ones(rows, 4).to(DEVICE)
            for _ in range(2):
                with xla_adapters.step(max_graphs=2, name="predict"), torch.no_grad():
                    result = model(inputs)
                assert result.shape == (rows, 2)
        wide = torch.ones(5, 4).to(DEVICE)
        with pytest.raises(GraphLimitError), xla_adapters.step(max_graphs=2, name="predict"), torch.no_grad():
            result = model(wide).sum()


def test_a_decorated_step_imports_no_runtime() -> None:
    """The import of torch_xla reads the environment, which a program may set after its modules are imported."""
    program = (
        "import sys\nimport xla_adapters\n"
        "@xla_adapters.CompiledStep\ndef step(x):\n    return x\n"
        "assert 'torch_xla' not in sys.modules"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
