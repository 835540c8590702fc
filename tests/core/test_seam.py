"""Only the seam touches torch_xla; the layers know only what they may."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_CORE, _HF, _LIGHTNING = _ROOT / "adapters" / "xla_adapters", _ROOT / "hf_trainer", _ROOT / "lightning_strategy"
_SEAM = _CORE / "backend" / "pjrt.py"


def _imports(path: Path) -> set[str]:
    """Top-level names a file imports, in whatever way: statement, importlib, or the name in a string."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module.split(".")[0])
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__", "find_spec"):
                found |= {
                    argument.value.split(".")[0]
                    for argument in node.args
                    if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
                }
    return found


def _files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


@pytest.mark.parametrize("folder", [_CORE, _HF, _LIGHTNING], ids=lambda folder: folder.name)
def test_only_the_seam_imports_torch_xla(folder: Path) -> None:
    offenders = [path.name for path in _files(folder) if path.parent != _SEAM.parent and "torch_xla" in _imports(path)]
    assert offenders == []
    assert "torch_xla" in _imports(_SEAM)


def test_layers_do_not_know_each_other() -> None:
    for path in _files(_CORE):
        assert not _imports(path) & {"transformers", "accelerate", "lightning", "hf_trainer", "lightning_strategy"}, (
            path
        )
    for path in _files(_HF):
        assert not _imports(path) & {"lightning", "lightning_strategy"}, path
    for path in _files(_LIGHTNING):
        assert not _imports(path) & {"transformers", "hf_trainer"}, path


def test_the_name_adapters_is_left_to_its_owner() -> None:
    assert not (_ROOT / "adapters" / "__init__.py").exists()


@pytest.mark.parametrize("folder", [_CORE, _HF, _LIGHTNING], ids=lambda folder: folder.name)
def test_packages_are_typed_and_files_are_short(folder: Path) -> None:
    assert (folder / "py.typed").exists()
    lengths = {path.name: len(path.read_text().splitlines()) for path in _files(folder)}
    assert {name: length for name, length in lengths.items() if length > 450} == {}
