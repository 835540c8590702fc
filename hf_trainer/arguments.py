"""`XLAArguments`: the XLA options as a dataclass for `HfArgumentParser`, JSON and YAML."""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from xla_adapters import XLAConfig
from xla_adapters.checkpoint import CheckpointConfig
from xla_adapters.config import check_switch
from xla_adapters.errors import ConfigError
from xla_adapters.sharding import ShardingConfig


@dataclass(frozen=True, kw_only=True)
class XLAArguments(XLAConfig):
    """The XLA options for `HfArgumentParser`.

    Parse it beside `TrainingArguments` and pass it to the trainer as `xla_args`. The fields are the options of
    `XLAConfig` and of `XLATrainerMixin`; each has a help text.

    Raises:
        ConfigError: a value is not valid.
    """

    # `HfArgumentParser` has no unions but with None, and no tuples.
    free_grads: str = "auto"  # type: ignore[assignment]
    step_replay: str = "auto"  # type: ignore[assignment]
    profile_steps: list[int] | None = None  # type: ignore[assignment]

    auto_sharding: bool = field(
        default=False, metadata={"help": "Shard the model over all devices by the plan with the lowest estimated cost."}
    )
    sharding: str | None = field(
        default=None,
        metadata={"help": "dp, fsdp, tp, 2d or auto, or the options of a ShardingConfig as JSON."},
    )
    safe_checkpoints: bool = field(
        default=True,
        metadata={"help": "Commit checkpoints atomically, and verify them when a run resumes."},
    )
    checkpoint: str | None = field(
        default=None,
        metadata={
            "help": "The options of a CheckpointConfig as JSON, durations in seconds: asynchronous, save_on, ..."
        },
    )

    xla_report: bool = field(
        default=True,
        metadata={"help": "Log what the time of a training goes to, and write xla-events.jsonl and xla-report.html."},
    )

    def __post_init__(self) -> None:
        check_switch("safe_checkpoints", self.safe_checkpoints)
        check_switch("xla_report", self.xla_report)
        CheckpointConfig.resolve(self.checkpoint)
        self.to_config()
        self.to_sharding()

    def to_config(self) -> XLAConfig:
        """The options as the core's checked config."""
        return XLAConfig.from_dict({name: getattr(self, name) for name in XLAConfig.names()})

    def to_sharding(self) -> ShardingConfig | None:
        """The sharding options as the core's checked config; None is one device."""
        sharding: str | dict[str, Any] | None = self.sharding
        if self.sharding is not None and self.sharding.lstrip().startswith("{"):
            try:
                sharding = dict(json.loads(self.sharding))
            except json.JSONDecodeError as error:
                raise ConfigError(f"sharding={self.sharding!r} is neither a scheme nor JSON: {error}") from error
        return ShardingConfig.resolve(auto_sharding=self.auto_sharding, sharding=sharding)


def _meanings() -> dict[str, str]:
    """What the docstring of `XLAConfig` says of each option."""
    options = inspect.cleandoc(XLAConfig.__doc__ or "").partition("Args:\n")[2].partition("\nRaises:")[0]
    found = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", options, re.MULTILINE)
    return {name: " ".join(meaning.split()) for name, meaning in found}


for _name, _meaning in _meanings().items():
    # Where `HfArgumentParser` looks for help.
    XLAArguments.__dataclass_fields__[_name].metadata = MappingProxyType({"help": _meaning})
