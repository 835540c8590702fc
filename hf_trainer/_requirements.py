"""Done before the frameworks are imported: says which extra is missing, and which version was not tested."""

from importlib.util import find_spec

from xla_adapters.runtime import get_runtime
from xla_adapters.utils.patching import warn_of_untested


def require(module: str, extra: str, **libraries: str) -> None:
    """Raises if a library that a module imports is missing; warns if it is of a version that was not tested.

    Args:
        module: the module.
        extra: of this package, which installs the libraries.
        libraries: by the name of the import what to call them.

    Raises:
        ImportError: names what is missing, and the command that installs it.
    """
    if missing := [what for name, what in libraries.items() if find_spec(name) is None]:
        raise ImportError(
            f"{module} needs {' and '.join(missing)}; install {'them' if missing[1:] else 'it'} with: "
            f"pip install 'xla-adapters[{extra}]'"
        )
    warn_of_untested(extra, libraries)


require("hf_trainer", "hf", transformers="transformers", accelerate="accelerate")
# transformers imports torch_xla, too. Only before that is known which handlers the root logger has without it.
get_runtime()
