"""What torch_xla's device is told as it starts, and what it tells: memory, TPUs, replaced functions."""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from lightning.pytorch.accelerators import XLAAccelerator
from torch import Tensor, nn
from torch.func import linearize
from torch.utils._pytree import tree_map
from torch_xla._internal import tpu

import xla_adapters
from tests.device import DEVICE
from tests.isolation import isolated
from tests.support import update
from xla_adapters import CompiledStep, get_runtime
from xla_adapters.tracing.compile_events import CompileEvent

# ---- the memory that an executable needs, by kind -------------------------------------------------


_FLOAT = 4
# What torch_xla writes is rounded to millionths of a GiB.
_ROUNDED = 1100


def _compiled() -> list[CompileEvent]:
    model = nn.Linear(256, 512).to("xla")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @CompiledStep
    def train_step(inputs: torch.Tensor) -> None:
        update((model(inputs).exp().t() @ model(inputs).sin()).sum(), optimizer)

    for size in (64, 64, 64, 32):
        train_step(torch.randn(size, 256))
    return train_step.events


@isolated
def test_memory_by_kind() -> None:
    xla_adapters.initialize()
    events = _compiled()
    assert len(events) == 2
    for event, size in zip(events, (64, 32), strict=True):
        memory, graph = event.memory, event.graph
        assert memory is not None
        assert graph is not None
        weights = (256 * 512 + 512) * _FLOAT
        assert abs(memory.inputs - weights - size * 256 * _FLOAT) < _ROUNDED
        assert abs(memory.outputs - graph.output_bytes) < _ROUNDED
        assert abs(memory.aliased - weights) < _ROUNDED
        # At least the two results of the exponential and the sine are there at once.
        assert memory.temporaries > 2 * size * 512 * _FLOAT
        assert memory.total == memory.inputs + memory.outputs - memory.aliased + memory.temporaries + memory.code


@isolated
def test_who_looks_at_what_torch_xla_writes_gets_it() -> None:
    os.environ["PT_XLA_DEBUG_FILE"] = os.devnull
    xla_adapters.initialize()
    assert [event.memory for event in _compiled()] == [None, None]
    assert os.environ["PT_XLA_DEBUG_FILE"] == os.devnull
    assert "PT_XLA_DEBUG_LEVEL" not in os.environ


@isolated
def test_what_a_process_inherits_is_not_the_users() -> None:
    os.environ["PT_XLA_DEBUG_FILE"], os.environ["PT_XLA_DEBUG_LEVEL"] = "/proc/1/fd/77", "1"
    xla_adapters.initialize()
    assert all(event.memory is not None for event in _compiled())


# ---- Lightning counts the TPUs of a host when a Trainer is made -----------------------------------


@isolated
def test_a_host_without_chips_has_no_tpus_and_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tpu, "num_available_chips", lambda: 0)
    # As after `import jax`.
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.delenv("TPU_ACCELERATOR_TYPE", raising=False)
    XLAAccelerator.auto_device_count.cache_clear()
    with pytest.raises(TypeError):
        XLAAccelerator.auto_device_count()
    get_runtime().device.initialize()
    assert XLAAccelerator.auto_device_count() == 0
    monkeypatch.setattr(tpu, "num_available_chips", lambda: 4)
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v4-8")
    assert tpu.num_available_devices() == 4


# ---- torch.func.linearize -------------------------------------------------------------------------


def _linearized(device: str, scope: Any) -> Any:
    factor, one, other = (t.to(device) for t in torch.arange(1.0, 10).view(3, 3).split(1))

    def function(one: Tensor, other: Tensor) -> dict[str, Any]:
        return {"product": (factor * one * other).sin(), "pair": (one * 3,)}

    with scope:
        value, tangent_of = linearize(function, one, other)
        tangents = [tangent_of(one, factor), tangent_of(factor, one * 2)]
    return tree_map(lambda tensor: tensor.cpu(), (value, tangents))


@isolated
def test_in_and_outside_of_steps() -> None:
    expected = _linearized("cpu", nullcontext())
    with xla_adapters.eager():
        for scope in (nullcontext(), xla_adapters.step()):
            torch.testing.assert_close(_linearized(DEVICE, scope), expected)


@isolated
def test_tangents_of_another_shape_are_refused_by_torch() -> None:
    xla_adapters.initialize()
    _, tangent_of = linearize(torch.sin, torch.ones(2, device=DEVICE))
    with pytest.raises(RuntimeError, match="doesn't match the shape"):
        tangent_of(torch.ones(3, device=DEVICE))


