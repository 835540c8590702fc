from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from typing import Any

import pytest

from tests.sharding.samples import make_plan
from xla_adapters.errors import ConfigError
from xla_adapters.sharding import Mesh, ParameterPlan, ShardingPlan
from xla_adapters.sharding.visualize import (
    LEAST_CONTRAST,
    PALETTE,
    as_html,
    as_svg,
    as_text,
    colour_of,
    contrast,
    label_on,
    mesh_grid,
    slice_numbers,
    slices,
    tensor_grid,
    visualize,
)

GRID = Mesh.data_and_model(2, 4)
SVG = "{http://www.w3.org/2000/svg}"


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


def test_a_width_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="width=20 is not a valid value; valid values: an integer >= 60"):
        as_text(make_plan(), width=20)


def test_an_unknown_parameter_is_answered_with_near_ones() -> None:
    for draw in (as_text, as_svg):
        with pytest.raises(ConfigError, match=r"no parameter 'lm_head\.weigth'; near: lm_head\.weight"):
            draw(make_plan(), "lm_head.weigth")


def test_forms() -> None:
    plan = make_plan()
    assert visualize(plan) == as_text(plan)
    assert visualize(plan, "lm_head.weight", form="svg") == as_svg(plan, "lm_head.weight")
    assert visualize(plan, form="html") == as_html(plan)
    with pytest.raises(ConfigError, match="form='png' is not a valid value; valid values: 'text', 'svg', 'html'"):
        visualize(plan, form="png")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="an HTML page shows the whole plan"):
        visualize(plan, "lm_head.weight", form="html")


@pytest.mark.parametrize("colour", PALETTE)
def test_labels_can_be_read_on_every_colour(colour: str) -> None:
    assert contrast(label_on(colour), colour) >= LEAST_CONTRAST


def test_contrast_is_that_of_the_guidelines() -> None:
    assert contrast("#000000", "#FFFFFF") == pytest.approx(21)
    assert contrast("#777777", "#FFFFFF") == pytest.approx(4.48, abs=0.005)
    assert contrast("#0072B2", "#0072B2") == 1
    # A grey where either label just about does.
    assert contrast(label_on("#757575"), "#757575") >= LEAST_CONTRAST


def test_the_palette_is_that_of_okabe_and_ito() -> None:
    # From their "Color Universal Design": black, orange, sky blue, bluish green, yellow, blue, vermillion, purple.
    published = [(0, 0, 0), (230, 159, 0), (86, 180, 233), (0, 158, 115), (240, 228, 66), (0, 114, 178), (213, 94, 0)]
    published.append((204, 121, 167))
    assert sorted(PALETTE) == sorted("#{:02X}{:02X}{:02X}".format(*colour) for colour in published)
    assert colour_of(8) == colour_of(0) != colour_of(1)


def cells(svg: str) -> list[tuple[str, str, list[str], set[str]]]:
    """What is drawn: hint, colour, labels and their colours."""
    found = []
    for group in ElementTree.fromstring(svg).iter(f"{SVG}g"):
        hint, box = group.find(f"{SVG}title"), group.find(f"{SVG}rect")
        if hint is not None and box is not None:
            texts = group.findall(f"{SVG}text")
            found.append(
                (
                    str(hint.text),
                    box.attrib["fill"],
                    [str(text.text) for text in texts],
                    {t.attrib["fill"] for t in texts},
                )
            )
    return found


def test_cells_of_one_slice_have_one_colour() -> None:
    drawn = cells(as_svg(make_plan(), "lm_head.weight"))
    assert len(drawn) == 8 + 4
    by_slice: dict[str, set[str]] = {}
    for hint, colour, _, _ in drawn:
        by_slice.setdefault(re.findall(r"\bs\d+\b", hint)[0], set()).add(colour)
    assert sorted(by_slice) == ["s0", "s1", "s2", "s3"]
    assert len(set.union(*by_slice.values())) == 4
    assert all(len(colours) == 1 for colours in by_slice.values())
    assert ("device 6: s2 [512:768, :]", colour_of(2), ["6", "s2"], {label_on(colour_of(2))}) in drawn
    assert ("s2 [512:768, :]: devices 2,6", colour_of(2), ["s2", "2,6"], {label_on(colour_of(2))}) in drawn


@pytest.mark.parametrize("shape", [(2, 4), (16, 16), (256, 1)])
def test_every_label_of_a_drawing_can_be_read(shape: tuple[int, int]) -> None:
    plan = one_parameter(Mesh.data_and_model(*shape), (1024, 1024), ("data", "model"))
    drawn = cells(as_svg(plan, "w"))
    assert len(drawn) == 2 * plan.mesh.size
    for _, colour, _, inks in drawn:
        assert all(contrast(ink, colour) >= LEAST_CONTRAST for ink in inks)
    sizes = [float(text.attrib["font-size"]) for text in ElementTree.fromstring(as_svg(plan, "w")).iter(f"{SVG}text")]
    assert min(sizes) >= 8


def test_nothing_is_drawn_outside_the_picture() -> None:
    for mesh in (GRID, Mesh.data_and_model(16, 16), Mesh(shape=(4, 4, 4), axis_names=("data", "seq", "model"))):
        root = ElementTree.fromstring(as_svg(one_parameter(mesh, (4096, 4096), ("data", "model")), "w"))
        width, height = float(root.attrib["width"]), float(root.attrib["height"])
        (moved,) = (group for group in root.iter(f"{SVG}g") if "transform" in group.attrib)
        offset = float(moved.attrib["transform"].removeprefix("translate(").split()[0])
        for part, start in ((root, 0.0), (moved, offset)):
            for box in part.iter(f"{SVG}rect"):
                if "x" in box.attrib and not (part is root and box in list(moved.iter(f"{SVG}rect"))):
                    assert start + float(box.attrib["x"]) + float(box.attrib["width"]) <= width
                    assert float(box.attrib["y"]) + float(box.attrib["height"]) <= height


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
        if tag not in ("meta",):
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
    assert set(re.findall(r"https?://[^\"<\s]+", text)) == {"http://www.w3.org/2000/svg"}


def test_names_are_escaped() -> None:
    nasty = "<script>alert('1')</script>&\"x\""
    plan = make_plan(notes=(nasty,))
    parameter = ParameterPlan(name=nasty, shape=(8, 8), dtype=nasty, spec=("data", None), tied=(nasty + "t",))
    plan = ShardingPlan(name=nasty, mesh=plan.mesh, parameters=(parameter,), batch=("data",), notes=(nasty,))
    text = as_html(plan)
    assert "script" not in Page(text).tags
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    title = ElementTree.fromstring(as_svg(plan, nasty)).find(f"{SVG}title")
    assert title is not None
    assert nasty in str(title.text)
    axes = Mesh(shape=(2, 4), axis_names=("<data>", "&model"))
    ElementTree.fromstring(as_svg(ShardingPlan(name="x", mesh=axes, parameters=(), batch=("<data>",))))


def test_256_devices_and_hundreds_of_parameters_make_a_page_of_modest_size() -> None:
    text = as_html(make_plan(Mesh.data_and_model(16, 16), layers=200))
    Page(text)
    assert len(text) < 1_000_000
