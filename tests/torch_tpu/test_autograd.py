"""What autograd does in steps: hooks, functions, transforms, checkpointing, complex numbers, sparse gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn import functional
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import xla_adapters
from xla_adapters import CompiledStep, StepSeed, TensorReadError, get_runtime
from xla_adapters.errors import DenseGradientWarning, PlaceholderError
from xla_adapters.runtime.torch_tpu.placeholders import TPUPlaceholders

pytestmark = pytest.mark.isolated

# ---- operators that torch_tpu lacks, or that end the process ----------------------------------------

_ROWS = torch.tensor([0, 2, 1])
_MASK = torch.tensor([True, False, True, True, False])


def _reduced(how: str, in_place: bool) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def compute(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        rows, target = _ROWS.to(one.device), one * 2
        reduce = target.index_reduce_ if in_place else target.index_reduce
        return reduce(0, rows, other[:3], how, include_self=in_place)

    return compute


def _reduced_into(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(one)
    with torch.no_grad():
        torch.index_reduce(one * 2, 0, _ROWS.to(one.device), other[:3], "prod", out=out)
    return one * other + out


def _written_by_mask(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    target, mask = one * 2, _MASK.to(one.device)
    target[:, mask] = 1.5
    target[1:, mask] = other[1:, :1]
    return target


_LACKING: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "smooth l1": lambda one, other: functional.smooth_l1_loss(one, other, beta=0.5),
    "huber": lambda one, other: functional.huber_loss(one, other, reduction="sum"),
    "smooth l1 of nothing": lambda one, other: (
        one.sum() + other.sum() + functional.smooth_l1_loss(one[:0], other[:0]).nan_to_num(0)
    ),
    "renorm": lambda one, other: one.renorm(2, 0, 1.0) * other,
    "a write by mask": _written_by_mask,
    **{f"{how} by index": _reduced(how, in_place=False) for how in ("prod", "mean", "amax")},
    "prod by index, into a tensor": _reduced_into,
    "amin by index in place": _reduced("amin", in_place=True),
}


@pytest.mark.parametrize("name", _LACKING)
def test_what_torch_tpu_lacks(name: str) -> None:
    def gradients(device: str, scope: Any) -> list[torch.Tensor]:
        inputs = [nn.Parameter(values.to(device)) for values in torch.randn(2, 4, 5, generator=generator)]
        with scope:
            result = _LACKING[name](*inputs)
            result.square().sum().backward()
        return [tensor.detach().cpu() for tensor in (result, *(one.grad for one in inputs if one.grad is not None))]

    xla_adapters.initialize()
    found = []
    for device, scope in (("cpu", nullcontext()), ("tpu", nullcontext()), ("tpu", xla_adapters.step())):
        generator = torch.Generator().manual_seed(0)
        found.append(gradients(device, scope))
    assert len(found[0]) == 3
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[2], found[0])


def test_a_source_of_another_size_is_refused_as_by_torch() -> None:
    xla_adapters.initialize()
    for device in ("cpu", "tpu"):
        with pytest.raises(RuntimeError):
            torch.zeros(4, 5, device=device).index_reduce(
                0, torch.tensor([0]).to(device), torch.ones(3, 5, device=device), "amax"
            )


# ---- hooks and functions in Python ------------------------------------------------------------------


class _Noting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, noted: torch.Tensor) -> torch.Tensor:
        ctx.noted = noted
        return value * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        ctx.noted.add_(grad.sum())
        return grad * 2, None


def _of_function(weight: nn.Parameter, noted: torch.Tensor) -> torch.Tensor:
    return _Noting.apply(weight, noted)  # type: ignore[no-any-return, no-untyped-call]


def _of_hook(weight: nn.Parameter, noted: torch.Tensor) -> torch.Tensor:
    def note(grad: torch.Tensor) -> None:
        noted.add_(grad.sum())

    result = weight * 2
    result.register_hook(note)
    return result


@pytest.mark.parametrize("make", [_of_function, _of_hook])
@pytest.mark.parametrize("how", ["backward", "autograd.backward", "autograd.grad"])
def test_a_backward_in_python_writes_what_it_writes_on_the_cpu(
    make: Callable[[nn.Parameter, torch.Tensor], torch.Tensor], how: str
) -> None:
    xla_adapters.initialize()
    weight, noted = nn.Parameter(torch.ones(3).to("tpu")), torch.zeros(3).to("tpu")
    for number in (1, 2):
        with xla_adapters.step():
            total = make(weight, noted).sum()
            if how == "autograd.grad":
                (weight.grad,) = torch.autograd.grad(total, weight)
            elif how == "backward":
                total.backward()
            else:
                torch.autograd.backward(total)
        assert noted.tolist() == [3.0 * number] * 3
        assert weight.grad is not None
        assert weight.grad.tolist() == [2.0] * 3
        weight.grad = None


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad * 2


def _by_function(logits: torch.Tensor) -> torch.Tensor:
    return _Twice.apply(logits)  # type: ignore[no-any-return, no-untyped-call]


def _by_hook(logits: torch.Tensor) -> torch.Tensor:
    logits.register_hook(lambda grad: grad * 2)
    return logits * 2


@pytest.mark.parametrize("wrap", [xla_adapters.step, xla_adapters.CompiledStep])
@pytest.mark.parametrize("twice", [_by_function, _by_hook])
def test_python_gets_the_gradient_of_a_loss_that_torch_tpu_differentiates_itself(
    twice: Callable[[torch.Tensor], torch.Tensor], wrap: Callable[[Any], Any]
) -> None:
    def gradients(device: str, wrap: Callable[[Any], Any]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        weight, inputs = nn.Parameter(torch.randn(3, 4).to(device)), torch.randn(5, 3).to(device)
        classes = torch.arange(5, device=device) % 4

        def train() -> torch.Tensor:
            weight.grad = None
            loss = nn.functional.cross_entropy(twice(inputs @ weight), classes)
            (slope,) = torch.autograd.grad(loss, weight, create_graph=True)
            (loss + slope.square().sum()).backward()
            return loss.detach()

        step = wrap(train)
        found = [step().cpu() for _ in range(3)]
        assert weight.grad is not None
        return [*found, weight.grad.cpu()]

    expected = gradients("cpu", lambda train: train)
    xla_adapters.initialize()
    torch.testing.assert_close(gradients("tpu", wrap), expected, rtol=1e-5, atol=1e-6)


def test_a_read_in_a_hook_is_an_error_with_the_line() -> None:
    xla_adapters.initialize()
    weight = nn.Parameter(torch.ones(3).to("tpu"))
    weight.register_hook(lambda grad: print(grad.sum().item()))
    with pytest.raises(TensorReadError) as caught, xla_adapters.step():
        (weight * 2).sum().backward()
    assert caught.value.filename == __file__
    assert weight.grad is None


# ---- function transforms ----------------------------------------------------------------------------


_Weights = dict[str, torch.Tensor]


def _net(device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(device)


def _results(device: str) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    net = _net(device)
    torch.manual_seed(1)
    inputs, classes = torch.randn(5, 4).to(device), torch.randint(0, 3, (5,)).to(device)
    scores = torch.randn(5, 3).to(device)
    weights = {name: value.detach() for name, value in net.named_parameters()}

    def square(weights: _Weights, inputs: torch.Tensor) -> torch.Tensor:
        return functional_call(net, weights, (inputs,)).square().mean()

    def loss(weights: _Weights) -> torch.Tensor:
        return cross_entropy(functional_call(net, weights, (inputs,)), classes)

    def of_scores(scores: torch.Tensor) -> torch.Tensor:
        return cross_entropy(scores * scores, classes)

    def adapted() -> torch.Tensor:
        """The gradient of a loss after one update."""
        net.zero_grad()
        own = dict(net.named_parameters())
        slopes = grad(loss)(own)
        loss({name: value - 0.1 * slopes[name] for name, value in own.items()}).backward()
        found = net[0].weight.grad.clone()  # type: ignore[index]
        net.zero_grad()
        return found

    def written(row: torch.Tensor) -> torch.Tensor:
        copy = row.clone()
        copy[1] = 0
        copy.mul_(2)
        return copy

    of_sample = grad(lambda weights, row: square(weights, row[None]))
    yield "the gradient of a functional call", lambda: grad(loss)(weights)["0.weight"]
    yield "of the parameters themselves", lambda: grad(loss)(dict(net.named_parameters()))["0.weight"].detach()
    yield "of each sample", lambda: vmap(of_sample, in_dims=(None, 0))(weights, inputs)["0.weight"]
    yield "through a gradient", adapted
    yield "a module for each sample", lambda: vmap(net)(inputs).detach()
    yield "in place", lambda: vmap(written)(inputs)
    yield "another dimension", lambda: vmap(torch.sin, in_dims=1, out_dims=1)(inputs)
    yield "jacrev", lambda: jacrev(torch.sin)(scores)
    yield "jacfwd", lambda: jacfwd(torch.sin)(scores)
    yield "hessian", lambda: hessian(of_scores)(scores)
    yield "jacrev of jacrev", lambda: jacrev(jacrev(of_scores))(scores)
    yield "jvp of a gradient", lambda: jvp(grad(of_scores), (scores,), (scores,))[1]
    yield "vjp", lambda: vjp(of_scores, scores)[1](torch.ones((), device=device))[0]
    yield "hessian of repeated rows", lambda: hessian(lambda rows: (rows.repeat_interleave(2) ** 3).sum())(scores)


@pytest.mark.parametrize("in_step", [True, False])
def test_transforms(in_step: bool) -> None:
    expected = {name: compute() for name, compute in _results("cpu")}
    xla_adapters.initialize()
    counters = get_runtime().counters
    for name, compute in _results("tpu"):
        before = counters.metrics().executions
        found = xla_adapters.step(compute)() if in_step else compute()
        torch.testing.assert_close(found.cpu(), expected[name], rtol=0, atol=1e-5, msg=name)
        assert counters.metrics().executions - before == in_step


def test_training_through_transforms_is_replayed() -> None:
    losses: list[list[float]] = []
    for device in ("cpu", "tpu"):
        if device == "tpu":
            xla_adapters.initialize()
        train, step = _training(device)
        batches = torch.Generator().manual_seed(2)
        losses.append([train(torch.randn(5, 4, generator=batches).to(device)).item() for _ in range(6)])
    torch.testing.assert_close(losses[1], losses[0], rtol=0, atol=1e-5)
    assert step is not None
    assert step.replays == 4


def _training(device: str) -> tuple[Callable[[torch.Tensor], torch.Tensor], CompiledStep[torch.Tensor] | None]:
    net = _net(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)

    def loss(weights: _Weights, inputs: torch.Tensor) -> torch.Tensor:
        return (functional_call(net, weights, (inputs,)) - 1).square().mean()

    def train(inputs: torch.Tensor) -> torch.Tensor:
        weights: dict[str, Any] = dict(net.named_parameters())
        slopes = grad(loss)(weights, inputs)
        value = loss({name: weight - 0.1 * slopes[name] for name, weight in weights.items()}, inputs)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    if device == "cpu":
        return train, None
    step = CompiledStep(train, config=xla_adapters.XLAConfig(step_replay=True))
    return step, step


# ---- activation checkpointing -----------------------------------------------------------------------


def _gradients(dropout: float, *, reentrant: bool | None) -> list[torch.Tensor]:
    """Of a loss, which is the first of them; without checkpointing if `reentrant` is None."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(dropout), nn.GELU(), nn.Linear(8, 8)).to("tpu")
    batch = torch.randn(4, 8).to("tpu").requires_grad_()
    with xla_adapters.step(seed=StepSeed(seed=1, step=0)):
        result = model(batch) if reentrant is None else checkpoint(model, batch, use_reentrant=reentrant)
        loss = result.square().sum()
        loss.backward()
    return [value.detach().cpu() for value in (loss, *(parameter.grad for parameter in model.parameters()))]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_computes_again_behind_a_barrier(
    reentrant: bool, dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    xla_adapters.initialize()
    texts: list[str] = []
    compiled = TPUPlaceholders.compile

    def compile(self, results, arguments, donated, name):  # type: ignore[no-untyped-def]
        texts.append(self.text(results, arguments))
        return compiled(self, results, arguments, donated, name)

    monkeypatch.setattr(TPUPlaceholders, "compile", compile)
    plain, ours = (_gradients(dropout, reentrant=which) for which in (None, reentrant))
    torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-5)
    barriers, products, draws = (
        [text.count(f"stablehlo.{name} ") for text in texts]
        for name in ("optimization_barrier", "dot_general", "rng_bit_generator")
    )
    assert barriers == [0, 1]
    assert products[1] > products[0]
    assert draws == ([1, 2] if dropout else [0, 0])


