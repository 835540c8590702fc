"""`TrainerOptions`: the checked XLA options of one trainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_trainer.arguments import XLAArguments
from xla_adapters import XLAConfig
from xla_adapters.checkpoint import CheckpointConfig
from xla_adapters.config import REMOVED_OPTIONS, check_switch
from xla_adapters.errors import ConfigError
from xla_adapters.sharding import ShardingConfig


@dataclass(frozen=True, kw_only=True)
class TrainerOptions:
    """The XLA options of one trainer, after all checks that need no trainer.

    Attributes:
        config: how steps are run.
        sharding: how the model is sharded; None trains on one device.
        safe_checkpoints: whether a `CheckpointStore` commits checkpoints.
        checkpoint: when checkpoints are saved, and how.
        xla_report: whether it is recorded, logged and written where the time of a training goes.
    """

    config: XLAConfig
    sharding: ShardingConfig | None
    safe_checkpoints: bool
    checkpoint: CheckpointConfig
    xla_report: bool = True

    @classmethod
    def resolve(
        cls,
        xla_args: XLAArguments | XLAConfig | None,
        core: Mapping[str, object],
        *,
        auto_sharding: bool | Mapping[str, Any] | None,
        sharding: str | Mapping[str, Any] | ShardingConfig | None,
        safe_checkpoints: bool | None,
        checkpoint: CheckpointConfig | Mapping[str, Any] | None,
        xla_report: bool | None = None,
    ) -> TrainerOptions:
        """The options from `xla_args` or from single arguments. Each may be given in one of the two ways.

        Args:
            xla_args: the options as one object; None if they are given singly.
            core: options of `XLAConfig` by name.
            auto_sharding, sharding, safe_checkpoints, checkpoint, xla_report: as for `XLATrainerMixin`.

        Raises:
            ConfigError: an option was given in both ways, or a value is not valid.
        """
        return cls(
            config=XLAConfig.resolve(xla_args.to_config() if isinstance(xla_args, XLAArguments) else xla_args, core),
            sharding=_sharding(xla_args, auto_sharding, sharding),
            safe_checkpoints=_switch("safe_checkpoints", xla_args, safe_checkpoints),
            checkpoint=_checkpoint(xla_args, checkpoint),
            xla_report=_switch("xla_report", xla_args, xla_report),
        )


def take_options(arguments: dict[str, Any]) -> dict[str, Any]:
    """Takes the options of `XLAConfig`, also those of earlier versions, out of keyword arguments of all kinds."""
    names = (*XLAConfig.names(), *REMOVED_OPTIONS)
    return {name: arguments.pop(name) for name in names if name in arguments}


def _sharding(
    xla_args: XLAArguments | XLAConfig | None,
    auto_sharding: bool | Mapping[str, Any] | None,
    sharding: str | Mapping[str, Any] | ShardingConfig | None,
) -> ShardingConfig | None:
    given = ShardingConfig.resolve(auto_sharding=auto_sharding, sharding=sharding)
    parsed = xla_args.to_sharding() if isinstance(xla_args, XLAArguments) else None
    if given is not None and parsed is not None:
        raise ConfigError("sharding was asked for twice: by xla_args= and by auto_sharding= or sharding=")
    return given if given is not None else parsed


def _switch(name: str, xla_args: XLAArguments | XLAConfig | None, given: bool | None) -> bool:
    """An option that is on by default."""
    if not isinstance(xla_args, XLAArguments):
        return check_switch(name, True if given is None else given)
    if given is not None:
        raise ConfigError(f"the XLA options were given twice: as xla_args= and as {name}=")
    return bool(getattr(xla_args, name))


def _checkpoint(
    xla_args: XLAArguments | XLAConfig | None, given: CheckpointConfig | Mapping[str, Any] | None
) -> CheckpointConfig:
    parsed = xla_args.checkpoint if isinstance(xla_args, XLAArguments) else None
    if given is not None and parsed is not None:
        raise ConfigError("the checkpoint options were given twice: as xla_args= and as checkpoint=")
    return CheckpointConfig.resolve(given if given is not None else parsed)
