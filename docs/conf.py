"""Sphinx builds the site from this folder: `make docs`. Offline, and a warning is an error."""

from __future__ import annotations

import logging
import os
import re
import sys
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

# furo's styles come from a package that has all loggers say everything.
logging.getLogger("xla_adapters").setLevel(logging.WARNING)
# What imports torch_xla starts nothing, but looks for devices.
os.environ.setdefault("PJRT_DEVICE", "CPU")
sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("adapters", "")]

project = "xla-adapters"
copyright = "the xla-adapters authors"
version = release = version_of("xla-adapters")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build"]
html_theme = "furo"
# No page loads anything from elsewhere.
html_static_path: list[str] = []
# Prompts and outputs are not copied.
copybutton_exclude = ".linenos, .gp, .go"
# Anchors of headings, by which pages link into each other.
myst_heading_anchors = 3

autodoc_typehints = "signature"
autodoc_typehints_format = "short"
# A longer one has a line for each argument.
maximum_signature_line_length = 100
# Those of the frameworks are theirs.
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_class_signature = "separated"
# `name` in a docstring is code.
default_role = "code"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True


def setup(app: Any) -> None:
    """Reads the docstrings as they are written."""
    app.connect("autodoc-process-docstring", _as_restructured_text, priority=100)
    app.connect("build-finished", _write_list_of_pages)


def _write_list_of_pages(app: Any, error: Exception | None) -> None:
    # For language models. On the site its links lead to the pages' sources.
    if error is None and app.builder.format == "html":
        text = Path(app.srcdir, "llms.txt").read_text(encoding="utf-8")
        linked = re.sub(r"\]\(([^)]+\.md)\)", r"](_sources/\1.txt)", text)
        Path(app.outdir, "llms.txt").write_text(linked, encoding="utf-8")


def _as_restructured_text(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    # Indented code follows a sentence without a double colon.
    for at in range(len(lines) - 1, 0, -1):
        begins = lines[at].startswith("    ") and not lines[at - 1].strip()
        if (
            begins
            and at > 1
            and lines[at - 2]
            and not lines[at - 2].startswith(" ")
            and not lines[at - 2].endswith("::")
        ):
            lines[at:at] = ["::", ""]
