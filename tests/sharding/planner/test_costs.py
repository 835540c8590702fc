"""Collectives cost what the ring algorithm sends, in bytes computed by hand."""

from __future__ import annotations

from typing import get_args

import pytest

from xla_adapters.errors import ConfigError
from xla_adapters.sharding import Mesh
from xla_adapters.sharding.config import TopologyName
from xla_adapters.sharding.planner import Topology
from xla_adapters.sharding.planner.costs import Fabric, total

_MESH = Mesh.data_and_model(2, 4)


def _fabric(**settings: object) -> Fabric:
    values = {"flops": 1.0, "memory_bandwidth": 1.0, "memory_bytes": 1.0, "bandwidth": 10.0, "latency": 2.0}
    return Fabric(mesh=_MESH, topology=Topology(name="test", **{**values, **settings}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("method", "wire", "seconds"),
    [
        ("all_reduce", 1200.0, 120.0 + 6 * 2.0),
        ("all_gather", 600.0, 60.0 + 3 * 2.0),
        ("reduce_scatter", 600.0, 60.0 + 3 * 2.0),
        ("all_to_all", 150.0, 15.0 + 3 * 2.0),
        ("permute", 200.0, 20.0 + 2.0),
    ],
)
def test_ring(method: str, wire: float, seconds: float) -> None:
    (charge,) = getattr(_fabric(), method)("model", 800.0, "activations")
    assert (charge.wire_bytes, charge.seconds) == (wire, seconds)


def test_without_reduce_scatter_an_all_reduce_is_paid() -> None:
    (charge,) = _fabric(reduce_scatter=False).reduce_scatter("model", 800.0, "activations")
    assert (charge.kind, charge.wire_bytes) == ("all-reduce", 1200.0)
    assert not Topology.preset("cpu").reduce_scatter


def test_an_axis_of_one_is_silent() -> None:
    alone = Fabric(mesh=Mesh.data_and_model(8, 1), topology=_fabric().topology)
    assert alone.all_reduce("model", 800.0, "activations") == ()


def test_gradients_are_combined() -> None:
    assert _fabric().all_reduce("model", 800.0, "gradients")[0].seconds == 120.0


def test_sums() -> None:
    (charge,) = _fabric().all_reduce("model", 800.0, "gradients")
    (item,) = total([(charge, 2.0), (charge, 3.0)])
    assert (item.kind, item.axis, item.count, item.wire_bytes) == ("all-reduce", "model", 5, 6000.0)


def test_presets_and_refusals() -> None:
    assert Topology.preset("v5p").flops > Topology.preset("v4").flops > Topology.preset("v5e").flops
    with pytest.raises(ConfigError, match="v6e"):
        Topology.preset("v7")
    with pytest.raises(ConfigError, match="bandwidth=0"):
        _fabric(bandwidth=0)


def test_a_chip_of_ironwood_is_two_devices() -> None:
    device, chip = Topology.preset("tpu7x"), Topology.preset("v5p")
    assert 2 * device.flops == 2307e12
    assert 2 * device.memory_bytes == 192 * 1024**3
    assert 2 * device.memory_bandwidth == 7.38e12
    assert 2 * device.bandwidth == chip.bandwidth


def test_every_topology_that_can_be_named_has_figures() -> None:
    for name in get_args(TopologyName):
        assert Topology.preset(name).name == name