# ---- complex numbers --------------------------------------------------------------------------------


@pytest.mark.parametrize("transform", [torch.fft.fft, torch.fft.rfft])
def test_second_derivatives_of_fourier_transforms(transform: Callable[[torch.Tensor], torch.Tensor]) -> None:
    xla_adapters.initialize()
    found = []
    for device in ("cpu", "tpu"):
        values = torch.linspace(-1, 2, 8).to(device).requires_grad_()
        (slope,) = torch.autograd.grad(transform(values).abs().pow(3).sum(), values, create_graph=True)
        found.append(torch.autograd.grad(slope.square().sum(), values)[0].cpu())
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("in_step", [True, False])
def test_copies_of_conjugates_and_of_their_parts(in_step: bool) -> None:
    xla_adapters.initialize()
    values = torch.tensor([1 + 2j, 3 - 4j])
    views: list[Callable[[torch.Tensor], torch.Tensor]] = [
        torch.conj,
        lambda tensor: tensor.conj().real,
        lambda tensor: tensor.conj().imag,
    ]
    copies: list[Callable[[torch.Tensor], torch.Tensor]] = [
        torch.clone,
        lambda tensor: torch.zeros_like(tensor).copy_(tensor),
        lambda tensor: tensor + 0,
        *([] if in_step else [torch.Tensor.cpu, copy.deepcopy]),
    ]
    for view in views:
        for copied in copies:

            def compute(tensor: torch.Tensor, view: object = view, copied: object = copied) -> torch.Tensor:
                assert callable(view)
                assert callable(copied)
                result: torch.Tensor = copied(view(tensor))
                return result

            expected = compute(values).resolve_conj().resolve_neg()
            found = (xla_adapters.step(compute) if in_step else compute)(values.to("tpu"))
            torch.testing.assert_close(found.cpu().resolve_conj().resolve_neg(), expected)


