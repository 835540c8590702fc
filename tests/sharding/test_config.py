from __future__ import annotations

from typing import Any

import pytest

from xla_adapters.errors import ConfigError
from xla_adapters.sharding import Mesh, ShardingConfig, ShardingPlan

PLAN = ShardingPlan(name="mine", mesh=Mesh.data_and_model(2, 4), parameters=())


def test_the_defaults() -> None:
    config = ShardingConfig()
    assert (config.scheme, config.partitioner, config.keep_user_sharding) == ("auto", "planner", True)
    assert (config.mesh_shape, config.axis_names, config.memory_budget, config.topology) == (None,) * 4
    assert config.overrides == {}
    assert config.mesh(8) is None


@pytest.mark.parametrize(
    "values",
    [
        {"scheme": "auto"},
        {"scheme": "dp"},
        {"scheme": "fsdp"},
        {"scheme": "tp"},
        {"scheme": "2d"},
        {"partitioner": "planner"},
        {"keep_user_sharding": False},
        {"memory_budget": 1},
        {"memory_budget": None},
        {"topology": "v5p"},
        {"mesh_shape": (2, 4)},
        {"mesh_shape": (8,), "axis_names": ("data",)},
        {"mesh_shape": (2, 2, 2), "axis_names": ("data", "model", "experts")},
        {"overrides": {"*.weight": ("model", None)}},
    ],
)
def test_every_option_is_taken_as_it_is(values: dict[str, Any]) -> None:
    config = ShardingConfig.from_dict(values)
    assert {name: getattr(config, name) for name in values} == values
    assert config == ShardingConfig(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"scheme": "ddp"}, "scheme='ddp' is not a valid value; valid values: 'auto', 'dp', 'fsdp', 'tp', '2d'"),
        ({"scheme": None}, "scheme=None is not a valid value"),
        ({"partitioner": "alpa"}, "partitioner='alpa' is not supported: .* give partitioner='planner'"),
        ({"keep_user_sharding": "yes"}, "keep_user_sharding='yes' is not .*: True, False"),
        ({"keep_user_sharding": 1}, "keep_user_sharding=1 is not .*: True, False"),
        ({"memory_budget": 0}, "memory_budget=0 is not a valid value; valid values: an integer >= 1"),
        ({"memory_budget": 16e9}, "valid values: an integer >= 1"),
        ({"memory_budget": True}, "valid values: an integer >= 1"),
        (
            {"topology": "v9"},
            "topology='v9' is not a valid value; valid values: None, 'cpu', 'v4', 'v5e', 'v5p', 'v6e', 'tpu7x'",
        ),
        ({"measure_top_k": -1}, "measure_top_k=-1 is not a valid value; valid values: an integer >= 0"),
        ({"measure_top_k": 1, "scheme": "tp"}, "measure_top_k=1 is for planning; scheme='tp' is a template"),
        ({"plan": "plan.json"}, "plan='plan.json' is not a valid value; .* read a file with ShardingPlan.load"),
        ({"plan": PLAN, "mesh_shape": (1, 8)}, r"mesh_shape=\(1, 8\) is for planning, and plan= is made already"),
        ({"plan": PLAN, "scheme": "dp"}, "scheme and overrides are for planning"),
        ({"memory_budget": 8, "scheme": "fsdp"}, "is a template, which does not look at it: use scheme='auto'"),
        ({"axis_names": ("data",)}, "mesh_shape, which is not given"),
        ({"mesh_shape": (8,)}, r"mesh_shape=\(8,\) needs axis_names="),
        ({"mesh_shape": 8}, r"mesh_shape=8 is not a valid value; valid values: .* \(2, 4\)"),
        ({"mesh_shape": "24"}, "mesh_shape='24' is not a valid value"),
        ({"mesh_shape": (2, 0)}, "at least one device"),
        ({"mesh_shape": ("2", 4)}, "at least one device"),
        ({"mesh_shape": (2, 4), "axis_names": ("data",)}, "needs as many axis names"),
        ({"mesh_shape": (2, 4), "axis_names": ("data", "data")}, "must differ"),
        ({"mesh_shape": (1, 1, 1, 8), "axis_names": "data"}, "must be a list of names"),
        ({"mesh_shape": (2, 4), "axis_names": ("x", "y")}, "an axis named 'data', layers over one named 'model'"),
        ({"overrides": {"*": "model"}}, "'model' is no spec"),
        ({"overrides": {"*": None}}, "None is no spec"),
        ({"overrides": {"*": [1]}}, "1 is no entry of a spec"),
        ({"overrides": [("*", ("model",))]}, "valid values: a dict of specs by name pattern"),
        (
            {"shceme": "dp"},
            "unknown sharding option.* shceme; valid options: scheme, mesh_shape, axis_names, partition",
        ),
    ],
)
def test_what_is_not_valid_is_refused_with_what_is(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ShardingConfig.from_dict(values)


def test_lists_from_json_are_understood() -> None:
    config = ShardingConfig.from_dict(
        {"mesh_shape": [2, 4], "axis_names": ["data", "model"], "overrides": {"*": [["data", "model"], None]}}
    )
    assert config.overrides == {"*": (("data", "model"), None)}
    assert config.mesh(8) == Mesh.data_and_model(2, 4)


def test_a_mesh_of_two_axes_needs_no_names() -> None:
    assert ShardingConfig(mesh_shape=(4, 2)).mesh(8) == Mesh.data_and_model(4, 2)


def test_a_mesh_for_other_devices_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"mesh_shape=\(2, 4\) is for 8 devices, and there are 4"):
        ShardingConfig(mesh_shape=(2, 4)).mesh(4)


