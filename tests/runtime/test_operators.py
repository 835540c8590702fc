"""Operators that torch_xla computes on the host or wrongly: in the step's graph, with the CPU's numbers."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch_xla.debug.metrics as metrics
from torch.nn import functional

import xla_adapters
from tests.device import DEVICE
from tests.isolation import isolated
from tests.runtime.operator_calls import FURTHER, GROUPS, IMAGE, SLICES, Call
from xla_adapters import ConfigError, XLAConfig
from xla_adapters.runtime.torch_xla.device import keep_nan

pytestmark = pytest.mark.isolated


def _on_the_host() -> list[str]:
    return [name for name in metrics.counter_names() if name.startswith("aten::")]


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


def test_isin_takes_one_of_two_from_the_host() -> None:
    xla_adapters.initialize()
    elements, others = torch.arange(6).reshape(2, 3), torch.tensor([1, 4, 9])
    for x, y in ((elements.to("xla"), others.to("xla")), (elements, others.to("xla")), (elements.to("xla"), others)):
        for invert in (False, True):
            with xla_adapters.step():
                found = torch.isin(x, y, invert=invert)
            assert found.cpu().tolist() == torch.isin(elements, others, invert=invert).tolist()


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


def test_in_the_backward_too() -> None:
    xla_adapters.initialize()
    values = torch.randn(2, 3, 8, 8, device="xla", requires_grad=True)
    with pytest.raises(xla_adapters.HostOperatorError, match="fractional_max_pool2d"):
        with xla_adapters.step(config=XLAConfig(on_graph_break="error")):
            functional.fractional_max_pool2d(values * 2, 2, output_size=3).sum().backward()


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


def test_gradients_of_bags_scaled_by_frequency() -> None:
    """By hand: torch 2.9's kernel for the CPU divides by the frequency of another index where one occurs twice."""
    xla_adapters.initialize()
    weight = torch.ones(5, 1, device="xla").requires_grad_()
    indices, offsets = torch.tensor([0, 2, 2, 2, 4], device="xla"), torch.tensor([0, 2], device="xla")
    with xla_adapters.step():
        functional.embedding_bag(indices, weight, offsets, scale_grad_by_freq=True, mode="sum").sum().backward()
    assert weight.grad is not None
    assert weight.grad.flatten().tolist() == pytest.approx([1, 0, 1, 0, 1])


# ---- NaN, infinities, and other numbers that torch_xla gets wrong ---------------------------------


