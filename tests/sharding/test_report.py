from __future__ import annotations

import dataclasses
import re

import pytest

from tests.sharding.samples import make_plan
from xla_adapters.errors import ConfigError
from xla_adapters.sharding import ActivationPlan, Measurement, Mesh, ParameterPlan, PlanCost, ShardingPlan
from xla_adapters.sharding.report import (
    bytes_per_device,
    dtype_bytes,
    fold,
    human_bytes,
    human_seconds,
    ranges,
    ratio,
    report,
    table,
)


def row(text: str, start: str) -> list[str]:
    """The cells of the only line that starts so."""
    (line,) = (line for line in text.splitlines() if line.startswith(start))
    return re.split(r"\s{2,}", line)


def section(text: str, title: str) -> str:
    (found,) = (part for part in text.split("\n\n") if part.startswith(title))
    return found


def test_the_header_names_scheme_mesh_batch_units_and_notes() -> None:
    head = report(make_plan()).split("\n\n")[0].splitlines()
    assert head == [
        "Sharding plan: 2d",
        "mesh    data=2 x model=4 (8 devices)",
        "batch   split over data",
        "units   kB = 1e3, MB = 1e6, GB = 1e9 bytes; all per device",
        "note    a vocabulary of 50257 does not divide by 4: not split",
    ]


def test_layers_that_agree_are_one_row_and_others_stay_apart() -> None:
    text = section(report(make_plan(layers=32, odd=5)), "Parameters")
    # 31 layers of 4096 x 1024 in float32, a quarter of each; and one layer split over all 8 devices.
    assert row(text, "model.layers.{0-4,6-31}.up.weight") == [
        "model.layers.{0-4,6-31}.up.weight",
        "(4096, 1024)",
        "(model, -)",
        "130 MB",
        "planner",
    ]
    assert row(text, "model.layers.5.up.weight")[1:] == ["(4096, 1024)", "(model, data)", "2.10 MB", "planner"]
    assert row(text, "model.layers.{0-31}.norm")[1:4] == ["(1024)", "(-)", "131 kB"]
    assert row(text, "model.embed.weight, = lm_head.weight")[1:] == ["(1024, 64)", "(model, -)", "65.5 kB", "user"]
    assert len(text.splitlines()) == 1 + 2 + 5 + 1


def test_the_total_is_the_sum_over_all_parameters() -> None:
    plan = make_plan()
    total = sum(bytes_per_device(entry, plan.mesh) for entry in plan.parameters)
    quarter = 4096 * 1024  # bytes of a quarter of the large weights
    assert total == 1024 * 64 + 3 * quarter + quarter / 2 + 4 * quarter + 4 * 4096
    assert row(section(report(plan), "Parameters"), "total")[1] == human_bytes(total)


def test_dtypes_are_named_where_they_differ() -> None:
    parameters = tuple(
        ParameterPlan(name=name, shape=(8, 16), dtype=dtype, spec=("data", None))
        for name, dtype in (("a", "float32"), ("b", "bfloat16"), ("c", "torch.float8_e4m3fn"))
    )
    text = report(ShardingPlan(name="dp", mesh=Mesh.data_and_model(2, 4), parameters=parameters))
    assert row(text, "a ")[1:4] == ["float32 (8, 16)", "(data, -)", "256 B"]
    assert row(text, "b ")[1:4] == ["bfloat16 (8, 16)", "(data, -)", "128 B"]
    assert row(text, "c ")[3] == "64 B"
    assert "batch   split over no axis" in text


def test_memory_is_listed_by_kind_with_what_was_measured_beside() -> None:
    text = section(report(make_plan()), "Memory")
    assert row(text, "parameters") == ["parameters", "12.0 MB"]
    assert row(text, "activations") == ["activations", "338 MB"]
    assert row(text, "total") == ["total", "350 MB", "420 MB", "1.20"]
    unmeasured = section(report(make_plan(measured=None)), "Memory")
    assert row(unmeasured, "total") == ["total", "350 MB"]
    assert "measured" not in unmeasured


