"""`xla_mode="eager+dynamo"`: the module's children are compiled with `torch.compile`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torchmetrics import Metric


@contextmanager
def compiled_children(module: LightningModule, backend: str) -> Iterator[None]:
    """Compiles the module's children with `torch.compile`, until the exit.

    The code of the LightningModule itself runs as Python: `self.log` and the hooks are in no dynamo graph.

    Args:
        module: on the device.
        backend: the name of the dynamo backend.
    """
    children: list[Any] = [child for child in module.children() if not isinstance(child, Metric)]
    if not children:
        warnings.warn(
            f"xla_mode='eager+dynamo': {type(module).__name__} has no submodules, so nothing of it is compiled; put "
            "the network into an attribute, or use xla_mode='eager+compile'",
            stacklevel=2,
        )
    for child in children:
        child._compiled_call_impl = torch.compile(_in_a_frame(child._call_impl), backend=backend)
    try:
        yield
    finally:
        for child in children:
            child._compiled_call_impl = None


def _in_a_frame(call: Callable[..., Any]) -> Callable[..., Any]:
    """A frame around a module's call: dynamo does not compile torch's own containers as outermost frames."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    return forward
