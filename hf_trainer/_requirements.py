"""Done before the frameworks are imported: says which extra is missing, where their import would name a module."""

from importlib.util import find_spec

from xla_adapters.runtime import get_runtime


def require(module: str, extra: str, **libraries: str) -> None:
    """Raises if a library that a module imports is missing.

    Args:
        module: the module.
        extra: of this package, which installs the libraries.
        libraries: by the name of the import what to call them, with the versions that are tested.

    Raises:
        ImportError: names what is missing, and the command that installs it.
    """
    if missing := [what for name, what in libraries.items() if find_spec(name) is None]:
        raise ImportError(
            f"{module} needs {' and '.join(missing)}; install {'them' if missing[1:] else 'it'} with: "
            f"pip install 'xla-adapters[{extra}]'"
        )


require("hf_trainer", "hf", transformers="transformers", accelerate="accelerate")
# transformers imports torch_xla, too. Only before that is known which handlers the root logger has without it.
get_runtime()
