"""Imports go down only, there is no cycle, and each library has one place that knows it."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from tests import architecture
from tests.architecture import CORE, DOORS, PACKAGES, ROOMS, ROOT, STRANGERS, imported, modules, room_of, tree

_FRAMEWORKS = {"transformers", "accelerate", "lightning", "pytorch_lightning"}
# The rest of the core is in folders.
_FILES_OF_THE_CORE = {"__init__.py", "cli.py", "config.py", "errors.py", "open_step.py"}
_LINES_OF_A_FILE = 700
_LINES_OF_A_FUNCTION = 60


def _libraries(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imported(path)}


def test_imports_go_down() -> None:
    upward = {
        edge: sorted(imports)
        for edge, imports in architecture.between_rooms().items()
        if ROOMS.index(edge[0]) > ROOMS.index(edge[1])
    }
    assert upward == {}


def test_strangers_do_not_import_each_other() -> None:
    between = architecture.between_rooms()
    assert [edge for pair in STRANGERS for edge in (pair, pair[::-1]) if edge in between] == []


@pytest.mark.parametrize("room", DOORS)
def test_a_room_is_entered_through_its_door(room: str) -> None:
    door = f"xla_adapters.{room}"
    around = {
        (source, target)
        for edge, imports in architecture.between_rooms().items()
        if edge[1] == room
        for source, target in imports
        if target not in (door, f"{door}.commands")
    }
    assert around == set()


def test_there_is_no_cycle() -> None:
    assert architecture.cycles() == []


def test_a_cycle_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set[str]()}
    monkeypatch.setattr(architecture, "edges", lambda: graph)
    assert architecture.cycles() == [["b", "c"]]


def test_only_one_folder_imports_torch_xla() -> None:
    folder = CORE / "runtime" / "torch_xla"
    users = {path.parent for path in modules().values() if "torch_xla" in _libraries(path)}
    assert users == {folder}


def test_the_core_knows_no_framework_and_no_adapter() -> None:
    for module, path in modules().items():
        others = _FRAMEWORKS | {"hf_trainer", "lightning_strategy"}
        if module.startswith("hf_trainer"):
            others = {"lightning", "pytorch_lightning", "lightning_strategy"}
        elif module.startswith("lightning_strategy"):
            others = {"transformers", "hf_trainer"}
        assert not _libraries(path) & others, module


def test_the_safety_analysis_knows_nothing_of_xla() -> None:
    for module in modules():
        if module.startswith("xla_adapters.replay.safety"):
            for target in architecture.edges()[module]:
                assert target.startswith("xla_adapters.replay.safety") or room_of(target) == "utils", (module, target)


def test_only_the_folder_of_the_cpu_asks_whether_it_is_one() -> None:
    """Plans for other devices are made on CPU devices too, so that measuring them is about CPUs by its nature.

    The tables of known traps, of what cannot load executables and of what loses NaN, say of each kind of device what
    goes wrong there.
    """
    allowed = {"cpu", "sharding", "tools"}
    tables = {
        "xla_adapters.tools.doctor",
        "xla_adapters.runtime.torch_xla.device",
    }
    asking = {
        module
        for module, path in modules().items()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Constant)
        and node.value == "CPU"
        and room_of(module) not in allowed
        and module not in tables
    }
    assert asking == set()


def test_nothing_imports_the_folder_of_the_cpu() -> None:
    """The runtime finds it by its name (`xla_adapters.runtime.extensions`), so that it can be deleted."""
    assert [source for source, target in architecture.between_rooms() if target == "cpu"] == []


def test_only_the_command_line_and_the_adapters_reach_the_tools() -> None:
    imports = (found for (_, room), found in architecture.between_rooms().items() if room == "tools")
    users = {source for found in imports for source, _ in found}
    assert {user for user in users if user.startswith("xla_adapters")} == {"xla_adapters.cli"}


def test_sharding_is_used_through_its_doors() -> None:
    doors = {"xla_adapters.sharding", *(f"xla_adapters.sharding.{room}" for room in ("measure", "planner", "state"))}
    beside = {
        (module, target)
        for module, targets in architecture.edges().items()
        for target in targets
        if room_of(module) != "sharding" and room_of(target) == "sharding" and target not in doors
    }
    assert beside == set()


def test_the_core_is_in_folders() -> None:
    assert {path.name for path in CORE.glob("*.py")} == _FILES_OF_THE_CORE


def test_the_name_adapters_is_left_to_its_owner() -> None:
    assert not (CORE.parent / "__init__.py").exists()


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_are_typed(package: str) -> None:
    assert (PACKAGES[package] / "py.typed").exists()


def _helpers() -> list[Path]:
    """The code beside the packages that is no test itself."""
    paths = [*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    return [path for path in paths if not path.name.startswith("test_")]


def _too_long() -> set[str]:
    found = set()
    for path in (*modules().values(), *_helpers()):
        name = path.relative_to(ROOT).as_posix()
        if len(path.read_text(encoding="utf-8").splitlines()) > _LINES_OF_A_FILE:
            found.add(name)
        for node in ast.walk(tree(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                assert node.end_lineno is not None
                if node.end_lineno - node.lineno + 1 > _LINES_OF_A_FUNCTION:
                    found.add(f"{name}: {node.name}")
    return found


def test_files_and_functions_are_short() -> None:
    assert _too_long() == set()


def test_warnings_are_in_one_file() -> None:
    """`xla-adapters explain` and the page of errors have an entry for each class of that file."""
    classes = {
        f"{path.relative_to(ROOT)}: {node.name}"
        for path in modules().values()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ClassDef) and node.name.endswith("Warning") and path != CORE / "errors.py"
    }
    assert classes == set()


def test_no_two_classes_of_the_core_have_one_name() -> None:
    found = Counter(
        node.name
        for path in CORE.rglob("*.py")
        for node in ast.iter_child_nodes(tree(path))
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in found.items() if count > 1] == []


def test_the_page_about_the_way_of_a_step_names_files_that_exist() -> None:
    text = (ROOT / "docs" / "how_it_works.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/]+(?:\.py|/))`", text))
    assert len(named) > 20
    assert {name for name in named if not (CORE / name).exists() and not (ROOT / name).exists()} == set()


def test_a_long_file_and_a_long_function_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    path = ROOT / "tests" / "architecture.py"
    monkeypatch.setattr("tests.test_architecture._LINES_OF_A_FILE", 10)
    monkeypatch.setattr("tests.test_architecture._LINES_OF_A_FUNCTION", 5)
    assert {path.relative_to(ROOT).as_posix(), "tests/architecture.py: edges"} <= _too_long()