_Call = Callable[[torch.Tensor], torch.Tensor]
_NAN, _INF = math.nan, math.inf
_VALUES = torch.tensor(
    [
        [-1.5, 0.25, _NAN, 2.0, 0.0, -0.5, 7.0, 1.0],
        [0.5, _INF, 1.0, -2.0, 3.0, -4.0, 0.75, 2.5],
        [_NAN, 1.0, -_INF, 0.5, _NAN, 2.0, -1.0, 4.0],
        [1.0, -2.0, 3.0, -4.0, 5.0, -6.0, 7.0, -8.0],
    ]
)
_WITH_GRADIENTS: dict[str, _Call] = {
    "max of dim": lambda x: x.max(1)[0],
    "min of dim": lambda x: x.min(0)[0],
    "adaptive max pool": lambda x: functional.adaptive_max_pool1d(x[None, 1:2], 3),
    "relu": torch.relu,
    "relu6, also at its bounds": lambda x: functional.relu6(x - 1),
    "hardtanh, also at its bounds": functional.hardtanh,
    "hardsigmoid, also at its bounds": functional.hardsigmoid,
    "hardswish": functional.hardswish,
    "threshold": lambda x: functional.threshold(x, 0.1, 5.0),
    "elu": functional.elu,
    "celu": lambda x: functional.celu(x, 0.7),
    "smooth l1": lambda x: functional.smooth_l1_loss(x, torch.zeros_like(x), reduction="none"),
    "log sigmoid": functional.logsigmoid,
    "logsumexp": lambda x: x.logsumexp(1),
    "cummax": lambda x: x.cummax(1)[0],
    "cummin": lambda x: x.cummin(1)[0],
    "clamp": lambda x: x.clamp(min=0),
    "clamp from above": lambda x: x.clamp(max=1),
    "clamp by a tensor": lambda x: x.clamp(min=torch.ones_like(x)),
    "maximum": lambda x: torch.maximum(torch.zeros_like(x), x),
    "softmax": lambda x: x.softmax(1),
    "amax of minus infinities": lambda x: (x[3:] - _INF).amax(1),
    "min of infinities": lambda x: (x[3:] + _INF).min(1)[0],
    "half precision without infinities": lambda x: x.bfloat16().nan_to_num().float() * 1e-30,
}
_VALUES_ONLY: dict[str, _Call] = {
    "amax": lambda x: x.amax(1),
    "amin of all": lambda x: x.amin(),
    "max": lambda x: x.max(),
    "half precision": lambda x: x.bfloat16().amax(0).float(),
    "argmax": lambda x: x.argmax(1),
    "argmin of all": lambda x: x.argmin(),
    "places of max": lambda x: x.max(1, keepdim=True)[1],
    "places of min": lambda x: x.min(0)[1],
    "max pool 1": lambda x: functional.max_pool1d(x[None], 2),
    "max pool 2": lambda x: functional.max_pool2d(x[None, None], 2),
    "max pool 3": lambda x: functional.max_pool3d(x[None, None, None], (1, 2, 2)),
    "softshrink": functional.softshrink,
    "norm": lambda x: x.norm(_INF, 1) + x.norm(-_INF, 1),
    "scatter": lambda x: torch.zeros_like(x).scatter_reduce(0, torch.zeros_like(x).long(), x, "amax"),
    "remainder by infinity": lambda x: torch.remainder(x, _INF) + torch.remainder(x, -_INF),
    "floor of infinity": lambda x: x // 2.5,
    "max of minus infinities": lambda x: torch.full_like(x, -_INF).max(),
    "max of minus infinities along": lambda x: torch.full_like(x, -_INF).max(0)[0],
    "product in place of NaN": lambda x: torch.baddbmm(
        torch.full((1, 8, 8), _NAN, device=x.device), x[None, 3:].mT, x[None, 3:], beta=0
    ),
    "clip": lambda x: functional.normalize(x, dim=1),
}


@pytest.mark.parametrize("in_step", [True, False], ids=["step", "eager"])
def test_not_numbers_are_as_on_the_cpu(in_step: bool) -> None:
    xla_adapters.initialize()
    there = _VALUES.to("xla")
    for name, call in {**_WITH_GRADIENTS, **_VALUES_ONLY}.items():
        found, wanted = [], []
        for start, results in ((there, found), (_VALUES, wanted)):
            x = start.clone().requires_grad_(name in _WITH_GRADIENTS)
            if in_step and start is there:
                with xla_adapters.step():
                    results += _with_gradient(call, x)
            else:
                results += _with_gradient(call, x)
        for actual, expected in zip(found, wanted, strict=True):
            torch.testing.assert_close(
                actual.cpu(), expected, equal_nan=True, msg=lambda text, at=name: f"{at}: {text}"
            )


def _with_gradient(call: _Call, x: torch.Tensor) -> list[torch.Tensor]:
    result = call(x)
    if not x.requires_grad:
        return [result]
    weights = torch.arange(1.0, result.numel() + 1).to(x.device).reshape(result.shape)
    return [result.detach(), *torch.autograd.grad((result * weights).sum(), x)]


def test_the_flag_is_set_unless_it_is_set_already() -> None:
    xla_adapters.initialize()
    assert "--xla_cpu_enable_fast_min_max=false" in os.environ["XLA_FLAGS"].split()
    environment = {"XLA_FLAGS": "--xla_cpu_enable_fast_min_max=true"}
    keep_nan("CPU", started=False, environment=environment)
    keep_nan("CPU", started=True, environment=environment)
    assert environment == {"XLA_FLAGS": "--xla_cpu_enable_fast_min_max=true"}


def test_flags_in_a_file_are_read(tmp_path: Path) -> None:
    """XLA would take what is added after the name for a part of it, and end the process."""
    file = tmp_path / "flags"
    file.write_text("--xla_cpu_enable_fast_math=true\n--xla_backend_optimization_level=1\n")
    environment = {"XLA_FLAGS": f" {file}\n"}
    keep_nan("CPU", started=False, environment=environment)
    assert environment["XLA_FLAGS"].split() == [*file.read_text().split(), "--xla_cpu_enable_fast_min_max=false"]
    for name in ("absent", ""):
        wrong = {"XLA_FLAGS": f"{tmp_path}/{name}"}
        with pytest.raises(ConfigError, match="takes it for the name of a file"):
            keep_nan("CPU", started=False, environment=wrong)


