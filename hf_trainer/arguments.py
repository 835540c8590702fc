"""`XLAArguments`: the XLA options as a dataclass for `HfArgumentParser`, JSON and YAML."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Optional

from xla_adapters import XLAConfig
from xla_adapters.errors import ConfigError, UnsupportedOptionError


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
    auto_sharding: bool = field(
        default=False, metadata={"help": "Shard the model over all devices (not in this version)."}
    )

    def __post_init__(self) -> None:
        self.to_config()

    def to_config(self) -> XLAConfig:
        """The options as the core's checked config."""
        if self.auto_sharding:
            raise UnsupportedOptionError(
                "auto_sharding=True: this version trains on one device per process and does not shard; leave it off"
            )
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "auto_sharding"}
        free_grads = values["free_grads"]
        if isinstance(free_grads, str) and free_grads.lower() in ("true", "false"):
            values["free_grads"] = free_grads.lower() == "true"
        return XLAConfig(**values)


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
