from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser
from typing import Any

import pytest

from tests.sharding.samples import make_plan
from xla_adapters.errors import ConfigError
from xla_adapters.sharding import (
    ActivationPlan,
    Measurement,
    Mesh,
    ParameterPlan,
    PlanCost,
    ShardingPlan,
    human_bytes,
    human_seconds,
    table,
)
from xla_adapters.sharding.plan_report import bytes_per_device, dtype_bytes, fold, ranges, ratio, report
from xla_adapters.sharding.visualize import (
    PALETTE,
    as_html,
    as_text,
    mesh_grid,
    slice_numbers,
    slices,
    tensor_grid,
    visualize,
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
    for describe in (report, as_text):
        with pytest.raises(ConfigError, match=f"width={width!r} is not a valid value; valid values: an integer >= 60"):
            describe(make_plan(), width=width)


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


GRID = Mesh.data_and_model(2, 4)


def one_parameter(mesh: Mesh, shape: tuple[int, ...], spec: Any, name: str = "w") -> ShardingPlan:
    parameter = ParameterPlan(name=name, shape=shape, dtype="float32", spec=spec)
    return ShardingPlan(name="test", mesh=mesh, parameters=(parameter,), batch=("data",))


@pytest.mark.parametrize(
    ("shape", "spec", "wanted"),
    [
        ((16, 8), (None, None), {"[:, :]": (0, 1, 2, 3, 4, 5, 6, 7)}),
        ((16, 8), ("data", None), {"[0:8, :]": (0, 1, 2, 3), "[8:16, :]": (4, 5, 6, 7)}),
        (
            (16, 8),
            (None, "model"),
            {"[:, 0:2]": (0, 4), "[:, 2:4]": (1, 5), "[:, 4:6]": (2, 6), "[:, 6:8]": (3, 7)},
        ),
        ((2, 2), ("data", None), {"[0:1, :]": (0, 1, 2, 3), "[1:2, :]": (4, 5, 6, 7)}),
        ((), (), {"[]": (0, 1, 2, 3, 4, 5, 6, 7)}),
        # Ten rows over four devices: three each, and one for the last.
        ((10,), ("model",), {"[0:3]": (0, 4), "[3:6]": (1, 5), "[6:9]": (2, 6), "[9:10]": (3, 7)}),
    ],
)
def test_which_device_holds_which_slice(shape: tuple[int, ...], spec: Any, wanted: dict[str, tuple[int, ...]]) -> None:
    assert {str(part): part.devices for part in slices(GRID, shape, spec)} == wanted


def test_the_first_of_two_axes_is_the_outermost() -> None:
    one = slice_numbers(slices(GRID, (16,), (("data", "model"),)))
    other = slice_numbers(slices(GRID, (16,), (("model", "data"),)))
    assert [one[device] for device in range(8)] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert [other[device] for device in range(8)] == [0, 2, 4, 6, 1, 3, 5, 7]


@pytest.mark.parametrize("shape", [(8,), (2, 4), (8, 1), (1, 8), (2, 2, 2), (256, 1), (16, 16), (128, 2), (4, 4, 16)])
def test_a_mesh_is_laid_out_with_every_device_once(shape: tuple[int, ...]) -> None:
    mesh = Mesh(shape=shape, axis_names=tuple("abc"[: len(shape)]))
    grid = mesh_grid(mesh)
    assert sorted(device for row in grid.cells for device in row) == list(range(mesh.size))
    assert len(grid.rows) == len(grid.cells) <= 32
    assert all(len(row) <= len(grid.columns) for row in grid.cells)
    panels = grid.panels(5)
    assert sorted(device for panel in panels for row in panel.cells for device in row) == list(range(mesh.size))
    assert all(len(panel.columns) <= 5 for panel in panels)


def test_rows_and_columns_are_named_after_axes() -> None:
    grid = mesh_grid(Mesh(shape=(2, 3, 2), axis_names=("data", "seq", "model")))
    assert grid.rows[:4] == ("data=0 seq=0", "data=0 seq=1", "data=0 seq=2", "data=1 seq=0")
    assert grid.columns == ("model=0", "model=1")
    assert grid.cells[3] == (6, 7)
    # More rows than can be drawn: the longer axis goes across.
    assert mesh_grid(Mesh(shape=(64, 2), axis_names=("data", "model"))).rows == ("model=0", "model=1")


@pytest.mark.parametrize(
    ("shape", "spec", "rows", "columns"),
    [
        ((16, 8), (None, None), ("",), ("",)),
        ((16, 8), ("data", None), ("0:8", "8:16"), ("",)),
        ((16, 8), (None, "data"), ("",), ("0:4", "4:8")),
        ((16,), ("data",), ("",), ("0:8", "8:16")),
        ((16, 8), ("data", "model"), ("0:8", "8:16"), ("0:2", "2:4", "4:6", "6:8")),
        ((16, 3, 8), ("data", None, "model"), ("0:8", "8:16"), ("0:2", "2:4", "4:6", "6:8")),
    ],
)
def test_a_tensor_is_laid_out_as_it_is_split(shape: Any, spec: Any, rows: Any, columns: Any) -> None:
    parts = slices(GRID, shape, spec)
    grid = tensor_grid(parts, 16)
    assert (grid.rows, grid.columns) == (rows, columns)
    assert [number for row in grid.cells for number in row] == list(range(len(parts)))


def test_a_long_split_is_laid_out_in_rows() -> None:
    parts = slices(Mesh.data_and_model(40, 1), (80,), ("data",))
    grid = tensor_grid(parts, 16)
    assert grid.rows == ("0:32", "32:64", "64:80")
    assert [len(row) for row in grid.cells] == [16, 16, 8]


def test_text_shows_devices_and_the_slice_each_holds() -> None:
    lines = as_text(make_plan(), "model.layers.2.up.weight").splitlines()
    assert lines == [
        "mesh data=2 x model=4 (8 devices)",
        "",
        "split over (model, data): 8 slices, one copy of each",
        "  model.layers.2.up.weight",
        "        model",
        "         0    1    2    3",
        "       +----+----+----+----+",
        "data=0 | 0  | 1  | 2  | 3  |",
        "       | s0 | s2 | s4 | s6 |",
        "       +----+----+----+----+",
        "data=1 | 4  | 5  | 6  | 7  |",
        "       | s1 | s3 | s5 | s7 |",
        "       +----+----+----+----+",
        "model.layers.2.up.weight (4096, 1024):",
        "  s0 = [0:1024, 0:512] on 0         s1 = [0:1024, 512:1024] on 4      s2 = [1024:2048, 0:512] on 1",
        "  s3 = [1024:2048, 512:1024] on 5   s4 = [2048:3072, 0:512] on 2      s5 = [2048:3072, 512:1024] on 6",
        "  s6 = [3072:4096, 0:512] on 3      s7 = [3072:4096, 512:1024] on 7",
    ]


def test_copies_can_be_seen() -> None:
    text = as_text(make_plan(), "lm_head.weight")
    assert "4 slices, 2 copies of each" in text
    assert text.count("| s0 | s1 | s2 | s3 |") == 2
    assert "s0 = [0:256, :] on 0,4" in text
    assert "every device holds a whole copy (8 copies)" in as_text(make_plan(), "model.layers.0.norm.weight")


def test_the_whole_plan_has_one_picture_per_spec_and_one_of_the_batch() -> None:
    text = as_text(make_plan(layers=100, odd=7))
    assert re.findall(r"^(split over .*|not split): ", text, re.MULTILINE) == [
        "split over (model, -)",
        "split over (-, model)",
        "split over (model, data)",
        "not split",
    ]
    assert "batch: 2 parts over data" in text
    assert "model.layers.{0-6,8-99}.up.weight (4096, 1024)" in text
    assert "model.embed.weight (1024, 64), = lm_head.weight" in text
    # 300 parameters more make no line more.
    assert len(text.splitlines()) == len(as_text(make_plan(layers=4, odd=2)).splitlines())


@pytest.mark.parametrize("shape", [(16, 16), (256, 1), (1, 256), (128, 2), (2, 128)])
@pytest.mark.parametrize("width", [80, 110])
def test_256_devices_fit_into_the_width(shape: tuple[int, int], width: int) -> None:
    mesh = Mesh.data_and_model(*shape)
    text = as_text(one_parameter(mesh, (1024, 1024), ("data", "model")), width=width)
    assert max(map(len, text.splitlines())) <= width
    held = re.findall(r"(\d+):s(\d+)", text)
    assert sorted(int(device) for device, _ in held) == list(range(256))
    assert len(text.splitlines()) < 220


def test_an_unknown_parameter_is_answered_with_near_ones() -> None:
    with pytest.raises(ConfigError, match=r"no parameter 'lm_head\.weigth', near: lm_head\.weight"):
        as_text(make_plan(), "lm_head.weigth")


def test_forms() -> None:
    plan = make_plan()
    assert visualize(plan) == as_text(plan)
    assert visualize(plan, form="html") == as_html(plan)
    with pytest.raises(ConfigError, match="form='svg' is not a valid value; valid values: 'text', 'html'"):
        visualize(plan, form="svg")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="an HTML page shows the whole plan"):
        visualize(plan, "lm_head.weight", form="html")


