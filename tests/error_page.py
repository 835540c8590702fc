"""Writes the pages of the docs that explain each exception, warning and message: `python -m tests.error_page`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.architecture import modules
from xla_adapters.errors import GraphBreakError, explained, meaning

_REFERENCE = Path(__file__).parents[1] / "docs" / "reference"
PAGE = _REFERENCE / "errors.md"
MESSAGES = _REFERENCE / "messages.md"
_HEAD = """# Errors and warnings

All errors derive from `XLAAdapterError`. They are in `xla_adapters.errors`. `xla-adapters explain NAME` prints an
entry of this page in the terminal. A [list of messages](messages.md) finds the entry by the text of an error.

This page is written by `python -m tests.error_page` from the docstrings of the classes.
"""
_CLASSES = explained()
# What stands above it in the page is written by hand.
_GENERATED = "## Messages of this package\n"
_OF_MESSAGES = f"""{_GENERATED}
The first sentence of each message, by its class; `…` stands for what differs from case to case. The rest of a message
names your line and what to do; the link leads to what the class means. This list is written by
`python -m tests.error_page` from the code.
"""
# As much of a message as is looked for.
_LONGEST = 160
_VARIES = "…"


def page() -> str:
    """The text of docs/reference/errors.md."""
    parts = [_HEAD]
    for name, cls in explained().items():
        bases = ", ".join(f"`{base.__name__}`" for base in cls.__bases__)
        parts.append(f"## {name}\n\nDerives from {bases}.\n\n{meaning(cls)}\n")
    return "\n".join(parts)


def messages_page() -> str:
    """The text of docs/reference/messages.md: what is written there by hand, then the messages of the code."""
    by_hand = MESSAGES.read_text(encoding="utf-8").partition(_GENERATED)[0]
    found: dict[str, set[str]] = {name: set() for name in _CLASSES}
    for name, cls in _CLASSES.items():
        if issubclass(cls, GraphBreakError):
            found[name].add(f"{cls.kind} inside the step {_VARIES}: {_VARIES}")
    for path in modules().values():
        for name, message in messages_in(path.read_text(encoding="utf-8")):
            found[name].add(message)
    parts = [by_hand + _OF_MESSAGES]
    for name, said in found.items():
        if said:
            lines = "\n".join(
                f"- {_escaped(message)}" for message in sorted(said, key=lambda message: (_order(message), message))
            )
            parts.append(
                f"### {name}: what it says\n\n[What it means, and what to do](errors.md#{name.lower()}).\n\n{lines}\n"
            )
    return "\n".join(parts)


def messages_in(source: str) -> Iterator[tuple[str, str]]:
    """The class and the first sentence of each message that is written out in a call: of the class, or that warns.

    Args:
        source: of a module.
    """
    tree = ast.parse(source)
    constants = _assigned(tree.body)
    for scope in ast.walk(tree):
        if isinstance(scope, ast.ClassDef) and scope.name in _CLASSES:
            yield from _messages_of(scope, constants, own=scope.name)
        elif isinstance(scope, ast.FunctionDef):
            yield from _messages_of(scope, constants | _assigned(ast.walk(scope)))


def _assigned(nodes: Iterable[ast.AST]) -> dict[str, ast.expr]:
    return {
        target.id: node.value
        for node in nodes
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _messages_of(scope: ast.AST, names: dict[str, ast.expr], own: str | None = None) -> Iterator[tuple[str, str]]:
    for node in ast.walk(scope):
        if not isinstance(node, ast.Call):
            continue
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        named = {called for value in (node.func, *given) if (called := _name(value)) in _CLASSES}
        if own is not None and ast.unparse(node.func) in ("cls", "super().__init__"):
            named = {own}
        texts = [text for value in given if (text := _text(value, names)) is not None]
        if len(named) == 1 and texts and re.search(r"[a-z]{2}", texts[0].replace(_VARIES, "")):
            yield named.pop(), _first_sentence(texts[0])


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _text(node: ast.expr, constants: dict[str, ast.expr], *, inner: bool = False) -> str | None:
    """What is written in an expression, with `…` for what is not; None if nothing is."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part, constants, inner=True) or _VARIES for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return _text(node.value, constants, inner=True)
    if isinstance(node, ast.Name) and node.id in constants:
        return _text(constants[node.id], {})
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts = [_text(side, constants, inner=True) for side in (node.left, node.right)]
        return None if parts == [None, None] else "".join(part or _VARIES for part in parts)
    return None


def _first_sentence(text: str) -> str:
    sentence = re.split(r"(?<=[^.])\. |\n", text)[0]
    if len(sentence) > _LONGEST:
        sentence = f"{sentence[:_LONGEST].rpartition(' ')[0]} {_VARIES}"
    return re.sub(rf"{_VARIES}+", _VARIES, sentence).strip()


def _order(message: str) -> str:
    return message.lstrip(f"{_VARIES}'\" (:").lower()


def _escaped(message: str) -> str:
    return re.sub(r"([\\`*_<>\[\]{}|#$])", r"\\\1", message)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    MESSAGES.write_text(messages_page(), encoding="utf-8")
    print(PAGE, MESSAGES, sep="\n")