@isolated(env={"XLA_FLAGS": ""})
def test_it_is_said_when_the_flag_comes_too_late() -> None:
    torch.ones(2).to("xla")
    with pytest.warns(UserWarning, match="leave the NaN out"):
        xla_adapters.initialize()


_EXACT: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "remainder": lambda x, y: x % y,
    "remainder by a number": lambda x, y: x % 0.3,
    "remainder of a number": lambda x, y: torch.remainder(7.5, y),
    "small beside the divisor": lambda x, y: (x * 1e-9) % 1.0,
    "floor": lambda x, y: x // y,
    "floor by a number": lambda x, y: x // 0.1,
    "remainder of 8 bits": lambda x, y: (x * 15).to(torch.int8) % 120,
    "remainder of negative ones": lambda x, y: (x * 15).long() % -7,
    "remainder without a sign": lambda x, y: x.abs().to(torch.uint8) % 3,
    "8 bits shifted": lambda x, y: (x * 15).to(torch.int8) >> 1,
    "sums of 8 bits": lambda x, y: (x * 15).to(torch.int8).cumsum(0),
    "sums of truth": lambda x, y: (x > 0).cumsum(0),
    "sums in half precision": lambda x, y: x.bfloat16().cumsum(0),
    "mean of integers": lambda x, y: x.long().mean(dtype=torch.float32),
    "choice of two dtypes": lambda x, y: torch.where(x > 0, x.bfloat16(), y),
    "maximum of two dtypes": lambda x, y: torch.maximum(x.half(), y.bfloat16()),
    "minimum of 8 bits": lambda x, y: torch.minimum((x * 15).to(torch.int8), (y.abs() * 15).to(torch.uint8)),
    "integers between fractions": lambda x, y: x.long().clamp(-1.5, 2.5),
    "truth between integers": lambda x, y: (x > 0).clamp(max=3),
    "integers below fractions": lambda x, y: x.long().clamp(max=y),
    "truth and a number": lambda x, y: ((x > 0) & 3) + ((y > 0) | 6) + ((x > y) ^ 2),
    "arctangent of integers": lambda x, y: torch.atan2(x.long(), y.long()),
    "product with a logarithm": lambda x, y: torch.xlogy(x.long(), 2.5),
    "sign of a number": lambda x, y: torch.copysign(x.long(), -1.0) + torch.copysign(x, -0.0),
    "a number shifted": lambda x, y: 1 << x.abs().int(),
    "steps of a tenth": lambda x, y: torch.arange(0, 1, 0.1, device=x.device),
    "steps down": lambda x, y: torch.arange(1.5, 0, -0.1, device=x.device, dtype=torch.float64),
    "steps from a fraction": lambda x, y: torch.arange(0.1, 3.1, device=x.device),
    "count": lambda x, y: torch.count_nonzero(x > 0) + torch.count_nonzero(x.reshape(2, 12).to(torch.int8), 1),
    "sums of truth that is a number": lambda x, y: (x > 0).nansum(),
    "trace": lambda x, y: torch.einsum("ii", x[:9].reshape(3, 3)),
    "traces": lambda x, y: torch.einsum("...ii", x[:18].reshape(2, 3, 3)),
    "moved by no place": lambda x, y: x[:0].roll(1),
    "medians of nothing": lambda x, y: x[:0].reshape(0, 3).median(1)[0],
    "covariance of integers": lambda x, y: torch.cov(x.reshape(2, 12).long()),
    "logarithm of a determinant": lambda x, y: torch.linalg.slogdet(x[:9].reshape(3, 3))[1],
    "singular values of several": lambda x, y: torch.linalg.svdvals(x[:16].reshape(2, 2, 4)),
    "inverses of several": lambda x, y: torch.linalg.pinv(x[:8].reshape(2, 2, 2)),
}


