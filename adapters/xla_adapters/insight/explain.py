"""What each exception and warning means, and what to do: the command `explain`, and the errors page of the docs."""

from __future__ import annotations

import inspect

from xla_adapters import errors
from xla_adapters.errors import ConfigError, XLAAdapterError


def explained() -> dict[str, type[Exception]]:
    """All exceptions and warnings of `xla_adapters.errors` by name, in the order of the file."""
    return {
        name: cls
        for name, cls in vars(errors).items()
        if isinstance(cls, type) and issubclass(cls, (XLAAdapterError, UserWarning))
    }


def entry(name: str) -> str:
    """What a class means, and what to do.

    Args:
        name: of the class, in any case.

    Raises:
        ConfigError: there is no such class; the message lists those there are.
    """
    classes = explained()
    found = next((cls for known, cls in classes.items() if known.lower() == name.lower()), None)
    if found is None:
        raise ConfigError(f"there is no error or warning {name!r}; there are: {', '.join(classes)}")
    bases = ", ".join(base.__name__ for base in found.__bases__)
    return f"{found.__name__} ({bases})\n\n{text(found)}"


def text(cls: type[Exception]) -> str:
    """The docstring of a class, without its attributes."""
    return (inspect.getdoc(cls) or "").partition("\n\nAttributes:")[0]
