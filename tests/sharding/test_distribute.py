"""`distribute_module` in a bare loop: the losses of one plain CPU, one graph per step, parameters cut as planned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch_xla.distributed.spmd as xs
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.functional import cross_entropy

import xla_adapters
from tests.isolation import isolated
from xla_adapters import distribute_module
from xla_adapters.errors import ConfigError, RuntimeOrderError
from xla_adapters.runtime import get_runtime
from xla_adapters.sharding import Mesh, ShardingConfig
from xla_adapters.sharding.distribute import place_batch, plan_of
from xla_adapters.sharding.mesh import tiles_of

ON_8 = {"CPU_NUM_DEVICES": "8"}
STEPS, ROWS = 5, 32
Batch = tuple[torch.Tensor, torch.Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up = nn.Linear(32, 128)
        self.down_proj = nn.Linear(128, 32)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values + self.down_proj(torch.relu(self.up(self.norm(values))))  # type: ignore[no-any-return]


class Net(nn.Module):
    """A tagger with tied weights and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        values = self.embed(tokens) * self.scale
        for block in self.blocks:
            values = block(values)
        return self.head(values)  # type: ignore[no-any-return]


def batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(0, 64, (ROWS, 6), generator=generator) for _ in range(STEPS)]
    return [(row, (row * 7) % 64) for row in tokens]


