"""Ranks of TorchTPU that hold shards of a model: the numbers of one process; what a shard cannot give is an error."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import io
import os
import tempfile
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
import transformers
from torch import nn

import hf_trainer
import xla_adapters
from tests.isolation import run_in_child
from tests.tiny_models import tiny
from tests.torch_tpu import stand_in
from tests.torch_tpu.ranks import on_ranks
from xla_adapters import ConfigError, TensorReadError, UnsupportedOptionError
from xla_adapters.errors import RankError
from xla_adapters.sharding import ShardingConfig, distribute_module, share_state, whole_parameters

_Train = Callable[[nn.Module, torch.optim.Optimizer, torch.Tensor], torch.Tensor]


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def _batches(count: int = 6) -> list[torch.Tensor]:
    return list(torch.randn(count, 8, 8, generator=torch.Generator().manual_seed(1)))


def _part(batch: torch.Tensor) -> torch.Tensor:
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


def _sharded(model: nn.Module | None = None) -> nn.Module:
    xla_adapters.initialize(spmd=True)
    return distribute_module(_net() if model is None else model, partition_fn="fsdp")


def _weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().cpu() for name, value in model.state_dict().items()}


# ---- models, losses, updates -------------------------------------------------------------------------


class _OutsideOfModules(nn.Module):
    """Uses parameters of modules that it does not call, lists of them, and one that cannot be split."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.lists = nn.ParameterList([nn.Parameter(torch.randn(8, 8) * 0.3) for _ in range(2)])
        self.scale = nn.Parameter(torch.ones(1))
        self.odd = nn.Parameter(torch.randn(7) * 0.1)
        self.tied = nn.Linear(8, 8, bias=False)
        self.tied.weight = self.first.weight

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows = nn.functional.linear(rows, self.first.weight, self.first.bias).tanh()
        for weight in self.lists:
            rows = rows @ weight
        return self.tied(rows) * self.scale + self.odd.sum()


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cells = nn.GRU(8, 16, batch_first=True)
        self.last = nn.Linear(16, 4)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.cells(rows.unsqueeze(1))[0]
        return self.last(hidden.squeeze(1))