def test_collectives_are_listed_with_what_they_are_for() -> None:
    text = section(report(make_plan()), "Collectives")
    assert row(text, "all-reduce") == ["all-reduce", "data", "9", "25.0 MB", "300 us", "gradients"]
    assert row(text, "all-gather") == ["all-gather", "model", "8", "5.00 MB", "100 us", "activations"]
    assert row(text, "total") == ["total", "17", "30.0 MB", "400 us"]
    assert "Collectives, predicted: none" in report(make_plan(predicted=PlanCost()))


def test_the_step_is_split_into_its_parts() -> None:
    text = section(report(make_plan()), "Step time")
    assert row(text, "compute") == ["compute", "1.60 ms", "80%"]
    assert row(text, "communication: gradients")[1:] == ["300 us", "15%"]
    assert row(text, "communication: activations")[1:] == ["100 us", "5%"]
    assert row(text, "total") == ["total", "2.00 ms", "100%"]


def test_prediction_and_measurement_stand_side_by_side() -> None:
    text = section(report(make_plan()), "Prediction and measurement")
    assert row(text, "sent by collectives")[1:] == ["30.0 MB", "45.0 MB", "1.50"]
    assert row(text, "memory")[1:] == ["350 MB", "420 MB", "1.20"]
    assert row(text, "all-reduce (count)")[1:] == ["9", "18", "2.00"]
    # Predicted but not found, and found but not predicted.
    assert row(text, "all-gather (count)")[1:] == ["8", "0", "0.00"]
    assert row(text, "all-to-all (count)")[1:] == ["0", "2", "-"]


def test_a_measurement_alone_and_nothing_at_all() -> None:
    alone = report(make_plan(predicted=None))
    assert row(section(alone, "Measured"), "sent by collectives")[1:] == ["45.0 MB"]
    assert "Memory" not in alone
    assert "Cost: neither predicted nor measured" in report(make_plan(predicted=None, measured=None))
    assert "Cost: neither" not in alone


def test_what_modules_take_and_what_is_put_together_for_them_is_listed() -> None:
    plan = make_plan()
    text = dataclasses.replace(
        plan,
        parameters=tuple(
            dataclasses.replace(entry, used=(None, None)) if entry.name.endswith("down.weight") else entry
            for entry in plan.parameters
        ),
        activations=(
            *plan.activations,
            ActivationPlan(module="model.layers.0.up", spec=("data", None, "model"), of="input"),
            ActivationPlan(module="model.embed", spec=("data", None), of="input", gradient=("data", "model")),
        ),
    ).report()
    assert "gathered before use: model.layers.{0-3}.down.weight" in text
    assert row(text, "model.layers.{0-3} ") == ["model.layers.{0-3}", "(data, -, -)"]
    assert row(text, "model.layers.0.up ") == ["model.layers.0.up", "(data, -, model)"]
    assert row(text, "model.embed ") == ["model.embed", "(data, -), gradient (data, model)"]
    assert "what the module takes" in text
    assert "what the module takes" not in plan.report()


@pytest.mark.parametrize("width", [60, 80, 110, 200])
def test_no_line_is_too_wide_and_nothing_is_cut_off(width: int) -> None:
    name = "a_module_with_a_very_long_name." * 6 + "weight"
    plan = make_plan(notes=("a long note " * 20,))
    parameters = (*plan.parameters, ParameterPlan(name=name, shape=(8,), dtype="float32", spec=(None,)))
    plan = ShardingPlan(
        name="2d", mesh=plan.mesh, parameters=parameters, predicted=plan.predicted, measured=plan.measured
    )
    lines = report(plan, width=width).splitlines()
    assert max(map(len, lines)) <= width
    start = next(index for index, line in enumerate(lines) if line.startswith("a_module"))
    first = lines[start].split("  ")[0]
    below = [line for line in lines[start + 1 :] if "(" not in line][:30]
    assert "".join([first, *below]).replace(" ", "").startswith(name)


@pytest.mark.parametrize("width", [0, 59, 80.0, "wide", True])
def test_a_width_that_cannot_be_is_refused(width: int) -> None:
    with pytest.raises(ConfigError, match="valid values: an integer >= 60"):
        report(make_plan(), width=width)


def test_a_report_has_no_bytes_of_nan_where_nothing_is_predicted() -> None:
    plan = make_plan(predicted=PlanCost(), measured=Measurement(wire_bytes=0, memory_bytes=0))
    assert "nan" not in report(plan)
    assert row(section(report(plan), "Prediction"), "memory")[1:] == ["0 B", "0 B", "-"]


