"""Says which extra is missing, where the import of a framework would only say which module is."""

from importlib.util import find_spec

if missing := [name for name in ("transformers", "accelerate") if find_spec(name) is None]:
    raise ImportError(f"hf_trainer needs {' and '.join(missing)}; install them with: pip install 'xla-adapters[hf]'")