def _updated(model: nn.Module, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> torch.Tensor:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def _plain(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
    return _updated(model, optimizer, model(batch).square().mean())


def _clipped(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor, norm: float) -> torch.Tensor:
    loss = model(batch).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type=norm)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def _clipped_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    total = torch.stack([gradient.pow(2).sum() for gradient in gradients]).sum().sqrt()
    finite = torch.stack([gradient.isfinite().all() for gradient in gradients]).all()
    for gradient in gradients:
        gradient.mul_(torch.where(finite, torch.clamp(0.05 / (total + 1e-6), max=1.0), 0.0))
    optimizer.step()
    return loss.detach()


def _regularized(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
    own = sum(parameter.norm() + parameter.abs().mean() for parameter in model.parameters())
    return _updated(model, optimizer, model(batch).square().mean() + 0.1 * own)


def _normalized(model: Any, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
    """What all shards give together is computed with a shard again; so is a parameter that is not split."""
    weight = next(model.first.parameters())
    own = ((weight / weight.norm() - 0.1) ** 2).sum() + ((weight - weight.mean()) ** 2).mean()
    return _updated(model, optimizer, model(batch).square().mean() + own + (model.scale.exp() * weight.square()).sum())


def _second_order(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
    """An update by the product of the second derivatives and the weights."""
    parameters, loss = list(model.parameters()), model(batch).square().mean()
    gradients = torch.autograd.grad(loss, parameters, create_graph=True)
    halves = [parameter.detach() * 0.5 for parameter in parameters]
    for parameter, product in zip(
        parameters, torch.autograd.grad(gradients, parameters, grad_outputs=halves), strict=True
    ):
        parameter.grad = product
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def _perturbed(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
    """Sharpness aware: a second forward with other weights, which one backward does not announce."""
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(model(batch).square().mean(), parameters)
    scale = 0.1 / torch.stack([gradient.norm() for gradient in gradients]).norm()
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.add_(gradient * scale)
    loss = model(batch).square().mean()
    loss.backward()
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.sub_(gradient * scale)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


class _Checkpointed(nn.Module):
    """A backward in another one: the outer one's gradients are averaged, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.block, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = torch.utils.checkpoint.checkpoint(self.block, self.first(rows).tanh(), use_reentrant=True)
        return self.last(hidden)


def _with_a_zero(model: Any, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
    """torch's gradient of a norm that is zero is zero."""
    own = sum(parameter.norm() for parameter in model.parameters())
    return _updated(model, optimizer, model(batch).square().mean() + 0.1 * own)


def _frozen() -> nn.Module:
    model: Any = _net()
    model[0].weight.requires_grad_(False)
    return model


def _without_bias() -> nn.Module:
    model: Any = _net()
    nn.init.zeros_(model[0].bias)
    return model


def _penalized_by_weights(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
    """By the norm of the gradient of all rows together."""
    loss = model(batch).square().mean()
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    penalty = torch.stack([gradient.square().sum() for gradient in gradients]).sum()
    return _updated(model, optimizer, loss + penalty)


class _Shared(nn.Module):
    """Two models with one trunk, each given to `distribute_module`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        trunk = nn.Linear(8, 16)
        self.actor, self.critic = nn.Sequential(trunk, nn.Linear(16, 4)), nn.Sequential(trunk, nn.Linear(16, 2))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.actor(rows), self.critic(rows)], 1)


def _accumulated(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
    losses = []
    for part in batch.chunk(2):
        loss = model(part).square().mean() / 2
        loss.backward()
        losses.append(loss.detach())
    optimizer.step()
    optimizer.zero_grad()
    return torch.stack(losses).sum()


def _penalized(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
    rows = batch.clone().requires_grad_()
    loss = model(rows).square().mean()
    (gradient,) = torch.autograd.grad(loss * len(batch), rows, create_graph=True)
    return _updated(model, optimizer, loss + 0.1 * gradient.square().mean())


def _scaled_by_call(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
    scaled = {name: parameter * 1.5 for name, parameter in model.named_parameters()}
    return _updated(model, optimizer, torch.func.functional_call(model, scaled, (batch,)).square().mean())


class _Lamb(torch.optim.Optimizer):
    """An update by the norms of whole parameters, and by the number of their elements."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                update = parameter.grad + 0.01 * parameter
                spread = (update.pow(2).sum() / update.numel()).sqrt() + update.abs().max()
                parameter.sub_(0.1 * update * parameter.norm() / (update.norm() + spread + 1e-6))


def _adamw(parameters: Any, rate: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, rate)


def _trained(make: Callable[[], nn.Module], train: _Train, optimizer: Any, on_cpu: bool) -> dict[str, Any]:
    model = make() if on_cpu else _sharded(make())
    updates = optimizer(model.parameters())
    step: Any = functools.partial(train, model, updates)
    step = step if on_cpu else xla_adapters.CompiledStep(step)
    losses, launches = [], []
    for batch in _batches():
        before = stand_in.counts()
        loss = step(batch if on_cpu else _part(batch))
        if not on_cpu:
            torch.accelerator.synchronize()
            launches.append(stand_in.counts().since(before).executions)
        losses.append(loss.item())
    held = [*model.parameters(), *(value for state in updates.state.values() for value in state.values())]
    return {
        "losses": losses,
        "launches": launches,
        "programs": 0 if on_cpu else len(step.events),
        "replays": 0 if on_cpu else step.replays,
        "bytes": sum(value.numel() * value.element_size() for value in held if value.ndim),
        "weights": _weights(model),
    }


def _assert_same(ranks: int, make: Callable[[], nn.Module], train: _Train, optimizer: Any) -> list[dict[str, Any]]:
    run = functools.partial(_trained, make, train, optimizer)
    expected = run_in_child(functools.partial(run, True))
    found: list[dict[str, Any]] = on_ranks(ranks, functools.partial(run, False))
    means = torch.tensor([each["losses"] for each in found]).mean(0)
    torch.testing.assert_close(means, torch.tensor(expected["losses"]), rtol=0, atol=1e-4)
    for each in found:
        assert each["launches"] == [1] * 6
        assert each["programs"] == 1
        for name, value in each["weights"].items():
            torch.testing.assert_close(value, expected["weights"][name], rtol=0, atol=1e-4, msg=name)
            assert torch.equal(value, found[0]["weights"][name])
        each["share"] = each["bytes"] / expected["bytes"]
    return found


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_each_rank_holds_its_share_and_steps_are_those_of_one_process(ranks: int) -> None:
    """Parameters and the states of AdamW, in bytes."""

    def wide() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 16))

    for each in _assert_same(ranks, wide, functools.partial(_clipped, norm=2.0), functools.partial(_adamw, rate=5e-3)):
        assert each["share"] <= 1.05 / ranks
        assert each["replays"] == 4


@pytest.mark.parametrize(
    ("make", "train", "optimizer"),
    [
        (_OutsideOfModules, _plain, _adamw),
        (_Recurrent, _plain, _adamw),
        (_frozen, _plain, _adamw),
        (_net, functools.partial(_clipped, norm=float("inf")), _adamw),
        (_net, functools.partial(_clipped, norm=1.0), _adamw),
        (_net, _clipped_by_hand, _adamw),
        (_net, _regularized, _adamw),
        (_OutsideOfModules, _normalized, functools.partial(_adamw, rate=5e-3)),
        (_without_bias, _with_a_zero, _adamw),
        (_net, _penalized_by_weights, _adamw),
        (_net, _perturbed, _adamw),
        (_net, _second_order, functools.partial(torch.optim.SGD, lr=0.1)),
        (_Checkpointed, functools.partial(_clipped, norm=2.0), _adamw),
        (_net, _accumulated, _adamw),
        (_net, _penalized, _adamw),
        (_net, _scaled_by_call, _adamw),
        (_net, _plain, _Lamb),
        (_net, _plain, functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)),
    ],
    ids=[
        *(
            "outside of modules",
            "recurrent",
            "frozen",
            "largest element",
            "sum of elements",
            "clipped by hand",
            "regularized",
        ),
        *(
            "normalized",
            "norm of zero",
            "penalty of gradients",
            "perturbed",
            "second order",
            "reentrant",
            "accumulated",
            "gradient penalty",
            "functional_call",
            "lamb",
            "sgd",
        ),
    ],
)
def test_what_is_computed_with_shards_is_that_of_the_whole(make: Any, train: _Train, optimizer: Any) -> None:
    _assert_same(2, make, train, optimizer)


def _keeping_gradients(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad(set_to_none=False)
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def _of_two_models(on_cpu: bool) -> list[float]:
    made = _Shared()
    if not on_cpu:
        made.actor, made.critic = _sharded(made.actor), _sharded(made.critic)  # type: ignore[assignment]
    step: Any = functools.partial(_keeping_gradients, made, _adamw(made.parameters()))
    step = step if on_cpu else xla_adapters.CompiledStep(step)
    return [step(batch if on_cpu else _part(batch)).item() for batch in _batches(3)]


def test_a_module_can_be_a_part_of_two_models() -> None:
    expected = run_in_child(functools.partial(_of_two_models, True))
    found = on_ranks(2, functools.partial(_of_two_models, False))
    assert torch.tensor(found).mean(0).tolist() == pytest.approx(expected, abs=1e-5)


def _averages(on_cpu: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = _net() if on_cpu else _sharded()
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = _adamw(model.parameters())

    def train(batch: torch.Tensor) -> torch.Tensor:
        loss = (model(batch) - average(batch)).square().mean() + model(batch).square().mean()
        _updated(model, optimizer, loss)
        with torch.no_grad():
            for kept, parameter in zip(average.parameters(), model.parameters(), strict=True):
                kept.lerp_(parameter, 0.1)
        return loss.detach()

    step = train if on_cpu else xla_adapters.CompiledStep(train)
    return [step(batch if on_cpu else _part(batch)).item() for batch in _batches()], _weights(average)


def test_a_copy_of_the_model_has_shards_of_its_own() -> None:
    losses, weights = run_in_child(functools.partial(_averages, True))
    found = on_ranks(2, functools.partial(_averages, False))
    assert torch.tensor([each[0] for each in found]).mean(0).tolist() == pytest.approx(losses, abs=1e-5)
    for name, value in found[0][1].items():
        torch.testing.assert_close(value, weights[name], rtol=0, atol=1e-4)


# ---- what a shard cannot give ------------------------------------------------------------------------


class _Changing(nn.Linear):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.weight.data.clamp_(-0.1, 0.1)
        return super().forward(rows)


class _Scaling(nn.Linear):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        torch.mul(self.weight.data, 0.9, out=self.weight.data)
        return super().forward(rows)


def _spectral(model: Any, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
    own = torch.linalg.norm(next(model.parameters()), 2)
    return _updated(model, optimizer, model(batch).square().mean() + own)


def _zeroed(model: Any, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
    model(batch).square().mean().backward()
    model[0].weight.grad[2] = 0
    return batch.sum()


def _read(model: Any, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
    next(model.parameters()).tolist()
    return batch.sum()


def _transformed(model: Any, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
    model(batch).square().mean().backward()
    return torch.vmap(lambda row: row.square().sum())(next(model.parameters()).grad).sum()


def _uncalled(model: Any, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
    return _updated(model, optimizer, nn.functional.linear(batch, model[0].weight).square().mean())


def _centralized(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
    model(batch).square().mean().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.sub_(parameter.grad.mean(dim=0))
    return batch.sum()


def _refusals() -> dict[str, str]:
    said: dict[str, str] = {}

    def refused(kind: str, make: Any, train: Any, optimizer: Any = _adamw) -> None:
        model = _sharded(make())
        before = _weights(model)
        step = xla_adapters.CompiledStep(functools.partial(train, model, optimizer(model.parameters())))
        try:
            step(_part(_batches()[0]))
        except (UnsupportedOptionError, TensorReadError) as error:
            said[kind] = str(error)
        assert all(torch.equal(value, before[name]) for name, value in _weights(model).items())

    refused("changed in forward", lambda: nn.Sequential(_Changing(8, 8)), _plain)
    refused("not in forward", _net, _uncalled)
    refused("mean of rows", _net, _centralized)
    refused("written by out=", lambda: nn.Sequential(_Scaling(8, 8)), _plain)
    refused("norm of a matrix", _net, _spectral)
    refused("in a transform", _net, _transformed)
    refused("a row", _net, _zeroed)
    refused("a read", _net, _read)
    refused("reads norms", _net, _plain, functools.partial(torch.optim.Adafactor, lr=0.05))
    model = _sharded()
    optimizer = _adamw(model.parameters())
    model(_part(_batches()[0]).to("tpu")).square().mean().backward()
    for kind, call in {
        "outside of a step": optimizer.step,
        "pickled": lambda: torch.save(model, io.BytesIO()),
        "another scheme": lambda: distribute_module(_net(), partition_fn="tp"),
    }.items():
        with pytest.raises(UnsupportedOptionError) as error:
            call()
        said[kind] = str(error.value)
    with pytest.raises(ConfigError, match="no parameter of Linear has a dimension that 2 ranks can split"):
        _sharded(nn.Linear(3, 1))
    return said


def test_what_needs_more_than_a_shard_is_refused() -> None:
    for said in on_ranks(2, _refusals):
        for kind in ("changed in forward", "written by out="):
            assert "a parameter is changed in the model's forward" in said[kind]
        for kind, name in (("not in forward", "linear"), ("mean of rows", "mean"), ("norm of a matrix", "linalg_norm")):
            assert f"{name} of a shard" in said[kind]
        assert "of a shard in a transform of torch.func" in said["in a transform"]
        assert "setitem of a shard" in said["a row"]
        assert "tensor read inside the step" in said["a read"]
        assert all("test_shards.py:" in said[kind] for kind in list(said)[:7])
        assert "Adafactor updates shards of parameters operation by operation" in said["reads norms"]
        assert "outside of a step" in said["outside of a step"]
        assert "pickle model.state_dict()" in said["pickled"]
        assert "'fsdp' (a shard of it on each)" in said["another scheme"]


def _alone(what: str) -> str:
    model = _sharded()
    rows = _part(_batches()[0]).to("tpu")
    with pytest.raises(RankError) as error:
        if dist.get_rank() == 0:
            model.state_dict() if what == "state" else model(rows)
        else:
            xla_adapters.CompiledStep(lambda batch: model(batch).square().mean())(rows)
    return str(error.value)


@pytest.mark.parametrize(
    ("what", "said"),
    [("state", "the gathering of shards, as for a state_dict"), ("call", "a call of Sequential outside of a step")],
)
def test_a_rank_that_asks_for_the_whole_alone_is_named(what: str, said: str) -> None:
    assert all(f"ank 0 is at: {said}" in error for error in on_ranks(2, functools.partial(_alone, what)))


def _chosen() -> list[bool]:
    xla_adapters.initialize(spmd=True)
    budgets = (None, 2000, 10_000)
    models = [distribute_module(_net(), partition_fn=ShardingConfig(memory_budget=budget)) for budget in budgets]
    return [next(model.parameters()).shape != next(_net().parameters()).shape for model in models]


def test_auto_shards_a_model_whose_state_needs_half_of_the_memory() -> None:
    """It takes 3,392 bytes."""
    assert on_ranks(2, _chosen) == [[False, True, False]] * 2


# ---- values ------------------------------------------------------------------------------------------


def _states() -> dict[str, Any]:
    model = _sharded()
    torch.manual_seed(7)
    given = {name: torch.randn_like(value) for name, value in _net().state_dict().items()}
    model.load_state_dict(given)
    optimizer = _adamw(model.parameters())
    xla_adapters.CompiledStep(functools.partial(_plain, model, optimizer))(_part(_batches()[0]))
    # torch's counts of steps would be the optimizer's own.
    saved, weights = copy.deepcopy(optimizer.state_dict()), _weights(model)
    other = _sharded()
    other.load_state_dict(weights)
    resumed = _adamw(other.parameters())
    resumed.load_state_dict(saved)
    with pytest.raises(ConfigError, match=r"whole 'exp_avg' of the shape \[16, 8\] .*share_state\(optimizer\)"):
        xla_adapters.CompiledStep(functools.partial(_plain, other, resumed))(_part(_batches()[1]))
    share_state(resumed)
    resumed.load_state_dict(saved)
    for trained, updates in ((model, optimizer), (other, resumed)):
        xla_adapters.CompiledStep(functools.partial(_plain, trained, updates))(_part(_batches()[1]))
    rows = _batches()[2]
    with torch.no_grad(), whole_parameters(model):
        # A number of calls of each rank's own.
        outputs = next(iter([model(rows.to("tpu")).cpu() for _ in range(1 + dist.get_rank())]))
    expected = _net()
    expected.load_state_dict(model.state_dict())
    return {
        "shapes": [list(value.shape) for value in saved["state"][0].values()],
        "loaded": _weights(model),
        "resumed": _weights(other),
        "error": (outputs - expected(rows)).abs().max().item(),
    }


def _is_freed() -> bool:
    model = _sharded()
    xla_adapters.CompiledStep(functools.partial(_plain, model, _adamw(model.parameters())))(_part(_batches()[0]))
    known = weakref.ref(model)
    del model
    gc.collect()
    return known() is None


def test_a_model_is_freed_with_its_last_reference() -> None:
    assert on_ranks(2, _is_freed) == [True, True]


def test_states_are_whole_and_can_be_loaded() -> None:
    for each in on_ranks(2, _states):
        assert each["shapes"] == [[], [16, 8], [16, 8]]
        assert each["error"] < 1e-5
        for name, value in each["loaded"].items():
            assert torch.equal(value, each["resumed"][name])


def _generated(on_cpu: bool) -> list[list[int]]:
    """Each rank's rows end after another number of tokens."""
    torch.manual_seed(0)
    count = int(os.environ.get("WORLD_SIZE", "1"))
    kind: Any = transformers.Seq2SeqTrainer if on_cpu else hf_trainer.Seq2SeqTrainer
    model = tiny("t5", attn_implementation="eager")
    generator = torch.Generator().manual_seed(1)
    rows = [
        {"input_ids": torch.randint(2, 60, (8,), generator=generator), "labels": torch.tensor([5, 6, 7])}
        for _ in range(8)
    ]
    arguments = transformers.Seq2SeqTrainingArguments(
        tempfile.mkdtemp(),
        per_device_eval_batch_size=4 // count,
        predict_with_generate=True,
        generation_max_length=8,
        report_to="none",
        disable_tqdm=True,
        **({"use_cpu": True} if on_cpu else {}),
    )
    more = {} if on_cpu else {"sharding": "fsdp"}
    model.generation_config.eos_token_id = list(range(0, 40, 2))
    trainer = kind(model, arguments, eval_dataset=rows, **more)
    with contextlib.suppress(AttributeError):
        model.generation_config.pad_token_id = 0
    predictions: Any = trainer.predict(rows).predictions
    return [[int(token) for token in row if token > 0] for row in predictions]


def test_ranks_generate_texts_of_different_lengths() -> None:
    expected = run_in_child(functools.partial(_generated, True))
    assert len({len(row) for row in expected}) > 1
    assert on_ranks(2, functools.partial(_generated, False)) == [expected] * 2
