"""Runs a user's script in this process, for `check` and `preflight`: with changed trainers, and nothing is saved.

`put_in` has adapters change the trainers of other libraries when a script constructs them. A package registers an entry
point of the group `xla_adapters.check`. Its name is that of a class with its module (`library.module.Trainer`). Its
value is a function `(kind, hand) -> type`: for the class that the script instantiates, which is that class or one
derived from it, it returns the class derived from `kind` that is instantiated instead.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import safetensors.torch
import torch

from xla_adapters.checkpoint import Checkpoint, CheckpointStore
from xla_adapters.config import XLAConfig
from xla_adapters.errors import ConfigError
from xla_adapters.utils.location import line_of_caller
from xla_adapters.utils.patching import replaced

GROUP = "xla_adapters.check"
# Files that are told of.
_MOST = 20


def run_command(command: list[str]) -> None:
    """Runs a script in this process, as `__main__`.

    Args:
        command: the script and its arguments; or `-m`, a module and its arguments.
    """
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = command
    # As `python SCRIPT` does; with -m it is the present folder, which is there already.
    sys.path[0] = str(Path(command[0]).resolve().parent)
    runpy.run_path(command[0], run_name="__main__")


# ---- trainers ----------------------------------------------------------------------------------------


class Stop(BaseException):
    """Ends the script: it has run the steps that were asked for. No `Exception`, so that nobody handles it."""


class Loops(Protocol):
    """What a pre-flight does with the loops of a trainer."""

    def train(self, loop: Callable[[], object]) -> None:
        """Runs a training loop until it has updated once."""

    def evaluate(self, loop: Callable[[], object]) -> None:
        """Runs an evaluation loop for one step."""

    @property
    def is_taking(self) -> bool:
        """Whether such a loop is running."""

    def end(self) -> None:
        """Ends the script."""


@dataclass(frozen=True, kw_only=True)
class Hand:
    """What an adapter is given to change a trainer with.

    Attributes:
        folder: a temporary folder for what the trainer writes.
        change: notes what was replaced, in words.
        skip: notes what was not saved, in words.
        sharding: for trainers that do not shard by themselves; None leaves them as they are.
        shapes: for trainers without `shapes=`; None leaves them as they are.
        told_epochs: called with how often a training will read its data.
        loops: what to do instead of training and evaluating; None to do that.
        has_values: whether tensors on the device have values, as in a training.
        keeps_steps: whether a trainer whose steps are not this package's is an error.
    """

    folder: Path
    change: Callable[[str], None]
    skip: Callable[[str], None]
    sharding: str | None = None
    shapes: Mapping[str, Any] | None = None
    told_epochs: Callable[[float], None] = lambda epochs: None
    loops: Loops | None = None
    has_values: bool = True
    keeps_steps: bool = False

    def put_steps(self, note: str) -> None:
        """Notes that a trainer gets the steps of this package.

        Args:
            note: in words.

        Raises:
            ConfigError: steps are to stay as they are.
        """
        if self.keeps_steps:
            raise ConfigError(
                f"--save-programs: a run of this script would not use the saved programs, which are of {note}. Train "
                "with hf_trainer's Trainer or with XLAEagerStrategy"
            )
        self.change(note)


@contextmanager
def put_in(hand: Hand) -> Iterator[None]:
    """A context in which the classes that entry points name are changed as soon as their modules are imported."""
    classes: dict[str, list[EntryPoint]] = {}
    for entry in entry_points(group=GROUP):
        classes.setdefault(entry.name.rpartition(".")[0], []).append(entry)
    changed: list[type] = []

    def imported(module: ModuleType) -> None:
        for entry in classes[module.__name__]:
            kind = getattr(module, entry.name.rpartition(".")[2])
            if "__new__" not in vars(kind):
                kind.__new__ = staticmethod(_new(entry, hand))
                changed.append(kind)

    finder = _Finder(frozenset(classes), imported)
    sys.meta_path.insert(0, finder)
    try:
        for name in classes:
            if name in sys.modules:
                imported(sys.modules[name])
        yield
    finally:
        sys.meta_path.remove(finder)
        for kind in changed:
            del kind.__new__


def _new(entry: EntryPoint, hand: Hand) -> Any:
    made: dict[type, type] = {}

    def __new__(kind: type, *args: Any, **options: Any) -> Any:
        if kind not in made.values() and kind not in made:
            made[kind] = entry.load()(kind, hand)
        return object.__new__(made.get(kind, kind))

    # What reads the arguments of the class (LightningCLI) finds those of its `__init__`.
    __new__.__wrapped__ = object.__new__  # type: ignore[attr-defined]
    return __new__


class _Finder(importlib.abc.MetaPathFinder):
    """Calls a function with each of the named modules when it has been imported."""

    def __init__(self, names: frozenset[str], imported: Callable[[ModuleType], None]) -> None:
        self._names = names
        self._imported = imported

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name not in self._names:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._imported)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any, imported: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._imported = imported

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        # Code that looks at the module's loader (`inspect`, `importlib.resources`) needs the real one.
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._imported(module)


def warning_only(change: Callable[[str], None]) -> Callable[[Callable[[XLAConfig], None]], Callable[[XLAConfig], None]]:
    """A wrapper of `XLAConfig.__post_init__`: steps are compiled, and nothing that costs time is an error.

    Args:
        change: notes what was replaced, in words.
    """

    def wrapper(check: Callable[[XLAConfig], None]) -> Callable[[XLAConfig], None]:
        def checked(config: XLAConfig) -> None:
            for name, value in (("xla_mode", "eager+compile"), ("on_graph_break", "warn"), ("on_recompile", "warn")):
                given = getattr(config, name)
                if name == "xla_mode" and given != value:
                    change(f"xla_mode={given!r}: checked as {value!r}, the mode that compiles steps")
                object.__setattr__(config, name, value)
            object.__setattr__(config, "max_graphs", None)
            check(config)

        return checked

    return wrapper


# ---- files -------------------------------------------------------------------------------------------


@contextmanager
def skipping_saves(folder: Path, skip: Callable[[str], None]) -> Iterator[None]:
    """Has `torch.save` and `save_file` of safetensors write no file, and checkpoint stores change nothing.

    Args:
        folder: a temporary one: a store returns what it has saved, so it saves there.
        skip: called with what was not saved, in words.
    """
    save_checkpoint, elsewhere = CheckpointStore.save, str(folder / "checkpoints")

    def in_memory_only(save: Callable[..., None]) -> Callable[..., None]:
        def saved(value: Any, file: Any, *args: Any, **options: Any) -> None:
            if isinstance(file, (str, os.PathLike)):
                skip(f"{os.fspath(file)} ({line_of_caller()})")
            else:
                save(value, file, *args, **options)

        return saved

    def saved_elsewhere(store: CheckpointStore, step: int, *args: Any, **options: Any) -> Checkpoint:
        skip(f"the checkpoint of step {step} ({line_of_caller()})")
        return save_checkpoint(CheckpointStore(elsewhere), step, *args, **options)

    def not_removed(store: CheckpointStore, *args: Any, **options: Any) -> list[str]:
        return []

    with ExitStack() as stack:
        stack.enter_context(replaced(torch, "save", in_memory_only(torch.save)))
        save_file = in_memory_only(safetensors.torch.save_file)
        stack.enter_context(replaced(safetensors.torch, "save_file", save_file))
        stack.enter_context(replaced(CheckpointStore, "save", saved_elsewhere))
        for name in ("rotate", "remove", "recover"):
            stack.enter_context(replaced(CheckpointStore, name, not_removed))
        yield


# Folders of caches and settings of libraries (matplotlib's fonts), beside those of the user.
_CACHES = ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "MPLCONFIGDIR", "HF_HOME", "TORCH_HOME")


class FilesWritten:
    """The files that Python code opens for writing outside of folders for temporary files and caches, from now on.

    A hook cannot be removed from a process (`sys.addaudithook`), so it belongs in one of its own.

    Args:
        note: called with the path of each, once.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._seen: set[str] = set()
        caches = [os.environ.get(name, "") for name in _CACHES]
        ignored = (tempfile.gettempdir(), "~/.cache", "~/.config", *filter(None, caches), "/dev", "/proc", "/sys")
        self._ignored = tuple(str(Path(folder).expanduser().absolute()) + os.sep for folder in ignored)
        sys.addaudithook(self._on_event)

    def _on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            writes = any(letter in mode for letter in "wax+") if mode else flags & (os.O_WRONLY | os.O_RDWR)
        elif event == "os.mkdir":
            path, writes = arguments[0], not os.path.exists(arguments[0])
        else:
            return
        if not writes or isinstance(path, int) or len(self._seen) >= _MOST:
            return
        full = str(Path(os.fsdecode(path)).absolute())
        if not (full in self._seen or (full + os.sep).startswith(self._ignored) or "__pycache__" in full):
            self._seen.add(full)
            self._note(full)
