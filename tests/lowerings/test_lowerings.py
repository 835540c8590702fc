"""Operators that are replaced inside a step: the values and gradients of torch on the CPU, in one graph."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import distributions as d
from torch import nn
from transformers.loss.loss_utils import LOSS_MAPPING

import xla_adapters
from tests.support import update
from xla_adapters.replay.compiled_step import CompiledStep
from xla_adapters.tracing.library_reads import LibraryReads, allowing_reads

pytestmark = pytest.mark.isolated

_CALLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "norm": lambda x: torch.norm(x),
    "norm 2, a dim": lambda x: x.norm(2, 1).sum(),
    "norm 1, kept dim": lambda x: x.norm(p=1, dim=(0, 1), keepdim=True).sum(),
    "norm inf": lambda x: torch.norm(x, float("inf")),
    "norm of zero": lambda x: torch.norm(x * 0) + x.sum(),
    "norm_except_dim": lambda x: torch.norm_except_dim(x, 2, 1).sum(),
    "norm_except_dim, none": lambda x: torch.norm_except_dim(x, 2, -1).sum(),
    "weight norm": lambda x: torch._weight_norm(x, x.detach().sum(1, keepdim=True), 0).square().sum(),
    "normalize": lambda x: (nn.functional.normalize(x, dim=1) * torch.arange(4, device=x.device)).sum(),
    "sum of a scalar, dim 0": lambda x: x.sum().sum(dim=0) + torch.sum(x.sum(), -1, keepdim=True),
    "sum, a dim": lambda x: x.sum(0).square().sum(),
    "nansum": lambda x: torch.where(x > 1, torch.nan, x).nansum() + torch.nansum(x, 0).square().sum(),
    "nanmean": lambda x: (
        torch.where(x > 1, torch.nan, x).nanmean(1).square().sum() + torch.nanmean(x, keepdim=True).sum()
    ),
    "adaptive average 1d": lambda x: nn.functional.adaptive_avg_pool1d(x[None], 3).square().sum(),
    "adaptive average, divided": lambda x: nn.functional.adaptive_avg_pool2d(x[None], (3, 2)).square().sum(),
    "adaptive average, overlapping": lambda x: nn.AdaptiveAvgPool2d((2, 3))(x[None]).square().sum(),
    "adaptive average, larger": lambda x: nn.AdaptiveAvgPool2d((7, None))(x[None]).square().sum(),
    "adaptive average of one": lambda x: nn.AdaptiveAvgPool2d(6)(x.reshape(1, 12, 1, 1)).square().sum(),
    "adaptive average 3d": lambda x: nn.AdaptiveAvgPool3d((2, 3, 1))(x[None, None]).square().sum(),
}
# Shape of the input, arguments of the module.
_CONVOLUTIONS: dict[str, tuple[type[nn.Module], tuple[int, ...], dict[str, object]]] = {
    "groups": (nn.Conv2d, (2, 6, 5, 4), {"out_channels": 9, "groups": 3, "kernel_size": 3, "padding": 1}),
    "depthwise": (nn.Conv2d, (2, 4, 6, 5), {"out_channels": 4, "groups": 4, "kernel_size": 3, "stride": 2}),
    "depthwise, more channels": (nn.Conv2d, (2, 3, 5, 5), {"out_channels": 6, "groups": 3, "kernel_size": (1, 3)}),
    "dilated": (nn.Conv2d, (2, 4, 9, 8), {"out_channels": 4, "groups": 2, "kernel_size": 3, "dilation": (2, 1)}),
    "same": (nn.Conv2d, (2, 4, 5, 6), {"out_channels": 2, "groups": 2, "kernel_size": (2, 3), "padding": "same"}),
    "valid, circular": (
        nn.Conv2d,
        (2, 4, 5, 6),
        {"out_channels": 4, "groups": 4, "kernel_size": 3, "padding": 1, "padding_mode": "circular", "bias": False},
    ),
    "one row": (nn.Conv2d, (4, 5, 6), {"out_channels": 4, "groups": 2, "kernel_size": 3}),
    "1d": (nn.Conv1d, (2, 4, 9), {"out_channels": 8, "groups": 2, "kernel_size": 3, "padding": 2, "stride": 3}),
    "3d": (nn.Conv3d, (1, 2, 4, 5, 3), {"out_channels": 4, "groups": 2, "kernel_size": 2}),
    "too large a kernel": (nn.Conv1d, (2, 4, 80), {"out_channels": 4, "groups": 2, "kernel_size": 65}),
    "too large a kernel, depthwise": (nn.Conv2d, (2, 4, 7, 8), {"out_channels": 4, "groups": 4, "kernel_size": 6}),
    "small images": (nn.Conv2d, (3, 4, 2, 2), {"out_channels": 5, "kernel_size": 3, "padding": 1}),
    "small images, halved": (nn.Conv2d, (3, 4, 1, 1), {"out_channels": 5, "kernel_size": 3, "padding": 1, "stride": 2}),
    "no groups": (nn.Conv2d, (2, 4, 5, 4), {"out_channels": 3, "kernel_size": 3}),
}
_HISTOGRAMS = {
    "a range": (4, -1, 2),
    "the range of the values": (5, 0, 0),
    "outside": (3, 10, 11),
}


@pytest.mark.parametrize("name", _CALLS)
def test_value_gradient_and_one_graph(name: str) -> None:
    call = _CALLS[name]
    values = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    with xla_adapters.eager():
        ours = nn.Parameter(values.to("xla"))
        with xla_adapters.count() as counters:
            for _ in range(2):
                ours.grad = None
                with xla_adapters.step():
                    result = call(ours)
                    result.backward()
        assert (counters.compiles, counters.executions, counters.transfers_to_host) == (1, 2, 0)
        assert counters.eager_ops == 0
    plain = nn.Parameter(values.clone())
    expected = call(plain)
    expected.backward()
    torch.testing.assert_close(result.cpu(), expected)
    torch.testing.assert_close(ours.grad.cpu(), plain.grad)


_LEFT = ("too large a kernel", "too large a kernel, depthwise", "no groups")


@pytest.mark.parametrize("name", _CONVOLUTIONS)
def test_which_convolutions_become_products(name: str) -> None:
    make, shape, options = _CONVOLUTIONS[name]
    module = make(in_channels=shape[0] if name == "one row" else shape[1], **options).to("xla")
    values, runtime = torch.randn(shape).to("xla"), xla_adapters.get_runtime()
    with xla_adapters.step():
        result = module(values)
        text = runtime.executables.text([runtime.lazy.inner(result.detach())])
    assert (b"convolution" in text) is (name in _LEFT)


@pytest.mark.parametrize("name", _CONVOLUTIONS)
def test_convolutions(name: str) -> None:
    make, shape, options = _CONVOLUTIONS[name]
    torch.manual_seed(0)
    channels = shape[0] if name == "one row" else shape[1]
    plain = make(in_channels=channels, **options)
    ours, values = copy.deepcopy(plain).to("xla"), torch.randn(shape)
    inputs = [nn.Parameter(values.clone()), nn.Parameter(values.to("xla"))]
    for _ in range(2):
        for tensor in (*inputs, *plain.parameters(), *ours.parameters()):
            tensor.grad = None
        results = [plain(inputs[0])]
        results[0].square().sum().backward()
        with xla_adapters.eager(), xla_adapters.count() as counters, xla_adapters.step():
            results.append(ours(inputs[1]))
            results[1].square().sum().backward()
    assert (counters.compiles, counters.executions) == (0, 1)
    torch.testing.assert_close(results[1].cpu(), results[0])
    for there, here in zip((inputs[1], *ours.parameters()), (inputs[0], *plain.parameters()), strict=True):
        torch.testing.assert_close(there.grad.cpu(), here.grad)


_COMPARISONS: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "==": lambda x, y: x == y,
    "!=": lambda x, y: x != y,
    "<": lambda x, y: x < y,
    "<=": lambda x, y: torch.le(x, other=y),
    ">": lambda x, y: y < x,
    ">=": lambda x, y: x.greater_equal(y),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_comparisons_with_a_number_are_in_the_dtype_of_the_tensor(dtype: torch.dtype) -> None:
    values = torch.tensor([0.1, 0.3, 1 / 3, 3, 257]).to(dtype)
    on_device = values.to("xla")
    for name, compare in _COMPARISONS.items():
        numbers = (0.1, 0.3, 1 / 3, 3, 256, True, float("inf"))
        with xla_adapters.eager():
            with xla_adapters.count() as counters, xla_adapters.step():
                ours = torch.stack([compare(on_device, number) for number in numbers])
            outside = torch.stack([compare(on_device, number) for number in numbers])
        expected = torch.stack([compare(values, number) for number in numbers])
        assert counters.executions == 1
        assert torch.equal(ours.cpu(), expected), name
        assert torch.equal(outside.cpu(), expected), name


@pytest.mark.parametrize("name", _HISTOGRAMS)
@pytest.mark.parametrize("single", [False, True])
def test_histogram(name: str, single: bool) -> None:
    values = torch.full((6,), 1.5) if single else torch.tensor([-1.0, -0.5, 0.25, 0.25, 2.0, 3.0])
    bins, low, high = _HISTOGRAMS[name]
    with xla_adapters.eager():
        on_device = values.to("xla")
        with xla_adapters.eager(), xla_adapters.count() as counters, xla_adapters.step():
            ours = torch.histc(on_device, bins=bins, min=low, max=high)
        assert (counters.executions, counters.transfers_to_host, counters.eager_ops) == (1, 0, 0)
    torch.testing.assert_close(ours.cpu(), torch.histc(values, bins=bins, min=low, max=high))


def test_clipping_many_parameters_is_one_graph_for_all_steps() -> None:
    # torch_xla's own clip_grad_norm_ calls torch.norm, whose hash wandered from step to step.
    with xla_adapters.eager():
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(20))).to("xla")
        optimizer = torch.optim.AdamW(model.parameters())
        batch = torch.ones(2, 4).to("xla")
        with xla_adapters.count() as counters:
            for _ in range(4):
                with xla_adapters.step():
                    model(batch).square().mean().backward()
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
    assert (counters.compiles, counters.executions) == (1, 4)


def test_the_state_of_a_scalar_parameter_costs_no_second_graph() -> None:
    with xla_adapters.eager():
        scale = nn.Parameter(xla_adapters.get_runtime().transfers.to_device(torch.tensor(2.5)))
        optimizer = torch.optim.AdamW([scale])
        with xla_adapters.count() as counters:
            for _ in range(4):
                with xla_adapters.step():
                    update((scale * scale), optimizer)
    assert (counters.compiles, counters.executions) == (1, 4)


@pytest.mark.parametrize("reduce", [torch.sum, torch.mean, torch.softmax, torch.logsumexp, torch.prod, torch.var])
def test_what_reduces_an_embedding_is_one_graph_for_all_steps(reduce: Callable[..., torch.Tensor]) -> None:
    # Adam's last operation (addcdiv) leaves a parameter that does not name its dtype, which sums hash.
    with xla_adapters.eager():
        model = nn.Embedding(5, 4).to("xla")
        optimizer = torch.optim.Adam(model.parameters())
        batch = torch.tensor([[0, 1, 2], [2, 3, 4]]).to("xla")
        with xla_adapters.count() as counters:
            for _ in range(3):
                with xla_adapters.step():
                    update(reduce(model(batch), 1).square().mean(), optimizer)
    assert (counters.compiles, counters.executions) == (1, 3)


def test_stacked_batch_norms_keep_torchs_statistics_in_one_graph() -> None:
    def norms() -> nn.Sequential:
        without_statistics = nn.BatchNorm1d(4, momentum=None)
        # It keeps its running statistics, as they are.
        without_statistics.track_running_stats = False
        return nn.Sequential(
            nn.BatchNorm1d(4),
            nn.BatchNorm1d(4, momentum=None),
            nn.BatchNorm1d(4, affine=False, momentum=0.3),
            without_statistics,
        )

    plain = norms()
    batches = [3 * torch.randn(8, 4, generator=torch.Generator().manual_seed(seed)) + 1 for seed in range(4)]
    with xla_adapters.eager():
        ours = norms().to("xla")
        uploaded = [batch.to("xla") for batch in batches]
        with xla_adapters.count() as counters:
            for batch in uploaded:
                with xla_adapters.step():
                    result = ours(batch)
                    result.square().mean().backward()
                    ours.zero_grad()
        assert (counters.compiles, counters.executions, counters.transfers_to_host) == (1, 4, 0)
    for batch in batches:
        expected = plain(batch)
    torch.testing.assert_close(result.cpu(), expected, atol=2e-6, rtol=0)
    for name, value in ours.state_dict().items():
        torch.testing.assert_close(value.cpu(), plain.state_dict()[name], atol=2e-6, rtol=0, msg=name)
    assert ours[1].momentum is None
    with pytest.raises(ValueError, match="more than 1 value per channel"), xla_adapters.step():
        ours(uploaded[0][:1])


@pytest.mark.parametrize("mixed", ["autocast", "weights", "nothing"])
def test_batch_norm_in_mixed_precision(mixed: str) -> None:
    plain = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
    if mixed != "autocast":
        plain = plain.bfloat16()
    if mixed == "weights":
        plain[1].float()
    ours = copy.deepcopy(plain).to("xla")
    batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(0), dtype=plain[0].weight.dtype)

    def train(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast(batch.device.type, torch.bfloat16, enabled=mixed == "autocast"):
            result = model(batch)
        result.float().square().mean().backward()
        return result

    with xla_adapters.eager():
        uploaded = batch.to("xla")
        with xla_adapters.step():
            found = train(ours, uploaded)
        expected = train(plain, batch)
        assert found.dtype == expected.dtype == torch.bfloat16
        torch.testing.assert_close(found.cpu(), expected, atol=0.05, rtol=0.05)
        for name, value in (*plain.named_parameters(), *plain.named_buffers()):
            present = ours.get_parameter(name) if isinstance(value, nn.Parameter) else ours.get_buffer(name)
            torch.testing.assert_close(present.cpu(), value, atol=0.02, rtol=0.02, msg=name)
            if value.grad is not None:
                torch.testing.assert_close(present.grad.cpu(), value.grad, atol=0.1, rtol=0.1, msg=name)


# ---- questions about values -----------------------------------------------------------------------


_DISTRIBUTIONS: dict[str, Callable[[torch.Tensor], d.Distribution]] = {
    "categorical": lambda x: d.Categorical(logits=x),
    "normal": lambda x: d.Normal(x, x.exp()),
    "independent": lambda x: d.Independent(d.Normal(x, x.exp()), 1),
    "transformed": lambda x: d.TransformedDistribution(d.Normal(x, x.exp()), [d.TanhTransform(cache_size=1)]),
    "mixture": lambda x: d.MixtureSameFamily(d.Categorical(logits=x), d.Normal(x, x.exp())),
    "asked for": lambda x: d.Bernoulli(logits=x, validate_args=True),
}


@pytest.mark.parametrize("name", _DISTRIBUTIONS)
def test_distributions(name: str) -> None:
    make = _DISTRIBUTIONS[name]
    values = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    drawn = make(values).sample()
    xla_adapters.initialize()
    ours, plain = nn.Parameter(values.to("xla")), nn.Parameter(values)
    on_device = drawn.to("xla")
    with xla_adapters.count() as counted, xla_adapters.step():
        loss = -make(ours).log_prob(on_device).mean()
        loss.backward()
    assert (counted.executions, counted.transfers_to_host) == (1, 0)
    expected = -make(plain).log_prob(drawn).mean()
    expected.backward()
    torch.testing.assert_close(loss.detach().cpu(), expected.detach())
    torch.testing.assert_close(ours.grad.cpu(), plain.grad)


def test_outside_of_steps_distributions_check_their_arguments() -> None:
    xla_adapters.initialize()
    with pytest.raises(ValueError, match="Expected parameter scale"):
        d.Normal(torch.zeros(2, device="xla"), torch.tensor([1.0, -1.0]).to("xla"))


def test_other_code_that_asks_whether_all_is_true_reads() -> None:
    xla_adapters.initialize()
    weight = torch.ones(2, device="xla")
    with pytest.raises(xla_adapters.TensorReadError), xla_adapters.step():
        if torch._is_all_true(weight * 2 > 1):
            weight.add_(1)


@pytest.mark.parametrize("norm_first", [False, True])
def test_encoder_with_a_padding_mask_in_evaluation(norm_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=norm_first)
    plain = nn.TransformerEncoder(layer, 2).eval()
    values, padded = torch.randn(3, 5, 8), torch.zeros(3, 5, dtype=torch.bool)
    padded[1, 3:] = padded[2, 1:] = True
    xla_adapters.initialize()
    ours, batch = copy.deepcopy(plain).to("xla"), (values.to("xla"), padded.to("xla"))
    with torch.no_grad():
        with xla_adapters.count() as counted, xla_adapters.step():
            result = ours(batch[0], src_key_padding_mask=batch[1])
        expected = plain(values, src_key_padding_mask=padded)
    assert (counted.executions, counted.transfers_to_host) == (1, 0)
    torch.testing.assert_close(result.cpu()[~padded], expected[~padded])


# ---- products of groups of rows -------------------------------------------------------------------


def _model() -> torch.nn.Module:
    config = transformers.Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        moe_intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
    )
    torch.manual_seed(0)
    return transformers.Qwen3MoeForCausalLM(config)


def _losses(model: torch.nn.Module, device: str) -> list[float]:
    model = copy.deepcopy(model).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ids = torch.randint(0, 32, (2, 12), generator=torch.Generator().manual_seed(1)).to(device)

    def train(ids: torch.Tensor) -> torch.Tensor:
        return update(model(input_ids=ids, labels=ids).loss, optimizer)

    run = train if device == "cpu" else CompiledStep(train)
    return [float(run(ids)) for _ in range(4)]


def test_experts_train_in_one_graph_in_a_loop_of_ones_own() -> None:
    xla_adapters.initialize()
    model = _model()
    expected = _losses(model, "cpu")
    # The default of on_graph_break is to raise.
    assert _losses(model, "xla") == pytest.approx(expected, abs=1e-4)


def test_groups_of_rows() -> None:
    """Also an empty group, and rows behind the last one."""
    xla_adapters.initialize()
    rows, weight = torch.randn(7, 3), torch.randn(4, 3, 5)
    ends = torch.tensor([2, 2, 5, 6], dtype=torch.int32)
    expected = torch.zeros(7, 5)
    for index, (start, end) in enumerate(((0, 2), (2, 2), (2, 5), (5, 6))):
        expected[start:end] = rows[start:end] @ weight[index]
    x, w = rows.to("xla").requires_grad_(), weight.to("xla").requires_grad_()
    with xla_adapters.step():
        found = torch._grouped_mm(x, w, offs=ends.to("xla"))
        found.sum().backward()
    torch.testing.assert_close(found.detach().cpu(), expected, rtol=1e-4, atol=1e-5)
    assert w.grad is not None
    assert not w.grad[1].cpu().any()
    torch.testing.assert_close(w.grad[3].cpu(), rows[5:6].sum(0)[:, None].expand(3, 5), rtol=1e-4, atol=1e-5)


def test_ctc_of_transformers_does_not_select_labels() -> None:
    """Labels that do not count stand anywhere: texts of other lengths are the same graph, with the loss of the CPU."""
    stock = LOSS_MAPPING["ForCTC"]
    xla_adapters.initialize()
    generator = torch.Generator().manual_seed(0)
    batches = [[[1, 2, -100, -100], [3, 3, 4, 5]], [[-100, 2, 0, 1], [3, -100, -100, -100]], [[1] * 4, [-100] * 4]]
    with allowing_reads(LibraryReads([])), xla_adapters.count() as counters:
        used = LOSS_MAPPING["ForCTC"]
        for batch in batches:
            logits = torch.randn(2, 12, 6, generator=generator)
            labels, times = torch.tensor(batch), torch.tensor([12, 9])
            there, here = logits.to("xla").requires_grad_(), logits.requires_grad_()
            for reduction in ("mean", "sum"):
                given: dict[str, Any] = {"blank_token_id": 0, "reduction": reduction, "zero_infinity": True}
                with xla_adapters.step():
                    found = used(there, labels.to("xla"), times.to("xla"), **given, num_items_in_batch=3)
                    (gradient,) = torch.autograd.grad(found, there)
                expected = stock(here, labels, times, **given)
                torch.testing.assert_close(found.detach().cpu(), expected.detach(), rtol=1e-5, atol=1e-5)
                torch.testing.assert_close(gradient.cpu(), *torch.autograd.grad(expected, here), rtol=1e-5, atol=1e-5)
    assert used is not stock
    assert LOSS_MAPPING["ForCTC"] is stock
    assert counters.compiles == 2
