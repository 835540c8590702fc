"""Private names of other libraries that the packages use; `python -m tests.private_apis` writes the table of them.

A name is private if a part of it begins with one underscore. Detected are names that are reached from an import
(`torch._C._x`, `from torch.overrides import _x`) or an alias in a file (`_C = torch._C`), not attributes of instances.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.architecture import ROOT, modules, tree

LIBRARIES = ("torch_xla", "torch_tpu", "torch", "transformers", "accelerate", "lightning")
TABLE = ROOT / "docs" / "contributing" / "private-apis.md"
CONTRACTS = ROOT / "tests" / "contract"
# Those of torch_tpu, which have an environment of their own.
OF_TORCH_TPU = ROOT / "tests" / "torch_tpu" / "test_private_names.py"


def _names(path: Path) -> Iterator[str]:
    known: dict[str, str] = {}
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                known[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield f"{node.module}.{alias.name}"
    for node in tree(path).body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            full = _full_name(node.value, known)
            for target in targets:
                if isinstance(target, ast.Name) and full:
                    known[target.id] = full
    inner = {id(node.value) for node in ast.walk(tree(path)) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Attribute) and id(node) not in inner and (full := _full_name(node, known)):
            yield full


def _full_name(node: ast.expr, known: dict[str, str]) -> str:
    if isinstance(node, ast.Name):
        return known.get(node.id, "")
    if isinstance(node, ast.Attribute):
        before = _full_name(node.value, known)
        return f"{before}.{node.attr}" if before else ""
    return ""


def _is_private(name: str) -> bool:
    library, *rest = name.split(".")
    return library in LIBRARIES and any(part.startswith("_") and not part.startswith("__") for part in rest)


def used() -> dict[str, list[str]]:
    """Private names, and the files of the packages that use them."""
    found: dict[str, set[str]] = {}
    for path in modules().values():
        for name in _names(path):
            if _is_private(name):
                found.setdefault(name, set()).add(str(path.relative_to(ROOT)))
    return {name: sorted(files) for name, files in sorted(found.items())}


def pinned(name: str) -> list[str]:
    """The contract tests that mention the last part of this name."""
    last = name.rpartition(".")[2]
    files = [OF_TORCH_TPU] if name.startswith("torch_tpu.") else sorted(CONTRACTS.glob("test_*.py"))
    return [
        str(path.relative_to(ROOT / "tests")) if path is OF_TORCH_TPU else path.name
        for path in files
        if last in _words(path)
    ]


def _words(path: Path) -> set[str]:
    words: set[str] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Attribute):
            words.add(node.attr)
        elif isinstance(node, ast.alias):
            words.add(node.name.rpartition(".")[2])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            words.update(node.value.replace("`", " ").replace("(", " ").replace(".", " ").replace("[", " ").split())
    return words


def table() -> str:
    """The text of docs/contributing/private-apis.md."""
    lines = [
        "# Private calls",
        "",
        "Private names of other libraries that are used, and the files in `tests/contract` that test them; those of",
        "torch_tpu are tested in `tests/torch_tpu`.",
        "Written by `python -m tests.private_apis`.",
        "",
        "| name | used in | pinned by |",
        "| --- | --- | --- |",
    ]
    for name, files in used().items():
        where = ", ".join(f"`{file.removeprefix('adapters/')}`" for file in files)
        lines.append(f"| `{name}` | {where} | {', '.join(f'`{file}`' for file in pinned(name))} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    TABLE.parent.mkdir(parents=True, exist_ok=True)
    TABLE.write_text(table(), encoding="utf-8")
