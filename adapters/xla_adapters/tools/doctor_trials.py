"""The short tests of `doctor`: each tries a feature, and says what it found."""

from __future__ import annotations

import copy
import importlib
import json
import os
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from importlib.metadata import entry_points
from pathlib import Path

import torch

from xla_adapters.checkpoint import CheckpointStore
from xla_adapters.config import XLAConfig
from xla_adapters.errors import TensorReadError
from xla_adapters.insight.counters import count
from xla_adapters.replay.compiled_step import CompiledStep
from xla_adapters.runtime import get_runtime, initialize
from xla_adapters.sharding import distribute_module
from xla_adapters.tools.user_script import GROUP
from xla_adapters.tracing.step import step


def _model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    initialize()
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4).to(get_runtime().device.torch_device())
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def _update(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def _batches(number: int) -> list[torch.Tensor]:
    return list(torch.arange(16.0 * number).reshape(number, 2, 8) / 100)


def devices() -> str:
    """The devices of this process."""
    initialize()
    device = get_runtime().device
    return json.dumps({"hardware": device.hardware(), "devices": device.count()})


def eager_operation() -> str:
    """An operation outside of a step is executed at once."""
    initialize()
    with count() as counted:
        result = (torch.ones(3).to(get_runtime().device.torch_device()) + 1).tolist()
    assert result == [2.0, 2.0, 2.0], f"1 + 1 is {result}"
    assert counted.eager_ops >= 1, "the operation was not executed by itself"
    return "1 + 1 = 2"


def compiled_step() -> str:
    """Three calls of a step are one compile and three executions, with the results of the plain CPU."""
    model, optimizer = _model()
    plain = torch.nn.Linear(8, 4)
    plain.load_state_dict({name: value.cpu() for name, value in model.state_dict().items()})
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    with count() as counted:
        for batch in _batches(3):
            with step():
                loss = _update(model, optimizer, batch.to(get_runtime().device.torch_device()))
    for batch in _batches(3):
        expected = _update(plain, plain_optimizer, batch)
    found = (counted.compiles, counted.executions)
    assert found == (1, 3), f"3 steps took {found[0]} compiles and {found[1]} executions instead of 1 and 3"
    assert torch.allclose(loss.cpu(), expected, rtol=1e-2), f"the loss is {loss.item()}, on the CPU {expected.item()}"
    return "1 compile, 1 execution per step"


def replay() -> str:
    """A step that was traced twice is replayed, with the same results."""
    losses = []
    # This package is no user code, so it is not analysed: the step is promised to be safe.
    for config in (XLAConfig(step_replay=True), XLAConfig(step_replay=False)):
        model, optimizer = _model()
        compiled = CompiledStep(lambda batch: _update(model, optimizer, batch), config=config)  # noqa: B023
        losses.append([compiled(batch).item() for batch in _batches(6)])
        if config.step_replay is not False:
            replays, reasons = compiled.replays, compiled.reasons
    assert replays, f"no call was replayed: {'; '.join(reasons) or 'nobody knows why'}"
    assert losses[0] == losses[1], f"replayed {losses[0]}, traced {losses[1]}"
    return f"{replays} of 6 calls replayed, results equal to the last bit"


def read_in_a_step() -> str:
    """A read inside a step raises an error with its line, and the step is undone."""
    model, optimizer = _model()
    before = {name: value.cpu().clone() for name, value in model.state_dict().items()}
    line = 0
    try:
        with step():
            loss = _update(model, optimizer, _batches(1)[0].to(get_runtime().device.torch_device()))
            loss.item()
    except TensorReadError as error:
        line = error.lineno or -1
    assert line, "the read raised no error"
    changed = [name for name, value in model.state_dict().items() if not torch.equal(value.cpu(), before[name])]
    assert not changed, f"the step was not undone: {', '.join(changed)} changed"
    return "TensorReadError, nothing changed"


def checkpoints() -> str:
    """A checkpoint is committed, verified, and holds what was saved."""
    model, _ = _model()
    state = {name: value.cpu() for name, value in model.state_dict().items()}
    with tempfile.TemporaryDirectory() as folder:
        store = CheckpointStore(folder)
        store.save(3, lambda path: torch.save(state, path / "model.pt"))
        newest = store.newest_valid()
        assert newest is not None, "the checkpoint that was saved is not valid"
        loaded = torch.load(Path(folder, newest.name, "model.pt"), weights_only=True)
    assert all(torch.equal(loaded[name], value) for name, value in state.items()), "other values were loaded"
    return "saved, verified, loaded"


def several_devices() -> str:
    """A step that is split over all devices has the results of the plain CPU."""
    # Other devices do not read it.
    os.environ["CPU_NUM_DEVICES"] = "2"
    initialize(spmd=True)
    number = get_runtime().device.count()
    if number == 1:
        raise Skipped("there is one device")
    torch.manual_seed(0)
    plain, batch = torch.nn.Linear(8, 4), torch.ones(2 * number, 8)
    model = distribute_module(copy.deepcopy(plain), partition_fn="dp")
    losses = []
    for module, inputs in ((plain, batch), (model, batch.to(get_runtime().device.torch_device()))):
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        for _ in range(2):
            with nullcontext() if module is plain else step():
                loss = _update(module, optimizer, inputs)
        losses.append(loss.item())
    assert abs(losses[0] - losses[1]) <= 1e-2 * abs(losses[0]), f"the loss is {losses[1]}, on the CPU {losses[0]}"
    return f"{number} devices, data parallel"


def adapters() -> str:
    """The adapters whose frameworks are installed can be imported."""
    found = []
    for package in dict.fromkeys(entry.value.partition(".")[0] for entry in entry_points(group=GROUP)):
        try:
            importlib.import_module(package)
        except ImportError as error:
            # Each adapter says which of its packages is missing.
            found.append(f"{package} no ({error})")
        else:
            found.append(f"{package} yes")
    return "; ".join(found) or "none is installed"


class Skipped(Exception):
    """The feature cannot be tried here; the message says why."""


TRIALS: dict[str, Callable[[], str]] = {
    "devices": devices,
    "eager operation": eager_operation,
    "compiled step": compiled_step,
    "read inside a step": read_in_a_step,
    "replay": replay,
    "checkpoint": checkpoints,
    "several devices": several_devices,
    "adapters": adapters,
}
