"""Operators that torch_xla computes on the host or wrongly: in the step's graph, with the CPU's numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch_xla.debug.metrics as metrics
from torch.nn import functional

import xla_adapters
from tests.isolation import isolated
from tests.runtime.further_calls import FURTHER
from tests.runtime.operator_calls import GROUPS, IMAGE, Call
from xla_adapters import XLAConfig


def _on_the_host() -> list[str]:
    return [name for name in metrics.counter_names() if name.startswith("aten::")]


@isolated
@pytest.mark.parametrize("group", [*GROUPS, *FURTHER])
def test_values_and_gradients_in_one_graph(group: str) -> None:
    shape, calls = {**GROUPS, **FURTHER}[group]
    xla_adapters.initialize()
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    weights = torch.randn(10_000, generator=torch.Generator().manual_seed(1))
    metrics.clear_counters()
    expected, found = {}, {}
    inputs = {name: values.to("xla").requires_grad_() for name in calls}
    weights_there = weights.to("xla")
    with xla_adapters.count() as counters, xla_adapters.step():
        for name, call in calls.items():
            result = call(inputs[name])
            (result * weights_there[: result.numel()].reshape(result.shape)).sum().backward()
            found[name] = result.detach()
    assert (counters.compiles, counters.executions, counters.transfers_to_host) == (1, 1, 0)
    assert _on_the_host() == []
    for name, call in calls.items():
        plain = values.clone().requires_grad_()
        expected[name] = call(plain)
        (expected[name] * weights[: expected[name].numel()].reshape(expected[name].shape)).sum().backward()
        for what, actual, wanted in (
            ("value", found[name], expected[name]),
            ("gradient", inputs[name].grad, plain.grad),
        ):
            assert actual is not None
            torch.testing.assert_close(
                actual.cpu(), wanted, rtol=1e-4, atol=1e-5, msg=lambda text, at=f"{name}, {what}": f"{at}: {text}"
            )


@isolated
def test_special_values() -> None:
    """Poles, infinities, NaN and signed zeros."""
    xla_adapters.initialize()
    values = torch.tensor([0.0, -0.0, 1.0, 2.0, -1.0, -2.5, 0.5, 1e-20, 30.0, 1e30, float("inf"), float("nan")])
    others = torch.tensor([-1.0, 1.0, -0.0, 0.0, float("nan"), 1.0, 2.0, 3.0, float("inf"), 1.0, 1.0, 1.0])
    on_device, others_there = values.to("xla"), others.to("xla")
    for call in (
        lambda x, y: torch.lgamma(x),
        lambda x, y: torch.digamma(x),
        lambda x, y: torch.fmax(x, y),
        lambda x, y: torch.fmin(x, y),
        lambda x, y: torch.copysign(x, y),
        lambda x, y: torch.heaviside(x, y),
        lambda x, y: torch.hypot(x, y),
        lambda x, y: torch.signbit(x) * 1.0,
        lambda x, y: torch.special.log_ndtr(-x.clamp(max=1e3)),
        lambda x, y: x.clamp(-1, 2),
        lambda x, y: torch.clamp_max(x, 2),
        lambda x, y: x.cummin(0)[0],
        lambda x, y: x.cummax(0)[1] * 1.0,
        lambda x, y: x.median(0)[0] + x.nanmedian(0)[1],
        lambda x, y: x.angle(),
    ):
        with xla_adapters.step():
            found = call(on_device, others_there)
        torch.testing.assert_close(found.cpu(), call(values, others), rtol=5e-5, atol=1e-6, equal_nan=True)


@isolated
def test_isin_takes_one_of_two_from_the_host() -> None:
    xla_adapters.initialize()
    elements, others = torch.arange(6).reshape(2, 3), torch.tensor([1, 4, 9])
    for x, y in ((elements.to("xla"), others.to("xla")), (elements, others.to("xla")), (elements.to("xla"), others)):
        for invert in (False, True):
            with xla_adapters.step():
                found = torch.isin(x, y, invert=invert)
            assert found.cpu().tolist() == torch.isin(elements, others, invert=invert).tolist()


@isolated
def test_outside_of_autograd() -> None:
    xla_adapters.initialize()
    values = torch.randn(IMAGE)
    for context in (torch.no_grad(), torch.enable_grad()):
        with context, xla_adapters.step():
            found = functional.interpolate(values.to("xla"), (7, 4))
        assert torch.equal(found.detach().cpu(), functional.interpolate(values, (7, 4)))


_WHOLE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "//": lambda x, y: x // y,
    "// a number": lambda x, y: x // -3,
    "a number //": lambda x, y: 100 // y,
    "in place": lambda x, y: x.clone().floor_divide_(y),
    "trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "floor": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "32 bits": lambda x, y: x.int() // y.int(),
    "8 bits": lambda x, y: x.to(torch.uint8) // 3,
    "floating point": lambda x, y: x.float() // y,
    "floating point // a number": lambda x, y: (x % 1000).float() // 3,
    "a number // floating point": lambda x, y: torch.floor_divide(100, y.float()),
    "whole // a fraction": lambda x, y: (x % 1000) // 2.5,
    "floor of floating point": lambda x, y: torch.div((x % 1000).float(), 3, rounding_mode="floor"),
    "trunc of half precision": lambda x, y: torch.div((x % 100).bfloat16(), 3, rounding_mode="trunc"),
    ">>": lambda x, y: x >> y.abs(),
    ">> a number": lambda x, y: x >> 2,
    ">>=": lambda x, y: x.clone().__irshift__(1),
}


@isolated
def test_numbers_are_divided_and_shifted_exactly() -> None:
    xla_adapters.initialize()
    generator = torch.Generator().manual_seed(0)
    small = torch.arange(-9, 9)
    large = torch.randint(-(2**62), 2**62, (40,), generator=generator)
    x = torch.cat([small, large, torch.tensor([2**24 + 1, 2**53 + 1])])
    y = torch.randint(1, 60, x.shape, generator=generator) * torch.tensor([-1, 1]).repeat(len(x) // 2)
    x_there, y_there = x.to("xla"), y.to("xla")
    for name, call in _WHOLE.items():
        with xla_adapters.step():
            found = call(x_there, y_there)
        expected = call(x, y)
        assert found.dtype is expected.dtype, name
        assert found.tolist() == expected.tolist(), name


# ---- what stays on the host ----------------------------------------------------------------------------------------


@isolated
@pytest.mark.parametrize("ready", [False, True])
def test_an_operator_on_the_host_is_named(ready: bool) -> None:
    """Also if its input is there, so that no graph would be split."""
    xla_adapters.initialize()
    values = torch.randn(4, 4, device="xla")
    total = torch.zeros((), device="xla")
    with pytest.raises(xla_adapters.HostOperatorError, match="linalg_eig") as caught:
        with xla_adapters.step(config=XLAConfig(on_graph_break="error")):
            total += 1
            torch.linalg.eigvals(values if ready else values * 2)
    if not ready:
        assert caught.value.filename == __file__
    assert total.item() == 0


@isolated
def test_in_the_backward_too() -> None:
    xla_adapters.initialize()
    values = torch.randn(2, 3, 8, 8, device="xla", requires_grad=True)
    with pytest.raises(xla_adapters.HostOperatorError, match="fractional_max_pool2d"):
        with xla_adapters.step(config=XLAConfig(on_graph_break="error")):
            functional.fractional_max_pool2d(values * 2, 2, output_size=3).sum().backward()


@isolated
def test_a_warning_goes_on() -> None:
    xla_adapters.initialize()
    values = torch.randn(4, 4)
    with (
        pytest.warns(xla_adapters.errors.GraphBreakWarning, match="mode"),
        xla_adapters.step(config=XLAConfig(on_graph_break="warn")),
    ):
        found = (values.to("xla") * 2).round().mode(0).values
    assert found.tolist() == (values * 2).round().mode(0).values.tolist()


# ---- dtypes --------------------------------------------------------------------------------------------------------


@isolated
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int64], ids=str)
def test_other_dtypes_are_as_precise_as_on_the_cpu(dtype: torch.dtype) -> None:
    xla_adapters.initialize()
    values = (torch.rand(6, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 5 + 1).to(dtype)
    calls: list[Call] = [torch.lgamma, torch.digamma, torch.special.i0, torch.exp2]
    if dtype.is_floating_point:
        calls += [
            lambda x: functional.interpolate(x[None, None], (7, 5), mode="bicubic"),
            lambda x: functional.avg_pool2d(x[None], 3, 2, 1, True, True),
            lambda x: functional.embedding_bag(torch.arange(6, device=x.device).reshape(2, 3), x),
        ]
    for call in calls:
        with xla_adapters.step():
            found = call(values.to("xla"))
        # A float64 of the special functions has the precision of their coefficients.
        torch.testing.assert_close(found.cpu(), call(values), rtol=1e-2 if dtype is torch.bfloat16 else 2e-6, atol=1e-6)


@isolated
def test_gradients_of_bags_scaled_by_frequency() -> None:
    """By hand: torch 2.9's kernel for the CPU divides by the frequency of another index where one occurs twice."""
    xla_adapters.initialize()
    weight = torch.ones(5, 1, device="xla").requires_grad_()
    indices, offsets = torch.tensor([0, 2, 2, 2, 4], device="xla"), torch.tensor([0, 2], device="xla")
    with xla_adapters.step():
        functional.embedding_bag(indices, weight, offsets, scale_grad_by_freq=True, mode="sum").sum().backward()
    assert weight.grad is not None
    assert weight.grad.flatten().tolist() == pytest.approx([1, 0, 1, 0, 1])