def plain_losses() -> list[float]:
    net, losses = Net(), []
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for tokens, targets in batches():
        loss = cross_entropy(net(tokens).flatten(0, 1), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train(net: nn.Module, *, to_device: Callable[[nn.Module, Batch], Batch] = place_batch) -> list[float]:
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses = []
    with xla_adapters.count() as counted:
        for batch in batches():
            tokens, targets = to_device(net, batch)
            with xla_adapters.step():
                loss = cross_entropy(net(tokens).flatten(0, 1), targets.flatten())
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
    assert (counted.compiles, counted.executions) == (1, STEPS)
    assert_cut_as_planned(net, optimizer)
    return [value.item() for value in get_runtime().transfers.to_host(losses)]


def assert_cut_as_planned(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    runtime, plan = get_runtime(), plan_of(net)
    for name, parameter in net.named_parameters():
        tiles = tiles_of(plan.mesh, plan.spec_of(name))
        state = optimizer.state[parameter]
        for value in (parameter, state["exp_avg"], state["exp_avg_sq"]):
            assert runtime.spmd.tiles_of(value) == (tiles if tiles.number > 1 else None), name


def cut(net: nn.Module) -> set[str]:
    runtime = get_runtime()
    return {name for name, value in net.named_parameters() if runtime.spmd.tiles_of(value) is not None}


def assert_losses(losses: list[float]) -> None:
    torch.testing.assert_close(losses, plain_losses(), atol=1e-5, rtol=0)


@isolated(env=ON_8)
@pytest.mark.parametrize("scheme", ["dp", "fsdp", "tp", "2d", pytest.param("AUTO", marks=pytest.mark.slow)])
def test_recipes_and_planned(scheme: str) -> None:
    net: Any = Net()
    assert distribute_module(net, partition_fn=scheme, example=batches()[0][0]) is net
    assert net.head.weight is net.embed.weight
    assert net.scale.device.type == "xla"
    assert_losses(train(net))
    if scheme != "AUTO":
        assert plan_of(net).name == scheme
        assert (len(cut(net)) > 0) == (scheme != "dp")
    else:
        assert plan_of(net).predicted is not None


@isolated(env=ON_8)
def test_inputs_that_nobody_split_are_split() -> None:
    net = distribute_module(Net(), partition_fn="fsdp")
    seen = []
    net.get_submodule("embed").register_forward_pre_hook(
        lambda _, args: seen.append(get_runtime().spmd.tiles_of(args[0]))  # type: ignore[func-returns-value]
    )
    assert_losses(train(net, to_device=lambda _, batch: (batch[0].to("xla"), batch[1].to("xla"))))
    assert {tiles.counts for tiles in seen if tiles is not None} == {(8, 1)}
    assert None not in seen


@isolated(env=ON_8)
def test_meshes_and_options() -> None:
    torch_mesh = DeviceMesh("xla", torch.arange(8).reshape(2, 4), mesh_dim_names=("data", "model"))
    net = distribute_module(Net(), torch_mesh, "2d")
    assert plan_of(net).mesh == Mesh.data_and_model(2, 4)
    assert_losses(train(net))
    config = ShardingConfig(scheme="fsdp", overrides={"blocks.0.up.weight": (None, "data")})
    net = distribute_module(Net(), Mesh.data_and_model(8, 1), config)
    assert plan_of(net).spec_of("blocks.0.up.weight") == (None, "data")
    assert_losses(train(net))


def megatron(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    """As a user of torch's `distribute_module` writes it."""
    if name.endswith(".up"):
        module.weight = nn.Parameter(distribute_tensor(module.weight, mesh, [Replicate(), Shard(0)]))  # type: ignore[arg-type]
    elif name.endswith("down_proj"):
        module.weight = nn.Parameter(distribute_tensor(module.weight, mesh, [Replicate(), Shard(1)]))  # type: ignore[arg-type]


@isolated(env=ON_8)
def test_a_partition_function_of_torch() -> None:
    net = distribute_module(Net(), Mesh.data_and_model(4, 2), megatron)
    assert cut(net) == {f"blocks.{n}.{part}.weight" for n in (0, 1) for part in ("up", "down_proj")}
    plan = plan_of(net)
    assert plan.spec_of("blocks.1.down_proj.weight") == (None, "model")
    assert {entry.decided_by for entry in plan.parameters if entry.name in cut(net)} == {"user"}
    assert type(net.get_submodule("blocks.0.up").weight) is nn.Parameter
    assert_losses(train(net))


@isolated(env=ON_8)
def test_none_copies_and_functions_around_the_forward_are_called() -> None:
    calls = []
    mesh = DeviceMesh("xla", torch.arange(8), mesh_dim_names=("data",))

    def input_fn(module: nn.Module, inputs: tuple[torch.Tensor, ...], device_mesh: DeviceMesh) -> Any:
        calls.append("input")
        assert device_mesh is mesh
        return (xs.mark_sharding(inputs[0], xs.Mesh(np.arange(8), (8,), ("data",)), ("data", None)),)

    def output_fn(module: nn.Module, outputs: torch.Tensor, device_mesh: DeviceMesh) -> Any:
        calls.append("output")
        return outputs * 1.0

    net = distribute_module(Net(), mesh, None, input_fn, output_fn)
    assert cut(net) == set()
    assert_losses(train(net, to_device=lambda _, batch: (batch[0].to("xla"), batch[1].to("xla"))))
    assert calls == ["input", "output"] * STEPS


@isolated(env=ON_8)
def test_what_was_placed_before_stays() -> None:
    xla_adapters.initialize(spmd=True)
    net, mesh = Net(), DeviceMesh("xla", torch.arange(8).reshape(4, 2), mesh_dim_names=("data", "model"))
    up: Any = net.get_submodule("blocks.0.up")
    up.weight = nn.Parameter(distribute_tensor(up.weight, mesh, [Shard(1), Replicate()]))
    distribute_module(net, mesh, "2d")
    entry = next(entry for entry in plan_of(net).parameters if entry.name == "blocks.0.up.weight")
    assert (entry.spec, entry.decided_by) == ((None, "data"), "user")
    assert_losses(train(net))


@isolated(env=ON_8)
def test_what_cannot_work() -> None:
    net = Net()
    for arguments, message in (
        (
            {"partition_fn": "zero3"},
            "valid values: 'AUTO', 'dp', 'fsdp', 'tp', '2d', a ShardingConfig, a function, None",
        ),
        ({"device_mesh": Mesh.data_and_model(3, 2)}, "is for 6 devices, and there are 8"),
        ({"device_mesh": DeviceMesh("xla", torch.arange(8))}, "no names for its axes"),
        ({"device_mesh": DeviceMesh("xla", torch.arange(7, -1, -1), mesh_dim_names=("data",))}, "rising order"),
        ({"device_mesh": (2, 4)}, "valid values: None, a Mesh, a DeviceMesh"),
        ({"device_mesh": Mesh(shape=(8,), axis_names=("rows",)), "partition_fn": "dp"}, "the mesh has neither"),
        ({"input_fn": lambda inputs, mesh: inputs}, "input_fn is called with three arguments"),
    ):
        with pytest.raises(ConfigError, match=message):
            distribute_module(net, **arguments)
    with pytest.raises(ConfigError, match="not distributed"):
        plan_of(net)
    distribute_module(net, partition_fn="dp")
    with pytest.raises(ConfigError, match="call it once"):
        distribute_module(net, partition_fn="dp")


@isolated(env=ON_8)
def test_after_the_runtime_started_without_it() -> None:
    xla_adapters.initialize()
    with pytest.raises(RuntimeOrderError, match=r"initialize\(spmd=True\)"):
        distribute_module(Net(), partition_fn="dp")