def entry(name: str, shape: tuple[int, ...] = (4,), tied: tuple[str, ...] = ()) -> ParameterPlan:
    return ParameterPlan(name=name, shape=shape, dtype="float32", spec=(None,) * len(shape), tied=tied)


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        (["h.0.w", "h.1.w", "h.2.w"], ["h.{0-2}.w"]),
        (["h.0.w", "h.2.w", "h.4.w", "h.5.w"], ["h.{0,2,4-5}.w"]),
        (["h.7.w"], ["h.7.w"]),
        (["h.2.w", "h.10.w", "h.1.w"], ["h.{1-2,10}.w"]),
        (["conv1.w", "conv2.w"], ["conv1.w", "conv2.w"]),
        (["0.w", "1.w"], ["{0-1}.w"]),
        (["h.0.w", "h.0.b", "h.1.w", "h.1.b"], ["h.{0-1}.w", "h.{0-1}.b"]),
        (
            [f"h.{layer}.e.{expert}.w" for layer in range(3) for expert in range(2)],
            ["h.{0-2}.e.{0-1}.w"],
        ),
        # Layer 0 has one expert fewer: it stays on its own.
        (["h.0.e.0.w", "h.1.e.0.w", "h.1.e.1.w", "h.2.e.0.w", "h.2.e.1.w"], ["h.0.e.0.w", "h.{1-2}.e.{0-1}.w"]),
    ],
)
def test_folding(names: list[str], folded: list[str]) -> None:
    result = fold([entry(name) for name in names])
    assert [item.name for item in result] == folded
    assert sorted(part.name for item in result for part in item.parameters) == sorted(names)


def test_other_shapes_and_tied_weights_do_not_fold() -> None:
    result = fold([entry("h.0.w"), entry("h.1.w", (8,)), entry("h.2.w", tied=("x",)), entry("h.3.w", tied=("y",))])
    assert [item.name for item in result] == ["h.0.w", "h.1.w", "h.2.w", "h.3.w"]


def test_ranges() -> None:
    assert ranges([0, 4]) == "0,4"
    assert ranges([0, 4, 8, 12]) == "0,4,..,12"
    assert ranges([0, 1, 2, 8]) == "0-2,8"
    assert ranges([0, 4, 8, 13]) == "0,4,8,13"


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (999_949, "1.00 MB"),
        (1_000_000, "1.00 MB"),
        (12_345_678, "12.3 MB"),
        (345.6e6, "346 MB"),
        (1.5e9, "1.50 GB"),
        (2.5e12, "2.50 TB"),
        (-2e6, "-2.00 MB"),
    ],
)
def test_bytes_are_decimal(size: float, text: str) -> None:
    assert human_bytes(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (2.5, "2.50 s"), (0.0125, "12.5 ms"), (3e-6, "3.00 us"), (4e-8, "40.0 ns"), (9.999e-4, "1.00 ms")],
)
def test_seconds(seconds: float, text: str) -> None:
    assert human_seconds(seconds) == text


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        ("float32", 4),
        ("torch.bfloat16", 2),
        ("float16", 2),
        ("float64", 8),
        ("float8_e4m3fn", 1),
        ("float4_e2m1fn_x2", 1),
        ("complex64", 8),
        ("int64", 8),
        ("uint8", 1),
        ("bool", 1),
    ],
)
def test_bytes_of_dtypes(dtype: str, size: int) -> None:
    assert dtype_bytes(dtype) == size


@pytest.mark.parametrize("dtype", ["", "floaty", "32", "string", "nn", "Tensor"])
def test_what_is_no_dtype_is_refused(dtype: str) -> None:
    with pytest.raises(ConfigError, match="is no dtype"):
        dtype_bytes(dtype)


def test_ratios() -> None:
    assert (ratio(3, 2), ratio(1, 0), ratio(0, 2)) == ("1.50", "-", "0.00")


def test_the_widest_column_of_a_table_gives_way() -> None:
    lines = table(["name", "n"], [["one.two.three.four", "1"], ["x", "22"]], width=14, right=[1])
    assert lines == ["name         n", "----------  --", "one.two.     1", "three.four", "x           22"]
