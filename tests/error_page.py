"""Writes the page of the docs that explains each exception and warning: `python -m tests.error_page`."""

from __future__ import annotations

from pathlib import Path

from xla_adapters.errors import explained, meaning

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "errors.md"
_HEAD = """# Errors and warnings

All errors derive from `XLAAdapterError`. They are in `xla_adapters.errors`. `xla-adapters explain NAME` prints an
entry of this page in the terminal.

This page is written by `python -m tests.error_page` from the docstrings of the classes.
"""


def page() -> str:
    """The text of docs/reference/errors.md."""
    parts = [_HEAD]
    for name, cls in explained().items():
        bases = ", ".join(f"`{base.__name__}`" for base in cls.__bases__)
        parts.append(f"## {name}\n\nDerives from {bases}.\n\n{meaning(cls)}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
    print(PAGE)
