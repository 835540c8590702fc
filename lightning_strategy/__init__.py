"""Lightning's Trainer and Fabric on PyTorch/XLA, on top of xla_adapters."""

from pathlib import Path

import lightning_strategy._requirements  # noqa: F401 (raises)
from lightning_strategy.connector import warn_where_auto_takes_the_cpu
from lightning_strategy.fabric import XLAEagerFabricStrategy
from lightning_strategy.report import XLAStatsCallback
from lightning_strategy.strategy import XLAEagerStrategy
from xla_adapters.utils.location import hide_folder

__all__ = ["XLAEagerFabricStrategy", "XLAEagerStrategy", "XLAStatsCallback"]

hide_folder(Path(__file__).parent)
warn_where_auto_takes_the_cpu()
