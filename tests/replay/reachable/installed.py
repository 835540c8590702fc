"""Imports the package `reachable_helpers` as if `pip install` had put it below `site-packages`."""

from __future__ import annotations

import importlib.util
import linecache
import sys
import sysconfig
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

NAME = "reachable_helpers"
_SOURCES = Path(__file__).parent / "package"


def install() -> None:
    """Imports it anew. Nothing is written below `site-packages`: the code only says that it comes from there."""
    for name in [name for name in sys.modules if name == NAME or name.startswith(NAME + ".")]:
        del sys.modules[name]
    folder = Path(sysconfig.get_path("purelib")) / NAME
    package = _module(NAME, folder / "__init__.py", folder)
    for source in sorted(_SOURCES.glob("*.py")):
        file = folder / source.name
        text = source.read_text()
        # Without a time of its own, `linecache` does not look for the file.
        linecache.cache[str(file)] = (len(text), None, text.splitlines(keepends=True), str(file))
        module = package if source.stem == "__init__" else _module(f"{NAME}.{source.stem}", file)
        exec(compile(text, str(file), "exec", dont_inherit=True), vars(module))
        if module is not package:
            setattr(package, source.stem, module)


def _module(name: str, file: Path, folder: Path | None = None) -> types.ModuleType:
    spec = ModuleSpec(name, None, origin=str(file), is_package=folder is not None)
    if folder is not None:
        spec.submodule_search_locations = [str(folder)]
    module = importlib.util.module_from_spec(spec)
    module.__file__ = str(file)
    sys.modules[name] = module
    return module
