"""Lines of the user's code: the one that caused an event, and the text of an argument in it."""

from __future__ import annotations

import ast
import linecache
import re
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch

_OWN_FOLDER = str(Path(__file__).resolve().parents[1])
_STDLIB = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")})
_SITE = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
# File names of code that was typed into an interpreter or a notebook; the last ones are those of %%time and %%timeit.
TYPED_IN = ("<stdin>", "<python-input-", "<ipython-input-", "<timed ", "<magic-timeit")
# Packages through which a read passes on its way down; the cause is never there.
_PLUMBING = ("torch", "torch_xla", "torch_tpu", "numpy", "_pytest", "pluggy", "accelerate", "safetensors")
_plumbing_prefixes: list[str] = [f"{site}/{package}/" for site in _SITE for package in _PLUMBING]
# Its `deprecated` wraps functions of torch_xla.
_plumbing_prefixes += [f"{site}/typing_extensions.py" for site in _SITE]
_framework_prefixes: list[str] = [_OWN_FOLDER + "/"]


def hide_folder(folder: str | Path) -> None:
    """Hides the files below `folder` from reported locations, as those of this package (the adapters call it)."""
    _framework_prefixes.append(str(Path(folder).resolve()) + "/")
    plumbing_files.clear()


def place_text(place: str) -> str:
    """How messages name a line: `file:line`, and `Cell In[3], line 4` for the code of a notebook's cell.

    Args:
        place: `file:line`. Any other text is returned as it is.
    """
    filename, _, lineno = place.rpartition(":")
    cell = _cell_of(filename)
    return f"{cell}, line {lineno}" if cell else place


def _cell_of(filename: str) -> str:
    """The cell of a notebook whose code has this file name, which is that of no file; empty if there is none.

    IPython knows which cell that is. If the same code ran several times, the last cell is named.
    """
    if filename.startswith("<timed "):
        return "below %%time"
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    named = getattr(getattr(shell, "compile", None), "format_code_name", lambda _: None)(filename)
    if named is None and (typed := re.match(r"(?:<|/tmp/)ipython-input-(\d+)-", filename)):
        # IPython before 8, and Colab.
        named = "Cell", f"In[{typed[1]}]"
    return " ".join(named) if named is not None else ""


@dataclass(frozen=True, kw_only=True)
class Location:
    """A line of source code, for error messages.

    Attributes:
        filename, lineno: where it is.
        function: in which one; empty if not known.
        is_user_code: whether the file lies outside the standard library and site-packages.
        called_from: for a line in a library, the line of the user's code that led there.
    """

    filename: str
    lineno: int
    function: str
    is_user_code: bool
    called_from: Location | None = None

    @property
    def source(self) -> str:
        """The text of the line, stripped (empty if the file cannot be read)."""
        return linecache.getline(self.filename, self.lineno).strip()

    @property
    def place(self) -> str:
        """File and line, as messages name them."""
        return place_text(f"{self.filename}:{self.lineno}")

    def __str__(self) -> str:
        text = self.place + (f" in {self.function}" if self.function.strip("<>") not in ("", "module") else "")
        if self.source:
            text += f": {self.source}"
        if self.called_from is not None:
            text += f"\n         called from {self.called_from}"
        return text


def warn_at(place: Location | None, message: str, category: type[Warning]) -> None:
    """Warns as `warnings.warn` does, of a line of the user's code instead of one of this package.

    Args:
        place: the line; None if it is not known.
        message, category: as for `warnings.warn`.
    """
    place = place and (place.called_from or place)
    if place is None:
        warnings.warn(message, category, stacklevel=3)
    else:
        warnings.warn_explicit(message, category, _cell_of(place.filename) or place.filename, place.lineno)


def is_made_up(filename: str) -> bool:
    """Whether a file name is that of generated code (`<string>`)."""
    return filename.startswith("<") and not filename.startswith(TYPED_IN)


def _is_library(filename: str) -> bool:
    return is_made_up(filename) or filename.startswith(_SITE) or filename.startswith(_STDLIB)


# What `is_plumbing` has answered so far, by file.
plumbing_files: dict[str, bool] = {}


def is_plumbing(filename: str) -> bool:
    """Whether a file belongs to torch, this package or another library that only passes calls on. Cached."""
    known = plumbing_files.get(filename)
    if known is None:
        known = plumbing_files[filename] = _is_plumbing(filename)
    return known


