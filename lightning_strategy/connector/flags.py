"""`ConnectorFlags`: the user's arguments of the Trainer or Fabric that is being constructed.

Lightning's connector asks a strategy for its plugins and then decides alone. It refuses `precision="bf16-mixed"` before
an XLA strategy is asked, and never gives `devices=2` to a strategy that was chosen by name. So the arguments are read
from the connector's stack frame while it asks. `tests/contract` pins the names that are used.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from lightning.fabric.connector import _Connector
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

_CONSTRUCTORS = {_AcceleratorConnector.__init__.__code__, _Connector.__init__.__code__}


@dataclass(frozen=True, kw_only=True)
class ConnectorFlags:
    """The arguments of a Trainer or Fabric that concern a strategy.

    Attributes:
        accelerator, devices, num_nodes, precision: as the user gave them; precision is None if not given.
        connector: Lightning's object under construction.
    """

    accelerator: Any
    devices: Any
    num_nodes: Any
    precision: Any
    connector: Any


def flags_under_construction() -> ConnectorFlags | None:
    """The flags of the Trainer or Fabric whose constructor is running now; `None` if none is."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _CONSTRUCTORS:
            given = frame.f_locals
            return ConnectorFlags(
                accelerator=given["accelerator"],
                devices=given["devices"],
                num_nodes=given["num_nodes"],
                precision=given["precision"],
                connector=given["self"],
            )
        frame = frame.f_back  # type: ignore[assignment]
    return None
