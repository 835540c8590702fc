from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.sharding.samples import make_plan
from xla_adapters.errors import ConfigError
from xla_adapters.sharding import (
    ActivationPlan,
    CollectiveCost,
    Mesh,
    ParameterPlan,
    PlanCost,
    ShardingConfig,
    ShardingPlan,
)
from xla_adapters.sharding.mesh import as_spec, axes_of, factorizations, render, replicated, used_axes

GRID = Mesh.data_and_model(2, 4)


def test_a_grid_knows_its_axes() -> None:
    assert Mesh(shape=(2, 4), axis_names=("data", "model")) == GRID
    assert GRID.size == 8
    assert (GRID.axis_size("data"), GRID.axis_size("model")) == (2, 4)
    assert str(GRID) == "data=2 x model=4"


def test_lists_become_tuples_so_that_a_mesh_can_be_a_key() -> None:
    mesh = Mesh(shape=[2, 4], axis_names=["data", "model"])  # type: ignore[arg-type]
    assert {mesh: 1}[GRID] == 1


@pytest.mark.parametrize(
    ("shape", "names", "message"),
    [
        ((2, 4), ("data",), "needs as many axis names"),
        ((), (), "needs as many axis names"),
        ((2, 4), ("data", "data"), "must differ"),
        ((2, 0), ("data", "model"), r"at least one device; got the shape \(2, 0\)"),
        ((2, -1), ("data", "model"), "at least one device"),
        ((2, 2.0), ("data", "model"), "at least one device"),
        ((2, True), ("data", "model"), "at least one device"),
        ((2, "4"), ("data", "model"), "at least one device"),
        ((2, 4), "ab", "must be a list of names"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(shape: Any, names: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Mesh(shape=shape, axis_names=names)


def test_an_unknown_axis_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"no axis 'rows'; its axes are 'data', 'model' \(data=2 x model=4\)"):
        GRID.axis_size("rows")


@pytest.mark.parametrize(
    ("spec", "shards", "local"),
    [
        ((None, None), 1, (16, 32)),
        (("data", None), 2, (8, 32)),
        ((None, "model"), 4, (16, 8)),
        (("data", "model"), 8, (8, 8)),
        ((("data", "model"), None), 8, (2, 32)),
        (((), None), 1, (16, 32)),
    ],
)
def test_shards_and_their_shapes(spec: Any, shards: int, local: tuple[int, ...]) -> None:
    assert GRID.shards(spec) == shards
    assert GRID.local_shape((16, 32), spec) == local
    GRID.check("weight", (16, 32), spec)


def test_the_largest_shard_counts_where_a_dimension_does_not_divide() -> None:
    assert GRID.local_shape((10,), ("model",)) == (3,)


@pytest.mark.parametrize(
    ("shape", "spec", "message"),
    [
        ((16, 32), ("data",), r"w: the spec \(data\) has 1 entries, the tensor 2 dimensions"),
        ((16, 32), ("rows", None), "w: the mesh has no axis 'rows'; its axes are 'data', 'model'"),
        ((16, 32), ("data", "data"), r"w: the spec \(data, data\) uses an axis twice"),
        ((16, 32), (("data", "data"), None), r"w: the spec \(data\+data, -\) uses an axis twice"),
        ((16, 30), (None, "model"), r"w: dimension 1 of \(16, 30\) cannot be split over \(model\) into 4 equal parts"),
        ((12, 30), (("data", "model"), None), r"dimension 0 .* into 8 equal parts"),
    ],
)
def test_a_tensor_that_cannot_be_split_so_is_refused_by_name(shape: Any, spec: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GRID.check("w", shape, spec)


def test_axes_of_specs() -> None:
    assert axes_of(None) == ()
    assert axes_of("data") == ("data",)
    assert used_axes((("data", "model"), None)) == ("data", "model")
    assert replicated(3) == (None, None, None)
    assert render(("data", None, ("model", "data"))) == "(data, -, model+data)"


def test_factorizations_are_all_and_each_once() -> None:
    assert list(factorizations(8)) == [(8, 1), (4, 2), (2, 4), (1, 8)]
    three = list(factorizations(12, axes=3))
    assert len(three) == len(set(three)) == 18
    assert all(math.prod(shape) == 12 for shape in three)


def test_specs_from_plain_values() -> None:
    assert as_spec(["data", None, ["model"], ["data", "model"], []]) == ("data", None, "model", ("data", "model"), None)


@pytest.mark.parametrize("values", [[1], [["data", 1]], [{"data": 1}], "data", None, 3])
def test_what_is_no_spec_is_refused(values: Any) -> None:
    with pytest.raises(ConfigError, match=r"no entry of a spec|is no spec"):
        as_spec(values)


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
        (None, "zero3", "sharding='zero3' is not a valid value; valid values: 'auto', 'dp'"),
        ("dp", None, "auto_sharding='dp' is not a valid value; .* goes to sharding="),
        (ShardingConfig(scheme="dp"), None, "goes to sharding="),
    ],
)
def test_flags_that_say_nothing_clear_are_refused(auto_sharding: Any, sharding: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ShardingConfig.resolve(auto_sharding=auto_sharding, sharding=sharding)


Edit = Callable[[dict[str, Any]], None]


@pytest.mark.parametrize(
    "plan",
    [
        make_plan(),
        make_plan(predicted=None, measured=None, notes=()),
        ShardingPlan(name="dp", mesh=Mesh(shape=(8,), axis_names=("data",)), parameters=()),
        ShardingPlan(
            name="planner",
            mesh=Mesh(shape=(2, 2, 2), axis_names=("data", "model", "experts")),
            parameters=(
                ParameterPlan(name="w", shape=(16, 16), dtype="bfloat16", spec=(("data", "model"), "experts")),
                ParameterPlan(name="v", shape=(8, 8), dtype="float32", spec=("data", "model"), used=(None, None)),
                ParameterPlan(name="scale", shape=(), dtype="float32", spec=(), decided_by="override"),
            ),
            batch=("data", "experts"),
            activations=(
                ActivationPlan(module="layer", spec=("data", None)),
                ActivationPlan(module="layer", spec=(None, "model"), of="input", gradient=("data", None)),
            ),
        ),
    ],
    ids=["whole", "bare", "empty", "three axes"],
)
def test_what_is_saved_is_loaded(tmp_path: Path, plan: ShardingPlan) -> None:
    plan.save(tmp_path / "plan.json")
    assert ShardingPlan.load(tmp_path / "plan.json") == plan


def edited(folder: Path, edit: Edit) -> Path:
    path = folder / "plan.json"
    make_plan().save(path)
    values = json.loads(path.read_text())
    edit(values)
    path.write_text(json.dumps(values))
    return path


def test_an_edited_spec_is_taken(tmp_path: Path) -> None:
    def edit(values: dict[str, Any]) -> None:
        values["parameters"]["model.layers.0.up.weight"].update(spec=[["data", "model"], None], decided_by="user")
        values["activations"]["model.layers.0"] = [None, None, "model"]

    plan = ShardingPlan.load(edited(tmp_path, edit))
    assert plan.spec_of("model.layers.0.up.weight") == (("data", "model"), None)
    assert plan.spec_of("model.layers.1.up.weight") == ("model", None)
    assert plan.activations[0] == ActivationPlan(module="model.layers.0", spec=(None, None, "model"))


def test_a_file_from_before_inputs_were_held_is_read(tmp_path: Path) -> None:
    def edit(values: dict[str, Any]) -> None:
        del values["inputs"]
        for entry in values["parameters"].values():
            del entry["used"]

    assert ShardingPlan.load(edited(tmp_path, edit)) == make_plan()


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"spec": ["data", None], "gradient": ["rows", None]}, "layers.0: the mesh has no axis 'rows'"),
        ({"spec": ["data", None], "gradent": [None, None]}, "unexpected keyword argument 'gradent'"),
        ({"gradient": ["data", None]}, "spec"),
    ],
)
def test_a_constraint_that_makes_no_sense_is_refused(tmp_path: Path, entry: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ShardingPlan.load(edited(tmp_path, lambda values: values["activations"].update({"model.layers.0": entry})))


def set_parameter(**entries: Any) -> Edit:
    return lambda values: values["parameters"]["model.layers.0.up.weight"].update(entries)


def without(*path: str) -> Edit:
    def edit(values: dict[str, Any]) -> None:
        for key in path[:-1]:
            values = values[key]
        del values[path[-1]]

    return edit


def put(key: str, value: Any) -> Edit:
    return lambda values: values.update({key: value})


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            set_parameter(spec=["rows", None]),
            r"model\.layers\.0\.up\.weight: the mesh has no axis 'rows'.*'data', 'mod",
        ),
        (set_parameter(spec=["data", "data"]), "uses an axis twice"),
        (set_parameter(spec=["data"]), "has 1 entries, the tensor 2 dimensions"),
        (set_parameter(shape=[4094, 1024]), r"dimension 0 of \(4094, 1024\) cannot be split over \(model\)"),
        (set_parameter(shape=["4096", 1024]), r"the shape of .* must be a list of integers"),
        (set_parameter(shape=4096), r"the shape of .* must be a list of integers"),
        (set_parameter(spec="data"), "'data' is no spec"),
        (set_parameter(spec=None), "None is no spec"),
        (set_parameter(spec=[3, None]), "3 is no entry of a spec"),
        (set_parameter(tied="lm_head"), "tied of .* must be a list of strings"),
        (set_parameter(colour="red"), "unexpected keyword argument 'colour'"),
        (without("parameters", "model.embed.weight", "dtype"), "dtype"),
        (without("parameters", "model.embed.weight", "tied"), "it lacks 'tied'"),
        (without("mesh"), "it lacks 'mesh'"),
        (without("predicted", "collectives"), "it lacks 'collectives'"),
        (without("format"), "no sharding plan of format 2"),
        (put("format", 1), "no sharding plan of format 2"),
        (put("parameters", []), "no sharding plan: .*list"),
        (put("parameters", {"w": 3}), "no sharding plan"),
        (put("mesh", {"shape": [2, 4], "axis_names": ["data"]}), "needs as many axis names"),
        (put("mesh", {"shape": 8, "axis_names": ["data"]}), "no sharding plan"),
        (put("batch", "data"), "batch must be a list of strings; got 'data'"),
        (put("batch", ["rows"]), "batch: the mesh has no axis 'rows'"),
        (put("batch", ["data", "data"]), "batch: .* uses an axis twice"),
        (put("activations", {"model": ["rows"]}), "output of model: the mesh has no axis 'rows'"),
        (put("activations", {"model": ["data", "data"]}), "output of model: .* uses an axis twice"),
        (put("measured", {"bytes": 3}), "unexpected keyword argument 'bytes'"),
        (put("colour", "red"), "unexpected keyword argument 'colour'"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(tmp_path: Path, edit: Edit, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ShardingPlan.load(edited(tmp_path, edit))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{\n  'name': 3}", r"plan\.json is no sharding plan: line 2"),
        (b"", "is no sharding plan: line 1"),
        (b"[]", "no sharding plan of format 2"),
        (b"3", "no sharding plan of format 2"),
        (b"\xff\xfe\x00", "it is no text"),
    ],
)
def test_a_file_that_is_no_plan_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "plan.json").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        ShardingPlan.load(tmp_path / "plan.json")