def _is_plumbing(filename: str) -> bool:
    if filename.startswith(tuple(_framework_prefixes)) or filename.startswith(tuple(_plumbing_prefixes)):
        return True
    return is_made_up(filename) or (filename.startswith(_STDLIB) and not filename.startswith(_SITE))


def _locate(frames: Iterable[tuple[CodeType, int]]) -> Location | None:
    """The location of the innermost frame that is not plumbing; `frames` start with the innermost."""
    site: tuple[CodeType, int] | None = None
    for code, lineno in frames:
        filename = code.co_filename
        if site is None:
            if _is_plumbing(filename):
                continue
            site = (code, lineno)
        if not _is_library(filename) and not filename.startswith(tuple(_framework_prefixes)):
            user = Location(filename=filename, lineno=lineno, function=code.co_name, is_user_code=True)
            if site == (code, lineno):
                return user
            return Location(
                filename=site[0].co_filename,
                lineno=site[1],
                function=site[0].co_name,
                is_user_code=False,
                called_from=user,
            )
    if site is None:
        return None
    return Location(filename=site[0].co_filename, lineno=site[1], function=site[0].co_name, is_user_code=False)


def location_of_line(filename: str, lineno: int) -> Location:
    """The location of a line that is known already."""
    return Location(filename=filename, lineno=lineno, function="", is_user_code=not _is_library(filename))


def stack_frames(start: FrameType | None = None) -> Iterator[FrameType]:
    """The frames of this thread from `start` (or the caller) outwards."""
    frame = start if start is not None else sys._getframe(1)
    current: FrameType | None = frame
    while current is not None:
        yield current
        current = current.f_back


def line_of_caller() -> str:
    """File and line of the innermost frame that is not plumbing."""
    frame = sys._getframe(1)
    while is_plumbing(frame.f_code.co_filename) and frame.f_back is not None:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def line_of_user() -> str:
    """File and line of the innermost frame that is neither of this package nor of a library; empty if there is none."""
    found = current_location()
    if found is not None and found.called_from is not None:
        found = found.called_from
    return found.place if found is not None and found.is_user_code else ""


def current_location() -> Location | None:
    """The line that is being executed, with library plumbing skipped; None if there is none."""
    return _locate((frame.f_code, frame.f_lineno) for frame in stack_frames(sys._getframe(1)))


def location_of(traceback: TracebackType | None) -> Location | None:
    """The line that raised an exception, with library plumbing skipped; None if there is none.

    A traceback starts at the frame that caught the exception, so that frame's callers are added.
    """
    frames: list[tuple[CodeType, int]] = []
    outermost = traceback.tb_frame if traceback is not None else None
    while traceback is not None:
        frames.append((traceback.tb_frame.f_code, traceback.tb_lineno))
        traceback = traceback.tb_next
    frames.reverse()
    if outermost is not None:
        frames.extend((frame.f_code, frame.f_lineno) for frame in stack_frames(outermost.f_back) if outermost.f_back)
    return _locate(frames)


def described(error: BaseException) -> str:
    """The error with its class, and with the user's line that raised it unless its message names that line."""
    frames = []
    traceback = error.__traceback__
    while traceback is not None:
        frames.append((traceback.tb_frame.f_code, traceback.tb_lineno))
        traceback = traceback.tb_next
    found = _locate(reversed(frames))
    where = found.called_from or found if found is not None else None
    text = f"{type(error).__name__}: {str(error).strip()}".removesuffix(": ")
    if where is None or where.place in text:
        return text
    return f"{text} ({where.place})"


def argument_text(file: str, line: int, function: Callable[..., Any], index: int) -> str:
    """How a line writes what a function gets, e.g. `batch["image"]` of `batch["image"].float()`.

    Args:
        file, line: where the call is.
        function: what is called.
        index: which of its arguments: of a method the first is what it is called on.

    Returns:
        The text; empty if the line does not tell, as where a statement has several lines or several such calls.
    """
    name = getattr(function, "__name__", "")
    try:
        tree = ast.parse(linecache.getline(file, line).strip())
    except SyntaxError:
        return ""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _name(node.func) == name]
    if len(calls) != 1:
        return ""
    (call,) = calls
    values = call.args
    if isinstance(call.func, ast.Attribute) and getattr(torch.Tensor, name, None) is function:
        values = [call.func.value, *values]
    return ast.unparse(values[index]) if index < len(values) else ""


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
