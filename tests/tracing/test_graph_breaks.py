"""Everything that would split the graph of a step, under error, warn and allow."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import xla_adapters
from tests.device import DEVICE, ON_TORCH_TPU
from tests.support import Loop, unchanged
from xla_adapters import (
    CheckpointSaveError,
    CollectiveReadError,
    DeviceSyncError,
    GraphBreakError,
    GraphBreakWarning,
    ProfilerScopeError,
    TensorReadError,
)

pytestmark = pytest.mark.isolated

if not ON_TORCH_TPU:
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.debug.profiler as xp

Action = Callable[[torch.Tensor], Any]

# Each takes a tensor of three elements, (1, 2, 0) times something, computed in the step.
READS: dict[str, Action] = {
    "item": lambda t: t.sum().item(),
    "cpu": lambda t: t.cpu(),
    "tolist": lambda t: t.tolist(),
    "print": lambda t: print(t),
    "repr": lambda t: repr(t),
    "f-string": lambda t: f"{t.sum():.1f}",
    "bool": lambda t: bool(t.sum()),
    "if": lambda t: 1 if t.sum() > 0 else 2,
    "and": lambda t: t.sum() > 0 and True,
    "float": lambda t: float(t.sum()),
    "int": lambda t: int(t.sum()),
    "complex": lambda t: complex(t.sum()),
    "index": lambda t: [0, 1, 2, 3, 4, 5, 6][t.sum().int()],
    "in": lambda t: 2.0 in t,
    "to str": lambda t: t.to("cpu"),
    "to keyword": lambda t: t.to(device="cpu"),
    "to device": lambda t: t.to(torch.device("cpu")),
    "to indexed": lambda t: t.to("cpu:0"),
    "to dtype too": lambda t: t.to("cpu", torch.float64, non_blocking=True),
    "to other": lambda t: t.to(torch.zeros(1)),
    "type": lambda t: t.type(torch.FloatTensor),
    "type str": lambda t: t.type("torch.FloatTensor"),
    "copy_": lambda t: torch.zeros(3).copy_(t),
    "equal": lambda t: torch.equal(t, t),
    "allclose": lambda t: t.allclose(t),
    "pickle": lambda t: len(pickle.dumps(t)) > 0,
}
if not ON_TORCH_TPU:
    READS["all_gather, read"] = lambda t: xm.all_gather(t).cpu() if t.device.type == DEVICE else t
# torch itself refuses these on any device but the CPU; inside a step the error says more.
REFUSED_BY_TORCH: dict[str, Action] = {
    "numpy": lambda t: t.detach().numpy(),
    "asarray": lambda t: np.asarray(t.detach()),
    "array": lambda t: np.array(t.detach()),
}
# safetensors refuses tensors on XLA devices, in a step or not; who saves with it has to call `.cpu()` first.
SAVES: dict[str, Action] = {
    "torch.save": lambda t: torch.save({"t": t}, io.BytesIO()),
}
SYNCS: dict[str, Action] = {}
COLLECTIVES: dict[str, Action] = {}
if ON_TORCH_TPU:
    SYNCS["synchronize"] = lambda t: torch.accelerator.synchronize()
else:
    SAVES["xm.save"] = lambda t: xm.save({"t": t}, "/dev/null")
    SYNCS["sync"] = lambda t: torch_xla.sync()
    SYNCS["mark_step"] = lambda t: xm.mark_step()
    SYNCS["wait"] = lambda t: xm.wait_device_ops()
    COLLECTIVES["mesh_reduce"] = lambda t: xm.mesh_reduce("tag", t.sum(), np.mean)
DYNAMIC: dict[str, Action] = {
    "nonzero": lambda t: t.nonzero(),
    "torch.nonzero": lambda t: torch.nonzero(t, as_tuple=True),
    "mask": lambda t: t[t > 0],
    "mask in tuple": lambda t: t.view(1, 3)[:, t > 0],
    "set by mask": lambda t: t.clone().__setitem__(t > 0, t[:2]),
    "where": lambda t: torch.where(t > 0),
    "masked_select": lambda t: torch.masked_select(t, t > 0),
    "unique": lambda t: torch.unique(t),
    "unique method": lambda t: t.unique(return_counts=True),
    "unique_consecutive": lambda t: torch.unique_consecutive(t),
    "repeat_interleave": lambda t: torch.repeat_interleave(t, t.abs().long()),
    "bincount": lambda t: torch.bincount(t.abs().long()),
}
HIDDEN: dict[str, Action] = {
    "slice end": lambda t: t[: t.sum().int()],
    "one_hot": lambda t: torch.nn.functional.one_hot(t.abs().long()),
    "nested list": lambda t: torch.tensor([[t.sum(), t.sum()]]),
    "add to host": lambda t: torch.zeros(3).add_(t),
}
ALL: list[tuple[dict[str, Action], type[GraphBreakError]]] = [
    (READS, TensorReadError),
    (REFUSED_BY_TORCH, TensorReadError),
    (SAVES, CheckpointSaveError),
    (SYNCS, DeviceSyncError),
    (COLLECTIVES, CollectiveReadError),
    (DYNAMIC, GraphBreakError),
    (HIDDEN, GraphBreakError),
]
ALL = [(actions, error) for actions, error in ALL if actions]


def fails_rightly(error: GraphBreakError, action: Action, expected: type[GraphBreakError]) -> str:
    """What is wrong with the error, or nothing."""
    message = str(error)
    if type(error) is not expected:
        return f"is a {type(error).__name__}: {message}"
    if (error.filename, error.lineno) != (__file__, action.__code__.co_firstlineno):
        return f"names {error.filename}:{error.lineno}, not line {action.__code__.co_firstlineno}"
    if f"{__file__}:{error.lineno}" not in message:
        return f"does not show its line: {message}"
    return (
        "" if all(part in message for part in ("cost: ", "remedies: (1) ", "; (2) ")) else f"says too little: {message}"
    )


@pytest.mark.parametrize(("actions", "expected"), ALL)
@pytest.mark.parametrize("ready", [False, True])
def test_error(actions: dict[str, Action], expected: type[GraphBreakError], ready: bool) -> None:
    wrong = {}
    with xla_adapters.eager():
        loop = Loop()
        given = torch.tensor([1.0, 2.0, 0.0]).to(DEVICE)
        with xla_adapters.step():
            loop.body()
        for name, action in actions.items():
            if ready and actions is HIDDEN:
                continue  # Then they hide no execution.
            code = action.__code__
            with unchanged(loop.model, loop.optimizer):
                try:
                    with xla_adapters.step():
                        loss = loop.body()
                        action(given if ready else given + loss.detach() * 0)
                    wrong[name] = "raises nothing"
                except GraphBreakError as error:
                    wrong[name] = fails_rightly(error, action, expected)
                    reads_it = ready and expected is TensorReadError and not {"sum", "all_gather"} & set(code.co_names)
                    if reads_it and "computed already" not in str(error):
                        wrong[name] = f"does not say that the value is there: {error}"
        with xla_adapters.count() as counters, xla_adapters.step():
            loop.body()
        assert (counters.compiles, counters.executions) == (0, 1)
    assert not {name: what for name, what in wrong.items() if what}


def same(left: Any, right: Any) -> bool:
    if isinstance(left, (tuple, list)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, torch.Tensor):
        return torch.equal(left.cpu(), right.cpu())
    return bool(left == right)


@pytest.mark.parametrize("actions", [READS, SAVES, SYNCS, DYNAMIC])
def test_warn_reads_right_flushes_once_and_says_so_once(actions: dict[str, Action]) -> None:
    wrong = {}
    with xla_adapters.eager():
        loop = Loop(torch.optim.SGD)
        given = torch.tensor([1.0, 2.0, 0.0])
        on_device = given.to(DEVICE)
        config = xla_adapters.XLAConfig(on_graph_break="warn")
        for name, action in actions.items():
            results = []
            for run in range(3):
                with warnings.catch_warnings(record=True) as caught, xla_adapters.count() as counters:
                    warnings.simplefilter("always")
                    with xla_adapters.step(config=config):
                        hidden = loop.forward() * 0 + on_device
                        results.append(action(hidden.detach()))
                        loop.optimizer.zero_grad()
                said = [warning for warning in caught if issubclass(warning.category, GraphBreakWarning)]
                if len(said) != (run == 0):
                    wrong[name] = f"run {run}: said {[str(warning.message) for warning in said]}"
                # Before the read, and at the end what came after it, if anything. The forward is one graph of its own.
                limit = 4 if actions is DYNAMIC else 2
                if run == 2 and not 1 <= counters.executions <= limit:
                    wrong[name] = f"{counters.executions} executions"
            if actions in (READS, DYNAMIC) and name not in ("print", "repr"):
                plain = action(given)
                if not all(same(plain, result) for result in results):
                    wrong[name] = f"{results} instead of {plain}"
    assert not wrong


def test_warn_does_not_compute_the_forward_twice() -> None:
    """The read executes forward and nothing else; the rest of the step takes the results from there."""
    with xla_adapters.eager():
        losses = {}
        for mode in ("error", "warn", "allow"):
            loop = Loop()
            for step in range(3):
                with warnings.catch_warnings(record=True) as caught, xla_adapters.count() as counters:
                    warnings.simplefilter("always")
                    with xla_adapters.step(on_graph_break=mode, seed=xla_adapters.StepSeed(seed=0, step=step)):
                        loss = loop.forward()
                        value = loss.item() if mode != "error" else None
                        loss.backward()
                        loop.optimizer.step()
                        loop.optimizer.zero_grad()
                losses.setdefault(mode, []).append(loss.item())
                assert value in (None, losses[mode][-1])
                said = [warning for warning in caught if issubclass(warning.category, GraphBreakWarning)]
                assert len(said) == (mode == "warn" and step == 0)
                assert counters.executions == (1 if mode == "error" else 2)
                assert counters.transfers_to_host == (0 if mode == "error" else 1)
                assert counters.eager_ops == 0
            assert counters.compiles == 0
        assert losses["warn"] == losses["allow"]
        assert losses["error"] == pytest.approx(losses["warn"], abs=1e-6)


def test_what_is_no_break() -> None:
    with xla_adapters.eager():
        loop = Loop()
        on_host, ready = torch.ones(3), torch.ones(3).to(DEVICE)
        seen: list[Any] = []
        with xla_adapters.count() as counters, xla_adapters.step():
            loss = loop.body()
            seen.extend([on_host.sum().item(), on_host.tolist(), f"{on_host}", bool(on_host[0]), on_host.cpu()])
            seen.extend(
                [
                    loss.shape,
                    loss.dtype,
                    loss.device,
                    copy.deepcopy(loss.detach()),
                    loss.to(DEVICE),
                    loss.to(torch.float64),
                ]
            )
            reader = threading.Thread(target=lambda: seen.append(ready.cpu()))
            reader.start()
            reader.join()
        assert (counters.compiles, counters.executions, counters.eager_ops) == (1, 1, 0)
        assert torch.equal(seen[-1], torch.ones(3))


def test_profiler_scopes() -> None:
    def opened_inside() -> None:
        with xla_adapters.step():
            loop.body()
            xp.Trace("inside").__enter__()

    def closed_inside() -> None:
        outer = xp.Trace("outside")
        outer.__enter__()
        with xla_adapters.step():
            loop.body()
            outer.__exit__(None, None, None)

    def step_trace_inside() -> None:
        with xla_adapters.step(), xp.StepTrace("step trace"):
            loop.body()

    with xla_adapters.eager():
        loop = Loop()
        for _ in range(2):
            with xp.StepTrace("around"), xp.Trace("around too"), xla_adapters.count() as counters:
                with xla_adapters.step(), xp.Trace("wholly inside"):
                    loop.body()
        # A scope is part of the graph's name only; but the two steps of a StepTrace are one graph.
        assert (counters.compiles, counters.executions) == (0, 1)
        for wrong, name in ((opened_inside, "inside"), (closed_inside, "outside"), (step_trace_inside, "StepTrace")):
            with unchanged(loop.model, loop.optimizer), pytest.raises(ProfilerScopeError, match=name) as caught:
                wrong()
            assert caught.value.filename == __file__
            lines, first = inspect.getsourcelines(wrong)
            assert first <= (caught.value.lineno or 0) < first + len(lines)


def test_a_search_for_nan_is_named() -> None:
    xla_adapters.initialize()
    weight = torch.ones(3, device=DEVICE, requires_grad=True)
    with (
        pytest.raises(GraphBreakError, match=r"(?s)set_detect_anomaly, by which.*check_nan=False"),
        torch.autograd.set_detect_anomaly(True),
        xla_adapters.step(),
    ):
        weight.square().sum().backward()
    with torch.autograd.set_detect_anomaly(True, check_nan=False), xla_adapters.step():
        weight.square().sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [2.0] * 3


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_a_learning_rate_on_the_device_is_named(optimizer: Any) -> None:
    xla_adapters.initialize()
    weight = torch.ones(3, device=DEVICE, requires_grad=True)
    updates = optimizer([weight], lr=torch.tensor(0.1).to(DEVICE), foreach=False)
    with pytest.raises(GraphBreakError, match=r"(?s)a learning rate that is a tensor.*lr=0.1"), xla_adapters.step():
        weight.square().sum().backward()
        updates.step()


def test_a_step_in_inference_mode() -> None:
    xla_adapters.initialize()
    model = torch.nn.Linear(3, 1).to(DEVICE)
    step = xla_adapters.CompiledStep(lambda values: model(values).sum())
    with torch.inference_mode():
        found = [step(torch.full((2, 3), float(number))).item() for number in range(4)]
    expected = [model(torch.full((2, 3), float(number), device=DEVICE)).sum().item() for number in range(4)]
    assert found == pytest.approx(expected)