# ---- sparse tensors ---------------------------------------------------------------------------------


def _sparse_losses(device: str, *, in_step: bool) -> list[float]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2)).to(device)
    tokens = torch.randint(0, 10, (3, 5)).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)

    def train() -> torch.Tensor:
        loss = net(tokens).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step = xla_adapters.step(train) if in_step else train
    return [step().item() for _ in range(4)]


def test_sparse_gradients_of_embeddings_are_dense_in_steps() -> None:
    expected = _sparse_losses("cpu", in_step=False)
    xla_adapters.initialize()
    with pytest.warns(DenseGradientWarning, match="sparse=True"):
        found = _sparse_losses("tpu", in_step=True)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(_sparse_losses("tpu", in_step=False), expected, rtol=0, atol=1e-5)


def test_bags_of_embeddings_have_dense_gradients_in_steps() -> None:
    """The stand-in for a TPU computes no bags: this is their backward alone."""
    xla_adapters.initialize()
    bags = torch.tensor([0, 0, 1]).to("tpu")
    sizes, offsets = torch.tensor([2, 1]).to("tpu"), torch.tensor([0, 2]).to("tpu")
    tokens, slopes = torch.tensor([3, 5, 3]).to("tpu"), torch.ones(2, 4).to("tpu")
    with pytest.warns(DenseGradientWarning), xla_adapters.step():
        found = torch.ops.aten._embedding_bag_backward(
            slopes, tokens, offsets, bags, sizes, sizes, 10, False, 0, True, None
        )
    assert found.layout is torch.strided
    assert found.cpu().sum(1).tolist() == [0, 0, 0, 8, 0, 4, 0, 0, 0, 0]


def test_other_sparse_tensors_are_refused_with_the_line() -> None:
    xla_adapters.initialize()
    sparse = torch.eye(3).to_sparse().to("tpu")
    rows = torch.ones(3, 2, device="tpu")
    with pytest.raises(PlaceholderError, match=r"(?s)sparse_coo.*to_dense.*test_autograd\.py"):
        with xla_adapters.step():
            torch.sparse.mm(sparse, rows)
    assert rows.sum().item() == 6