def test_a_parameter_is_found_by_any_of_its_names() -> None:
    plan = make_plan()
    assert plan.spec_of("lm_head.weight") == plan.spec_of("model.embed.weight") == ("model", None)
    with pytest.raises(
        ConfigError, match=r"'2d' has no parameter 'lm_head\.bias', near: .*it was made for another model"
    ):
        plan.spec_of("lm_head.bias")


def test_costs_are_summed() -> None:
    cost = PlanCost(
        memory={"parameters": 3.0, "batch": 4.0},
        collectives=(
            CollectiveCost(kind="all-reduce", axis="data", count=2, wire_bytes=10.0, seconds=0.5),
            CollectiveCost(kind="all-gather", axis="data", count=1, wire_bytes=20.0, seconds=0.25),
        ),
        compute_seconds=2.0,
    )
    assert (cost.memory_bytes, cost.wire_bytes) == (7.0, 30.0)
    assert (cost.communication_seconds, cost.step_seconds) == (0.75, 2.75)


def test_a_plan_describes_and_draws_itself() -> None:
    plan = make_plan()
    assert "Sharding plan: 2d" in plan.report()
    assert max(map(len, plan.report(width=70).splitlines())) <= 70
    assert "4 slices" in plan.visualize("lm_head.weight")
    assert plan.visualize(form="html").startswith("<!DOCTYPE html>")
