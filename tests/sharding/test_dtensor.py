"""Models that carry placements: they become plain parameters on the mesh, and the plan is made around them."""

from __future__ import annotations

import multiprocessing
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
from torch.testing._internal.distributed.fake_pg import FakeStore

import xla_adapters
from tests.isolation import isolated
from xla_adapters.errors import ConfigError
from xla_adapters.runtime import get_runtime
from xla_adapters.sharding import Mesh
from xla_adapters.sharding.distribute import accept_placements, mesh_and_spec, tiles_of_placements
from xla_adapters.sharding.mesh import tiles_of

ON_8 = {"CPU_NUM_DEVICES": "8"}


class Net(nn.Module):
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
    runtime, mesh, net = get_runtime(), xla_mesh(), Net()
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
    mesh, net = init_device_mesh("cpu", (2,), mesh_dim_names=("data",)), Net()
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
