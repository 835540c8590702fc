"""`distribute_module` in a bare loop: the losses of one plain CPU, one graph per step, parameters cut as planned.

Models that carry placements: they become plain parameters on the mesh, and the plan is made around them.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch_xla.distributed.spmd as xs
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.functional import cross_entropy
from torch.testing._internal.distributed.fake_pg import FakeStore

import xla_adapters
from tests.isolation import isolated
from xla_adapters import distribute_module
from xla_adapters.errors import ConfigError, RuntimeOrderError
from xla_adapters.runtime import get_runtime
from xla_adapters.sharding import Mesh, ShardingConfig, accept_placements, place_batch, plan_of
from xla_adapters.sharding.distribute import mesh_and_spec, tiles_of_placements
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


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16, bias=False)
        self.tied = nn.Linear(32, 16, bias=False)
        self.tied.weight = self.down.weight
        self.register_buffer("table", torch.arange(8.0))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.tied(torch.relu(self.up(values)))  # type: ignore[no-any-return]


def xla_mesh() -> DeviceMesh:
    return DeviceMesh("xla", torch.arange(8).reshape(4, 2), mesh_dim_names=("data", "model"))


@isolated(env=ON_8)
def test_tensors_distributed_by_torch_xla_become_plain_parameters() -> None:
    xla_adapters.initialize(spmd=True)
    runtime, mesh, net = get_runtime(), xla_mesh(), Tied()
    values = {name: value.detach().clone() for name, value in net.state_dict().items()}
    net.up.weight = nn.Parameter(distribute_tensor(net.up.weight, mesh, [Replicate(), Shard(0)]))
    frozen = nn.Parameter(distribute_tensor(net.down.weight, mesh, [Shard(1), Replicate()]), requires_grad=False)
    net.down.weight = net.tied.weight = frozen
    net.table = distribute_tensor(net.table, mesh, [Shard(0), Replicate()])
    assert isinstance(net.up.weight, DTensor)
    assert set(accept_placements(net)) == {"up.weight", "down.weight", "tied.weight", "table"}
    assert type(net.up.weight) is nn.Parameter
    assert net.down.weight is net.tied.weight
    assert (net.up.weight.requires_grad, net.down.weight.requires_grad) == (True, False)
    own = Mesh.data_and_model(4, 2)
    assert runtime.spmd.tiles_of(net.up.weight) == tiles_of(own, ("model", None))
    assert runtime.spmd.tiles_of(net.down.weight) == tiles_of(own, (None, "data"))
    assert runtime.spmd.tiles_of(net.table) == tiles_of(own, ("data",))
    for name in ("up.weight", "down.weight", "table"):
        assert torch.equal(runtime.transfers.to_host([net.state_dict()[name]])[0], values[name]), name
    # What is marked in place is a plain parameter from the beginning.
    marked = nn.Linear(16, 16).to("xla")
    xs.mark_sharding(marked.weight, xs.Mesh(np.arange(8), (4, 2), ("data", "model")), ("data", None))
    assert accept_placements(marked) == []
    assert runtime.spmd.tiles_of(marked.weight) == tiles_of(own, ("data", None))


def _rank(rank: int, meeting: Path, results: Any) -> None:
    """One of two processes, each with two devices of its own, that hold halves of the parameters."""
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    mesh, net = init_device_mesh("cpu", (2,), mesh_dim_names=("data",)), Tied()
    expected = net.up.weight.detach().clone()
    net.up.weight = nn.Parameter(distribute_tensor(net.up.weight.detach(), mesh, [Shard(0)]))
    net.up.bias = nn.Parameter(distribute_tensor(net.up.bias.detach(), mesh, [Replicate()]))
    assert net.up.weight.to_local().shape == (16, 16)
    xla_adapters.initialize(spmd=True)
    accept_placements(net)
    runtime = get_runtime()
    cut = runtime.spmd.tiles_of(net.up.weight) == tiles_of(Mesh(shape=(2,), axis_names=("data",)), ("data", None))
    whole = net.up.bias.device.type == "xla" and runtime.spmd.tiles_of(net.up.bias) is None
    results.put((cut, whole, torch.equal(runtime.transfers.to_host([net.up.weight])[0], expected)))
    dist.destroy_process_group()


@isolated(env={"CPU_NUM_DEVICES": "2"})
def test_torchs_own_dtensors_are_brought_together_and_cut_again(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    ranks = [context.Process(target=_rank, args=(rank, tmp_path / "meet", results)) for rank in range(2)]
    for process in ranks:
        process.start()
    found = [results.get(timeout=200) for _ in ranks]
    for process in ranks:
        process.join()
    assert found == [(True, True, True)] * 2


def dtensor(placements: list[Any], *, names: tuple[str, ...] | None = ("dp", "tp"), order: Any = None) -> DTensor:
    ranks = torch.arange(8).reshape(4, 2) if order is None else order
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=names)
    with torch.device("meta"):
        return DTensor.from_local(
            torch.empty(2, 2), mesh, placements, run_check=False, shape=torch.Size((16, 16)), stride=(16, 1)
        )


@isolated
def test_placements_in_our_terms() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    grid = Mesh(shape=(4, 2), axis_names=("dp", "tp"))
    for placements, spec in (
        ([Shard(0), Shard(1)], ("dp", "tp")),
        ([Shard(1), Replicate()], (None, "dp")),
        ([Shard(0), Shard(0)], (("dp", "tp"), None)),
        # FSDP over tensor parallelism: what the layers' axis cut first is cut again.
        ([_StridedShard(0, split_factor=2), Shard(0)], (("tp", "dp"), None)),
        ([Replicate(), Replicate()], (None, None)),
    ):
        assert mesh_and_spec("w", dtensor(placements)) == (grid, spec)
        assert tiles_of_placements("w", dtensor(placements)) == tiles_of(grid, spec)
    unnamed, _ = mesh_and_spec("w", dtensor([Shard(0), Shard(1)], names=None))
    assert unnamed.axis_names == ("axis0", "axis1")
    turned = dtensor([Shard(0), Replicate()], order=torch.arange(8).reshape(2, 4).T.contiguous())
    assert tiles_of_placements("w", turned).devices == (0, 4, 1, 5, 2, 6, 3, 7)
    with pytest.raises(ConfigError, match="w is a partial sum over 'dp'"):
        mesh_and_spec("w", dtensor([Partial(), Replicate()]))


@isolated(env=ON_8)
def test_what_cannot_be_accepted() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    xla_adapters.initialize(spmd=True)
    net = nn.Linear(16, 16, bias=False)
    net.weight = nn.Parameter(dtensor([Shard(0), Replicate()]))
    with pytest.raises(ConfigError, match="weight is on the meta device"):
        accept_placements(net)
    net.weight = nn.Parameter(distribute_tensor(torch.zeros(16, 16), init_device_mesh("cpu", (8,)), [Shard(0)]))
    with pytest.raises(ConfigError, match="fake process group"):
        accept_placements(net)
    four = DeviceMesh("cpu", torch.arange(4))
    net.weight = nn.Parameter(distribute_tensor(torch.zeros(16, 16), four, [Replicate()]))
    with pytest.raises(ConfigError, match="on a mesh of 4 devices, and there are 8"):
        accept_placements(net)
