"""Registers the strategies under the name "xla_eager": `L.Trainer(strategy="xla_eager")`."""

from __future__ import annotations

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from lightning_strategy.fabric import XLAEagerFabricStrategy
from lightning_strategy.strategy import XLAEagerStrategy


def register() -> None:
    """Adds both strategies to Lightning's registries, unless they are there already."""
    if XLAEagerStrategy.strategy_name not in StrategyRegistry:
        XLAEagerStrategy.register_strategies(StrategyRegistry)
    if XLAEagerFabricStrategy.strategy_name not in STRATEGY_REGISTRY:
        XLAEagerFabricStrategy.register_strategies(STRATEGY_REGISTRY)
