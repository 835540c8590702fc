from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.sharding.samples import make_plan
from xla_adapters.errors import ConfigError
from xla_adapters.sharding import ActivationPlan, CollectiveCost, Mesh, ParameterPlan, PlanCost, ShardingPlan

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
    with pytest.raises(ConfigError, match=r"'2d' has no parameter 'lm_head\.bias': it was made for another model"):
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
