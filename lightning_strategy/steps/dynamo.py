"""`xla_mode="eager+dynamo"`: the module's children are compiled with `torch.compile`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from lightning.pytorch import LightningModule
from torchmetrics import Metric

from xla_adapters.utils.torch_modes import modules_compiled


@contextmanager
def compiled_children(module: LightningModule, backend: str) -> Iterator[None]:
    """Compiles the module's children with `torch.compile`, until the exit.

    The code of the LightningModule itself runs as Python: `self.log` and the hooks are in no dynamo graph.

    Args:
        module: on the device.
        backend: the name of the dynamo backend.
    """
    children = [child for child in module.children() if not isinstance(child, Metric)]
    if not children:
        warnings.warn(
            f"xla_mode='eager+dynamo': {type(module).__name__} has no submodules, so nothing of it is compiled; put "
            "the network into an attribute, or use xla_mode='eager+compile'",
            stacklevel=2,
        )
    with modules_compiled(children, backend):
        yield
