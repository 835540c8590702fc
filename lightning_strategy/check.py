"""What `xla-adapters check` changes in Lightning's Trainer and Fabric: our strategy put in, nothing saved or logged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning as L
from lightning.pytorch.loggers.logger import DummyLogger

from lightning_strategy.preflight import EndingLoops
from lightning_strategy.strategy import XLAEagerStrategy
from xla_adapters.errors import ConfigError
from xla_adapters.tools.user_script import Hand
from xla_adapters.utils.location import line_of_caller

if TYPE_CHECKING:
    _FabricBase = L.Fabric
else:
    _FabricBase = object

# Arguments of the Trainer that say which devices it trains on, with the values that leave it open.
_DEVICES = {"strategy": "auto", "accelerator": "auto", "devices": "auto", "num_nodes": 1, "sync_batchnorm": False}


def checked(kind: type, hand: Hand) -> type:
    """The class that is instantiated in place of a Trainer's class; see `xla_adapters.tools.user_script`."""
    return _derived(_CheckedTrainer, kind, hand)


def checked_fabric(kind: type, hand: Hand) -> type:
    """As `checked`, for a class of Fabric's."""
    return _derived(_CheckedFabric, kind, hand)


def _derived(first: type, kind: type, hand: Hand) -> type:
    attributes = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "_hand": hand}
    return type(kind.__name__, (first, kind), attributes)


class _NoLogger(DummyLogger):
    """Logs nothing; what callbacks write beside the logs goes to a folder.

    Args:
        folder: that one.
    """

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder = folder

    @property
    def save_dir(self) -> str:
        """The folder."""
        return self._folder


class _CheckedTrainer(EndingLoops):
    """Before a Trainer's class: our strategy, a temporary folder, no logger, no checkpoint."""

    def __init__(self, **options: Any) -> None:
        strategy = options.get("strategy")
        if strategy != XLAEagerStrategy.strategy_name and not isinstance(strategy, XLAEagerStrategy):
            given = [f"{name}={options.pop(name)!r}" for name in _DEVICES if name in options]
            sharding = self._hand.sharding
            options["strategy"] = XLAEagerStrategy(sharding=sharding, shapes=self._hand.shapes)
            put = "XLAEagerStrategy() on one device" if sharding is None else f"XLAEagerStrategy({sharding=})"
            self._hand.put_steps(
                f"the Trainer of {line_of_caller()}: {put}" + (f" instead of {', '.join(given)}" if given else "")
            )
        elif self._hand.sharding is not None:
            raise ConfigError(
                f"--sharding {self._hand.sharding}: the Trainer of {line_of_caller()} has a strategy of its own; give "
                "that one sharding=, or leave it out"
            )
        if options.get("logger") is not False:
            options["logger"] = _NoLogger(str(self._hand.folder))
        options["default_root_dir"] = str(self._hand.folder)
        super().__init__(**options)

    def fit(self, *args: Any, ckpt_path: Any = None, **options: Any) -> None:
        """As `Trainer.fit`, from the beginning."""
        if ckpt_path is not None:
            self._hand.change(f"ckpt_path={ckpt_path!r}: trains from the beginning")
        super().fit(*args, **options)

    def save_checkpoint(self, filepath: Any, *args: Any, **options: Any) -> None:
        """Saves nothing."""
        self._hand.skip(f"the checkpoint {filepath}")


class _CheckedFabric(_FabricBase):
    """Before a Fabric class: nothing is saved."""

    _hand: Hand

    def save(self, path: Any, *args: Any, **options: Any) -> None:
        """Saves nothing."""
        self._hand.skip(f"the checkpoint {path}")
