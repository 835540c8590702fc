"""What the user gave the Trainer (or Fabric) that is being constructed.

Lightning's connector asks a strategy what it brings along and then decides by itself: `precision=
"bf16-mixed"` is refused before an XLA strategy hears of it, `devices=2` never reaches one that was
chosen by name. The connector's own arguments are on the stack while it asks. `tests/contract` pins
what is used of it.
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
    """The arguments that concern a strategy.

    Attributes:
        accelerator, devices, num_nodes, precision: as the user gave them; precision is `None` if not.
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
