"""`XLAArguments`: the XLA options as a dataclass for `HfArgumentParser`, JSON and YAML."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Optional

from xla_adapters import XLAConfig
from xla_adapters.checkpoint import CheckpointConfig
from xla_adapters.errors import ConfigError
from xla_adapters.sharding import ShardingConfig

_NOT_THE_CORES = ("auto_sharding", "sharding", "safe_checkpoints", "checkpoint")


@dataclass
class XLAArguments:
    """Parse it beside `transformers.TrainingArguments` and hand it to the trainer as `xla_args`.

    Raises:
        ConfigError: a value is none of those the help text lists.
    """

    xla_mode: str = field(
        default="eager+compile",
        metadata={"help": "eager, eager+compile, eager+dynamo or lazy: how steps are executed."},
    )
    on_graph_break: str = field(
        default="error",
        metadata={"help": "error, warn or allow: what a tensor read, save or sync inside a step does."},
    )
    compile_eval: bool = field(
        default=True, metadata={"help": "Whether evaluation and prediction steps are compiled too."}
    )
    max_graphs: Optional[int] = field(  # noqa: UP045 (HfArgumentParser reads it at run time)
        default=None, metadata={"help": "How many different graphs the training step may compile."}
    )
    free_grads: str = field(
        default="auto",
        metadata={"help": "auto, true or false: drop gradients inside the step, so that they are not its outputs."},
    )
    accumulation: str = field(
        default="per_micro_batch",
        metadata={"help": "per_micro_batch or unrolled: one graph per micro batch, or one per optimizer step."},
    )
    step_replay: str = field(
        default="auto",
        metadata={"help": "auto, true or false: a step that was traced twice alike is called without its Python."},
    )
    replay_verify_every: Optional[int] = field(  # noqa: UP045 (HfArgumentParser reads it at run time)
        default=1000, metadata={"help": "Replayed steps after which one is traced again and held against them."}
    )
    steps_per_execution: int = field(
        default=1, metadata={"help": "How many replayed steps are one call of an executable."}
    )
    steps_form: str = field(
        default="loop",
        metadata={"help": "loop or unrolled: whether that executable holds the step once, or once for each step."},
    )
    rng_algorithm: str = field(
        default="auto",
        metadata={"help": "auto, default, philox or three_fry: what draws random numbers on the device."},
    )
    auto_sharding: bool = field(
        default=False, metadata={"help": "Shard the model over all devices, as is planned to cost least."}
    )
    sharding: Optional[str] = field(  # noqa: UP045 (HfArgumentParser reads it at run time)
        default=None,
        metadata={"help": "dp, fsdp, tp, 2d or auto, or the options of a ShardingConfig as JSON."},
    )
    safe_checkpoints: bool = field(
        default=True,
        metadata={"help": "Commit checkpoints at one instant, and check them when they are resumed from."},
    )
    checkpoint: Optional[str] = field(  # noqa: UP045 (HfArgumentParser reads it at run time)
        default=None,
        metadata={
            "help": "The options of a CheckpointConfig as JSON, durations in seconds: asynchronous, save_on, ..."
        },
    )

    def __post_init__(self) -> None:
        _check_safe_checkpoints(self.safe_checkpoints)
        CheckpointConfig.resolve(self.checkpoint)
        self.to_config()
        self.to_sharding()

    def to_config(self) -> XLAConfig:
        """The options as the core's checked config."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in _NOT_THE_CORES}
        for name in ("free_grads", "step_replay"):
            value = values[name]
            if isinstance(value, str) and value.lower() in ("true", "false"):
                values[name] = value.lower() == "true"
        return XLAConfig(**values)

    def to_sharding(self) -> ShardingConfig | None:
        """The sharding options as the core's checked config; None is one device."""
        sharding: str | dict[str, Any] | None = self.sharding
        if self.sharding is not None and self.sharding.lstrip().startswith("{"):
            try:
                sharding = dict(json.loads(self.sharding))
            except json.JSONDecodeError as error:
                raise ConfigError(f"sharding={self.sharding!r} is neither a scheme nor JSON: {error}") from error
        return ShardingConfig.resolve(auto_sharding=self.auto_sharding, sharding=sharding)


def resolve_config(xla_args: XLAArguments | XLAConfig | None, options: dict[str, object]) -> XLAConfig:
    """The config from either way of giving the options.

    Raises:
        ConfigError: both ways were used, or a value is not valid.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if xla_args is not None and given:
        raise ConfigError(
            f"the XLA options were given twice: as xla_args= and as {', '.join(f'{name}=' for name in sorted(given))}"
        )
    if isinstance(xla_args, XLAConfig):
        return xla_args
    if xla_args is not None:
        return xla_args.to_config()
    return XLAArguments(**given).to_config()  # type: ignore[arg-type]


def resolve_sharding(
    xla_args: XLAArguments | XLAConfig | None,
    *,
    auto_sharding: bool | Mapping[str, Any] | None,
    sharding: str | Mapping[str, Any] | ShardingConfig | None,
) -> ShardingConfig | None:
    """The sharding options from either way of giving them; None is one device.

    Raises:
        ConfigError: both ways were used, or a value is not valid.
    """
    given = ShardingConfig.resolve(auto_sharding=auto_sharding, sharding=sharding)
    parsed = xla_args.to_sharding() if isinstance(xla_args, XLAArguments) else None
    if given is not None and parsed is not None:
        raise ConfigError("sharding was asked for twice: by xla_args= and by auto_sharding= or sharding=")
    return given if given is not None else parsed


def resolve_safe_checkpoints(xla_args: XLAArguments | XLAConfig | None, given: bool | None) -> bool:
    """Whether checkpoints are committed by the store, from either way of saying so.

    Raises:
        ConfigError: both ways were used, or the value is not valid.
    """
    if not isinstance(xla_args, XLAArguments):
        return _check_safe_checkpoints(True if given is None else given)
    if given is not None:
        raise ConfigError("the XLA options were given twice: as xla_args= and as safe_checkpoints=")
    return xla_args.safe_checkpoints


def resolve_checkpoint(
    xla_args: XLAArguments | XLAConfig | None, given: CheckpointConfig | Mapping[str, Any] | str | None
) -> CheckpointConfig:
    """How checkpoints are saved, from either way of saying so.

    Raises:
        ConfigError: both ways were used, or a value is not valid.
    """
    parsed = xla_args.checkpoint if isinstance(xla_args, XLAArguments) else None
    if given is not None and parsed is not None:
        raise ConfigError("the checkpoint options were given twice: as xla_args= and as checkpoint=")
    return CheckpointConfig.resolve(given if given is not None else parsed)


def _check_safe_checkpoints(value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"safe_checkpoints={value!r} is not a valid value; valid values: True, False")
    return value