@pytest.mark.parametrize("in_step", [True, False], ids=["step", "eager"])
def test_exact_numbers_and_dtypes(in_step: bool) -> None:
    xla_adapters.initialize()
    generator = torch.Generator().manual_seed(0)
    x = torch.cat([torch.tensor([1.0, -1.0, 0.0, 6.0]), torch.randn(20, generator=generator) * 4])
    y = torch.cat([torch.tensor([0.1, 0.1, 3.0, -2.0]), torch.randn(20, generator=generator)])
    for name, call in _EXACT.items():
        if in_step:
            with xla_adapters.step():
                found = call(x.to("xla"), y.to("xla"))
        else:
            found = call(x.to("xla"), y.to("xla"))
        torch.testing.assert_close(
            found.cpu(), call(x, y), rtol=1e-4, atol=1e-5, msg=lambda text, at=name: f"{at}: {text}"
        )


def test_what_ends_the_process_in_torch_xla_is_refused() -> None:
    xla_adapters.initialize()
    x = torch.arange(6.0).to("xla")
    for call, error in (
        (lambda: torch.argmax(torch.complex(x, x)), NotImplementedError),
        (lambda: torch.argmin(x[:0]), IndexError),
        (lambda: x[:0].reshape(3, 0).median(1), IndexError),
        (lambda: x.long() >> 1.5, TypeError),
    ):
        with pytest.raises(error):
            call()


@pytest.mark.parametrize("in_step", [True, False], ids=["step", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_class_labels_that_are_no_integers_are_refused(dtype: torch.dtype, in_step: bool) -> None:
    xla_adapters.initialize()
    scores = torch.randn(4, 3, 2, device="xla")
    losses: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
        lambda labels: functional.cross_entropy(scores, labels),
        lambda labels: functional.nll_loss(scores, labels),
        lambda labels: functional.cross_entropy(scores[..., 0], labels[:, 0], label_smoothing=0.1),
        lambda labels: functional.cross_entropy(scores[0, :, 0], labels[0, 0]),
    )
    for loss in losses:
        labels = torch.ones(4, 2, device="xla")
        assert loss(labels.int()).item() == loss(labels.long()).item()
        with pytest.raises(RuntimeError, match=r"class labels of the dtype torch.int64.*labels.long\(\)"):
            if in_step:
                with xla_adapters.step():
                    loss(labels.to(dtype))
            else:
                loss(labels.to(dtype))
    # Of the shape of the scores they are probabilities.
    assert functional.cross_entropy(scores, torch.softmax(scores, 1)).isfinite()


def test_gradient_of_the_logarithm_of_determinants() -> None:
    xla_adapters.initialize()
    matrices = torch.randn(2, 3, 3, generator=torch.Generator().manual_seed(0)) + 2 * torch.eye(3)
    there, here = matrices.to("xla").requires_grad_(), matrices.clone().requires_grad_()
    with xla_adapters.step():
        torch.linalg.slogdet(there)[1].sum().backward()
    torch.linalg.slogdet(here)[1].sum().backward()
    assert there.grad is not None
    torch.testing.assert_close(there.grad.cpu(), here.grad, rtol=1e-4, atol=1e-5)


# ---- indices of 32 and of 64 bits in one call -----------------------------------------------------


def _results(device: str) -> list[torch.Tensor]:
    table = torch.arange(12.0).view(3, 4).to(device).requires_grad_()
    rows = torch.tensor([0, 1, 0], device=device)
    columns = torch.tensor([1, 0, 1], dtype=torch.int32, device=device)
    (table[rows, columns] * torch.arange(3.0, device=device)).square().sum().backward()
    written = table.detach().clone()
    written[columns, rows] = 5.0
    added = table.detach().clone().index_put_((rows, columns), torch.ones(3, device=device), accumulate=True)
    assert table.grad is not None
    return [table.grad, written, added, table.detach()[columns[:, None], rows]]


def test_they_are_read_and_written_as_on_the_cpu() -> None:
    xla_adapters.initialize()
    expected = _results("cpu")
    with xla_adapters.eager():
        outside = _results(DEVICE)
        with xla_adapters.step():
            inside = _results(DEVICE)
        for found in (outside, inside):
            for one, other in zip(found, expected, strict=True):
                assert torch.equal(one.cpu(), other)


# ---- outside of steps -----------------------------------------------------------------------------


def test_slices_outside_of_steps() -> None:
    xla_adapters.initialize()
    shape, calls = FURTHER[SLICES]
    values = torch.arange(32.0).reshape(shape)
    for name, call in calls.items():
        assert torch.equal(call(values.to("xla")).cpu(), call(values)), name