def _luminance(colour: str) -> float:
    channels = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize(("colour", "ink"), PALETTE.items())
def test_labels_can_be_read_on_every_colour(colour: str, ink: str) -> None:
    """The least contrast of text by WCAG 2.1."""
    light, dark = sorted((_luminance(colour), _luminance(ink)), reverse=True)
    assert (light + 0.05) / (dark + 0.05) >= 4.5


def test_the_palette_is_that_of_okabe_and_ito() -> None:
    # From their "Color Universal Design": black, orange, sky blue, bluish green, yellow, blue, vermillion, purple.
    published = [(0, 0, 0), (230, 159, 0), (86, 180, 233), (0, 158, 115), (240, 228, 66), (0, 114, 178), (213, 94, 0)]
    published.append((204, 121, 167))
    assert sorted(PALETTE) == sorted("#{:02X}{:02X}{:02X}".format(*colour) for colour in published)


def cells(page: str) -> list[tuple[str, str, str, str]]:
    """What is drawn: hint, class of the colour, and both labels."""
    return re.findall(r'<td class="(c\d)" title="([^"]*)">([^<]*)<br>([^<]*)</td>', page)


def test_cells_of_one_slice_have_one_colour() -> None:
    plan = one_parameter(GRID, (1024, 512), ("model", None))
    _, drawn = as_html(plan).split("<h2>split over")
    by_slice: dict[str, set[str]] = {}
    for colour, hint, _, _ in cells(drawn):
        by_slice.setdefault(re.findall(r"\bs\d+\b", hint)[0], set()).add(colour)
    assert len(cells(drawn)) == 8 + 4
    assert sorted(by_slice) == ["s0", "s1", "s2", "s3"]
    assert len(set.union(*by_slice.values())) == 4
    assert all(len(colours) == 1 for colours in by_slice.values())
    assert ("c2", "device 6: s2 [512:768, :]", "6", "s2") in cells(drawn)
    assert ("c2", "s2 [512:768, :]: devices 2,6", "s2", "2,6") in cells(drawn)


