from __future__ import annotations

import math
from typing import Any

import pytest

from xla_adapters.errors import ConfigError
from xla_adapters.sharding import Mesh
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
