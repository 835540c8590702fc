"""Lightning's Trainer and Fabric on PyTorch/XLA, on top of xla_adapters."""

from pathlib import Path

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from lightning_strategy.fabric import XLAEagerFabricStrategy
from lightning_strategy.stats import XLAStatsCallback
from lightning_strategy.strategy import XLAEagerStrategy
from xla_adapters.location import hide_folder

__all__ = ["XLAEagerFabricStrategy", "XLAEagerStrategy", "XLAStatsCallback"]

hide_folder(Path(__file__).parent)
if XLAEagerStrategy.strategy_name not in StrategyRegistry:
    XLAEagerStrategy.register_strategies(StrategyRegistry)
if XLAEagerFabricStrategy.strategy_name not in STRATEGY_REGISTRY:
    XLAEagerFabricStrategy.register_strategies(STRATEGY_REGISTRY)