@pytest.mark.parametrize("shape", [(2, 4), (16, 16), (256, 1)])
def test_every_device_and_every_slice_is_drawn(shape: tuple[int, int]) -> None:
    plan = one_parameter(Mesh.data_and_model(*shape), (1024, 1024), ("data", "model"))
    _, drawn = as_html(plan).split("<h2>split over")
    assert len(cells(drawn)) == 2 * plan.mesh.size


class Page(HTMLParser):
    """Collects tags and headings, and fails on a tag that is closed out of turn."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.headings: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)


def test_the_page_has_one_section_per_spec_however_many_layers() -> None:
    small, large = as_html(make_plan(layers=4)), as_html(make_plan(layers=100))
    for page in (Page(small), Page(large)):
        assert page.headings == [
            "Batch",
            "split over (model, -)",
            "split over (-, model)",
            "split over (model, data)",
            "not split",
        ]
    assert len(large) < 1.02 * len(small)
    assert "model.layers.{0-1,3-99}.up.weight" in large


def test_the_page_needs_nothing_from_outside() -> None:
    text = as_html(make_plan())
    page = Page(text)
    assert not page.tags & {"script", "link", "img", "iframe", "object", "use", "image"}
    assert not page.attributes & {"src", "href", "xlink:href", "onclick", "onload"}
    assert "url(" not in text
    assert "@import" not in text
    assert not re.findall(r"https?://", text)


def test_names_are_escaped() -> None:
    nasty = "<script>alert('1')</script>&\"x\""
    plan = make_plan(notes=(nasty,))
    parameter = ParameterPlan(name=nasty, shape=(8, 8), dtype=nasty, spec=("data", None), tied=(nasty + "t",))
    plan = ShardingPlan(name=nasty, mesh=plan.mesh, parameters=(parameter,), batch=("data",), notes=(nasty,))
    text = as_html(plan)
    assert "script" not in Page(text).tags
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    axes = Mesh(shape=(2, 4), axis_names=("<data>", "&model"))
    Page(as_html(ShardingPlan(name="x", mesh=axes, parameters=(), batch=("<data>",))))


def test_256_devices_and_hundreds_of_parameters_make_a_page_of_modest_size() -> None:
    text = as_html(make_plan(Mesh.data_and_model(16, 16), layers=200))
    Page(text)
    assert len(text) < 1_000_000
