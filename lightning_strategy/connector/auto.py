"""Says where Lightning takes the CPU by itself though there is a TPU of TorchTPU, which it does not know."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric.connector import _Connector
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

from lightning_strategy.connector.flags import flags_under_construction

NAME = "xla_eager"
_STRATEGIES: tuple[tuple[Any, str], ...] = (
    (_AcceleratorConnector, "XLAEagerStrategy"),
    (_Connector, "XLAEagerFabricStrategy"),
)


def warn_where_auto_takes_the_cpu() -> None:
    """From now on a Trainer or Fabric that chooses the CPU by itself on a machine with such a TPU warns.

    Those with a strategy of this package do not choose.
    """
    for connector, strategy in _STRATEGIES:
        choose = connector._choose_auto_accelerator
        if not hasattr(choose, "of_xla_adapters"):
            connector._choose_auto_accelerator = staticmethod(_warning(choose, strategy))


def _warning(choose: Callable[[], str], strategy: str) -> Callable[[], str]:
    @functools.wraps(choose)
    def chosen() -> str:
        name = choose()
        if name == "cpu" and _has_tpu() and not _chose_ours():
            warnings.warn(
                f"accelerator='auto' takes the CPU, though there is a TPU: Lightning does not know TorchTPU. Give "
                f"strategy=lightning_strategy.{strategy}() to train on it, or accelerator='cpu' if that is meant",
                UserWarning,
                stacklevel=2,
            )
        return name

    chosen.of_xla_adapters = True  # type: ignore[attr-defined]
    return chosen


def _chose_ours() -> bool:
    """Whether the Trainer or Fabric that is being made was given a strategy of this package by its name."""
    flags = flags_under_construction()
    return flags is not None and flags.connector._strategy_flag == NAME


def _has_tpu() -> bool:
    device = torch.accelerator.current_accelerator()
    return device is not None and device.type == "tpu"
