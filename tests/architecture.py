"""The import graph of the packages, in layers; `python -m tests.architecture` prints it.

A room is a package, a folder of the core, or a file beside these. It imports only what stands below it in `ROOMS`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CORE = ROOT / "adapters" / "xla_adapters"
PACKAGES = {"xla_adapters": CORE, "hf_trainer": ROOT / "hf_trainer", "lightning_strategy": ROOT / "lightning_strategy"}

# Top to bottom.
ROOMS = (
    *("hf_trainer", "lightning_strategy", "cli", "xla_adapters"),
    *("loop", "tools", "insight", "data", "checkpoint", "cpu", "sharding", "replay", "tracing"),
    *("lowerings", "runtime", "config", "open_step", "hlo", "utils", "errors"),
)
# Neither imports the other, though one stands above.
STRANGERS = (
    *(("hf_trainer", "lightning_strategy"), ("insight", "data"), ("sharding", "replay"), ("cpu", "sharding")),
    *(("checkpoint", "tracing"), ("checkpoint", "replay")),
)
# Rooms of which others import the door, `__init__`, only; the command line imports `commands`, too.
DOORS = ("checkpoint",)


@cache
def modules() -> dict[str, Path]:
    """The files of all packages by the names of their modules."""
    found = {}
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            name = ".".join((package, *path.relative_to(folder).with_suffix("").parts))
            found[name.removesuffix(".__init__")] = path
    return found


def room_of(module: str) -> str:
    """The room of a module."""
    first, *rest = module.split(".")
    return rest[0] if first == "xla_adapters" and rest else first


@cache
def tree(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(path: Path) -> Iterator[str]:
    """The full names that a file imports: in functions, for type checkers, and by `import_module`, too."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None, f"{path}:{node.lineno}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__", "find_spec"):
                yield from (
                    argument.value
                    for argument in node.args
                    if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
                )


@cache
def edges() -> dict[str, set[str]]:
    """For each module the modules of the packages that it imports."""
    known = modules()
    return {
        module: {
            target
            for name in imported(path)
            for target in (name if name in known else name.rpartition(".")[0],)
            if target in known and target != module
        }
        for module, path in known.items()
    }


def between_rooms() -> dict[tuple[str, str], set[tuple[str, str]]]:
    """The imports from each room to each other one."""
    found: dict[tuple[str, str], set[tuple[str, str]]] = {}
    for module, targets in edges().items():
        for target in targets:
            if room_of(module) != room_of(target):
                found.setdefault((room_of(module), room_of(target)), set()).add((module, target))
    return found


def cycles() -> list[list[str]]:
    """Import cycles: strongly connected modules (Tarjan 1972)."""
    graph, numbers, lowest, stack, found = edges(), dict[str, int](), dict[str, int](), list[str](), list[list[str]]()

    def visit(module: str) -> None:
        numbers[module] = lowest[module] = len(numbers)
        stack.append(module)
        for target in graph[module]:
            if target not in numbers:
                visit(target)
                lowest[module] = min(lowest[module], lowest[target])
            elif target in stack:
                lowest[module] = min(lowest[module], numbers[target])
        if lowest[module] == numbers[module]:
            group = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(group) > 1:
                found.append(sorted(group))

    for module in graph:
        if module not in numbers:
            visit(module)
    return found


def lines_of(room: str) -> int:
    """Lines of all files of a room."""
    paths = (path for module, path in modules().items() if room_of(module) == room)
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def main() -> None:
    """Prints the rooms from top to bottom, their lines, and what each imports."""
    between = between_rooms()
    for room in ROOMS:
        targets = [target for target in ROOMS if (room, target) in between]
        print(f"{room:20} {lines_of(room):6} lines   imports {', '.join(targets) or 'nothing'}")
    print(f"cycles: {cycles() or 'none'}")


if __name__ == "__main__":
    main()
