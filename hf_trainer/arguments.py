"""`XLAArguments`: the XLA options as a dataclass for `HfArgumentParser`, JSON and YAML."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any, Optional

from xla_adapters import XLAConfig
from xla_adapters.checkpoint import CheckpointConfig
from xla_adapters.config import check_switch
from xla_adapters.errors import ConfigError
from xla_adapters.sharding import ShardingConfig

# Options that are not fields of `XLAConfig`.
_NOT_OF_THE_CORE = ("auto_sharding", "sharding", "safe_checkpoints", "checkpoint", "xla_report")


@dataclass
class XLAArguments:
    """The XLA options for `HfArgumentParser`.

    Parse it beside `TrainingArguments` and pass it to the trainer as `xla_args`. The fields are the options of
    `XLAConfig` and of `XLATrainerMixin`; each has a help text.

    Raises:
        ConfigError: a value is not one of those that the help text lists.
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
    on_recompile: str = field(
        default="warn",
        metadata={"help": "warn, error or ignore: what a graph after the first one of a training step does."},
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
        metadata={"help": "auto, true or false: run the executable of a step without its Python, once it is known."},
    )
    replay_verify_every: Optional[int] = field(  # noqa: UP045 (HfArgumentParser reads it at run time)
        default=1000, metadata={"help": "Every how many replayed steps one is traced again, to compare the results."}
    )
    on_replay_mismatch: str = field(
        default="error",
        metadata={"help": "error or retrace: what a difference between a traced step and its replay does."},
    )
    rng_algorithm: str = field(
        default="auto",
        metadata={"help": "auto, default, philox or three_fry: the random number generator of the device."},
    )
    profile_steps: Optional[list[int]] = field(  # noqa: UP045 (HfArgumentParser reads it at run time)
        default=None, metadata={"help": "The first and the last step, from 1, of which a profile is recorded."}
    )
    profile_folder: Optional[str] = field(  # noqa: UP045 (HfArgumentParser reads it at run time)
        default=None, metadata={"help": "Where the profile is written; xla-profile in the output folder by default."}
    )
    auto_sharding: bool = field(
        default=False, metadata={"help": "Shard the model over all devices by the plan with the lowest estimated cost."}
    )
    sharding: Optional[str] = field(  # noqa: UP045 (HfArgumentParser reads it at run time)
        default=None,
        metadata={"help": "dp, fsdp, tp, 2d or auto, or the options of a ShardingConfig as JSON."},
    )
    safe_checkpoints: bool = field(
        default=True,
        metadata={"help": "Commit checkpoints atomically, and verify them when a run resumes."},
    )
    checkpoint: Optional[str] = field(  # noqa: UP045 (HfArgumentParser reads it at run time)
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
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in _NOT_OF_THE_CORE}
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
