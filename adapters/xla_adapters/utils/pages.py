"""`page`: HTML from the templates that lie beside the modules."""

from __future__ import annotations

import functools
from typing import Any


def page(template: str, **values: Any) -> str:
    """One HTML file that needs no other. Texts are escaped.

    Args:
        template: its path in this package.
        values: what it shows.
    """
    rendered: str = templates().get_template(template).render(**values)
    return rendered


# Compiling a template takes longer than rendering it.
@functools.cache
def templates() -> Any:
    """The environment of jinja2."""
    # Late: few programs write a page, and those that do write it at their end.
    import jinja2

    loader = jinja2.PackageLoader("xla_adapters", "")
    undefined = jinja2.StrictUndefined
    return jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, undefined=undefined)
