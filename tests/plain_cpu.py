"""`without_xla`: trainers of transformers, and of what builds on them, on plain CPU torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from xla_adapters import get_runtime
from xla_adapters.utils.patching import replaced

_PACKAGES = ("transformers", "accelerate", "trl", "peft", "sentence_transformers", "diffusers")


def _no(*args: object, **kwargs: object) -> bool:
    return False


@contextmanager
def without_xla() -> Iterator[None]:
    """Lets transformers and accelerate believe that torch_xla is not installed.

    With torch_xla installed they train on the XLA device even under `use_cpu=True`.
    """
    # Backward passes of stock torch_xla fail after one on the CPU, if nothing called this before.
    get_runtime().device.initialize()
    with ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] in _PACKAGES and "is_torch_xla_available" in vars(module):
                stack.enter_context(replaced(module, "is_torch_xla_available", _no))
        yield