# ---- backward passes ------------------------------------------------------------------------------


@isolated
def test_a_backward_pass_before_the_runtime_starts_breaks_no_later_one() -> None:
    """In this thread and others, by `backward` and `grad`; a training on the host came before."""

    def gradient(device: str, found: list[Tensor]) -> None:
        value = torch.ones(2, device=device, requires_grad=True)
        (value * 2).sum().backward()
        (again,) = torch.autograd.grad((value * 3).sum(), value)
        assert value.grad is not None
        found.append((value.grad + again).cpu())

    found: list[Tensor] = []
    gradient("cpu", found)
    xla_adapters.initialize()
    gradient(DEVICE, found)
    thread = threading.Thread(target=gradient, args=(DEVICE, found))
    thread.start()
    thread.join()
    assert [tensor.tolist() for tensor in found] == [[5, 5]] * 3


# ---- modules that are moved -----------------------------------------------------------------------


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(12, 8)
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(self.embedding(ids)))  # type: ignore[no-any-return]


def _losses(device: str, *, before: bool, held: bool = False) -> list[float]:
    model = _Tied()
    reference = weakref.ref(model.embedding.weight) if held else None
    optimizer: Any = torch.optim.AdamW(model.parameters(), 0.05) if before else None
    model.to(device)
    assert model.head.weight is model.embedding.weight
    assert reference is None or reference() is not None or device != "cpu"
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), 0.05)
    ids = torch.arange(12).to(device)

    def train(ids: torch.Tensor) -> torch.Tensor:
        return update(nn.functional.cross_entropy(model(ids), ids.flip(0)), optimizer)

    run = train if device == "cpu" else CompiledStep(train)
    return [float(run(ids)) for _ in range(5)]


@isolated
@pytest.mark.parametrize("before", [False, True], ids=["optimizer after", "optimizer before"])
def test_it_trains_as_on_the_host(before: bool) -> None:
    xla_adapters.initialize()
    assert _losses("xla", before=before) == pytest.approx(_losses("cpu", before=before), abs=1e-5)


@isolated
def test_parameters_are_the_same_objects() -> None:
    xla_adapters.initialize()
    model = _Tied()
    calls: list[int] = []
    weight = model.embedding.weight
    weight.factor = 3  # type: ignore[attr-defined]
    weight.register_hook(lambda gradient: calls.append(1))
    names = dict(model.named_parameters())
    model(torch.arange(12)).sum().backward()
    gradient = weight.grad
    assert gradient is not None
    moved = model.to("xla")
    assert moved is model
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == {
        name: id(parameter) for name, parameter in names.items()
    }
    assert weight.device.type == "xla"
    assert weight.requires_grad
    assert weight.factor == 3  # type: ignore[attr-defined]
    assert weight.grad is not None
    assert torch.equal(weight.grad.cpu(), gradient)
    calls.clear()
    model(torch.arange(12, device="xla")).sum().backward()
    assert calls


@isolated
def test_tied_weights_stay_tied_where_the_object_cannot_be_kept() -> None:
    xla_adapters.initialize()
    assert _losses("xla", before=False, held=True) == pytest.approx(_losses("cpu", before=False), abs=1e-5)


@isolated
def test_back_and_in_other_dtypes() -> None:
    xla_adapters.initialize()
    model = _Tied()
    model.register_buffer("first", torch.ones(2))
    model.inner.register_buffer("second", model.first)
    model.to("xla").to("cpu")
    assert model.head.weight is model.embedding.weight
    assert model.inner.second is model.first
    model.to("xla", torch.bfloat16).float()
    assert model.head.weight is model.embedding.weight
    assert model.inner.second is model.first
    assert model.head.weight.dtype == torch.float32
    assert model.to("meta").head.weight is model.embedding.weight


@isolated
def test_a_module_that_is_made_and_moved_in_a_step() -> None:
    xla_adapters.initialize()
    model = nn.Sequential(nn.Linear(3, 3).to("xla"))
    for _ in range(2):
        with xla_adapters.step():
            model[0] = nn.Linear(3, 2).to("xla")
            model[0].weight.data.fill_(2.0)
            result = model(torch.ones(2, 3, device="xla")).sum() - 2 * model[0].bias.sum()
            result.backward()
        assert result.item() == pytest.approx(24.0, abs=1e-5)
        assert torch.equal(model[0].weight.grad.cpu(), torch.full((2, 3), 2.0))
