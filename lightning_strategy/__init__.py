"""Lightning's Trainer and Fabric on PyTorch/XLA, on top of xla_adapters."""

from pathlib import Path

from lightning.pytorch.strategies import StrategyRegistry

from lightning_strategy.strategy import XLAEagerStrategy
from xla_adapters.location import hide_folder

__all__ = ["XLAEagerStrategy"]

hide_folder(Path(__file__).parent)
if XLAEagerStrategy.strategy_name not in StrategyRegistry:
    XLAEagerStrategy.register_strategies(StrategyRegistry)