RFC = {"auto_sharding": {"partitioner": "planner", "keep_user_sharding": False}}


def test_the_dict_of_the_rfc_is_understood() -> None:
    wanted = ShardingConfig(partitioner="planner", keep_user_sharding=False)
    assert ShardingConfig.from_dict(RFC) == wanted
    assert ShardingConfig.resolve(auto_sharding=RFC, sharding=None) == wanted
    assert ShardingConfig.resolve(auto_sharding=RFC["auto_sharding"], sharding=None) == wanted
    assert ShardingConfig.resolve(auto_sharding=None, sharding=RFC) == wanted
    assert RFC == {"auto_sharding": {"partitioner": "planner", "keep_user_sharding": False}}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"auto_sharding": {}, "scheme": "dp"}, "beside 'auto_sharding' there are scheme: put them inside"),
        ({"auto_sharding": False}, "leave the option out"),
        ({"auto_sharding": "tp"}, "auto_sharding='tp' is not a valid value; valid values: True, a dict"),
        ({"auto_sharding": {"partitionre": "planner"}}, "unknown sharding option.* partitionre"),
    ],
)
def test_a_wrong_dict_of_that_form_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ShardingConfig.from_dict(values)


@pytest.mark.parametrize(
    ("auto_sharding", "sharding", "wanted"),
    [
        (None, None, None),
        (False, None, None),
        (True, None, ShardingConfig()),
        ({}, None, ShardingConfig()),
        ({"auto_sharding": True}, None, ShardingConfig()),
        (None, "fsdp", ShardingConfig(scheme="fsdp")),
        (False, "fsdp", ShardingConfig(scheme="fsdp")),
        (None, {"scheme": "auto", "topology": "v4"}, ShardingConfig(scheme="auto", topology="v4")),
        (None, ShardingConfig(scheme="2d"), ShardingConfig(scheme="2d")),
    ],
)
def test_either_flag_of_an_adapter_gives_a_config(auto_sharding: Any, sharding: Any, wanted: Any) -> None:
    assert ShardingConfig.resolve(auto_sharding=auto_sharding, sharding=sharding) == wanted


@pytest.mark.parametrize(
    ("auto_sharding", "sharding", "message"),
    [
        (True, "dp", "auto_sharding= or sharding=, not both"),
        (RFC, {"scheme": "dp"}, "not both"),
        (None, "zero3", "scheme='zero3' is not a valid value"),
        ("dp", None, "auto_sharding='dp' is not a valid value; .* goes to sharding="),
        (ShardingConfig(scheme="dp"), None, "goes to sharding="),
    ],
)
def test_flags_that_say_nothing_clear_are_refused(auto_sharding: Any, sharding: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ShardingConfig.resolve(auto_sharding=auto_sharding, sharding=sharding)
