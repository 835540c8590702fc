"""The XLA options of a trainer: as a dataclass, checked, and compared with the training arguments."""

from __future__ import annotations

import contextlib
import copy
import difflib
import inspect
import json
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any

import torch
from transformers import TrainingArguments
from transformers.trainer_jit_checkpoint import JITCheckpointCallback

from xla_adapters import XLAConfig, get_runtime
from xla_adapters.checkpoint import CheckpointConfig, CheckpointWarning
from xla_adapters.config import REMOVED_OPTIONS, check_switch
from xla_adapters.data.shapes import ShapePolicy
from xla_adapters.errors import ConfigError, RuntimeOrderError, UnsupportedOptionError
from xla_adapters.loop.checkpoints import refuse_background_shards
from xla_adapters.sharding import ShardingConfig
from xla_adapters.tracing.optimizers import check_supported


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
    cache_dir: str | None = None

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
    shapes: str | None = field(
        default=None,
        metadata={"help": "Give batches few shapes: auto, or the options of a ShapePolicy as JSON."},
    )

    def __post_init__(self) -> None:
        check_switch("safe_checkpoints", self.safe_checkpoints)
        check_switch("xla_report", self.xla_report)
        CheckpointConfig.resolve(self.checkpoint)
        ShapePolicy.resolve(self.shapes)
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


@dataclass(frozen=True, kw_only=True)
class TrainerOptions:
    """The XLA options of one trainer, after all checks that need no trainer.

    Attributes:
        config: how steps are run.
        sharding: how the model is sharded; None trains on one device.
        safe_checkpoints: whether a `CheckpointStore` commits checkpoints.
        checkpoint: when checkpoints are saved, and how.
        xla_report: whether it is recorded, logged and written where the time of a training goes.
        shapes: which shapes batches get; None leaves them as they are.
    """

    config: XLAConfig
    sharding: ShardingConfig | None
    safe_checkpoints: bool
    checkpoint: CheckpointConfig
    xla_report: bool = True
    shapes: ShapePolicy | None = None

    @classmethod
    def resolve(cls, xla_args: XLAArguments | XLAConfig | None, core: Mapping[str, Any], **own: Any) -> TrainerOptions:
        """The options from `xla_args` or from single arguments. Each may be given in one of the two ways.

        Args:
            xla_args: the options as one object; None if they are given singly.
            core: options of `XLAConfig` by name.
            own: the other options of `XLATrainerMixin`, by name; None stands for an option that was not given.

        Raises:
            ConfigError: an option was given in both ways, or a value is not valid.
        """
        sharding = ShardingConfig.resolve(auto_sharding=own["auto_sharding"], sharding=own["sharding"])
        if isinstance(xla_args, XLAArguments):
            if sharding is not None and xla_args.to_sharding() is not None:
                raise ConfigError("sharding was asked for twice: by xla_args= and by auto_sharding= or sharding=")
            if own["checkpoint"] is not None and xla_args.checkpoint is not None:
                raise ConfigError("the checkpoint options were given twice: as xla_args= and as checkpoint=")
            for name in ("safe_checkpoints", "xla_report", "shapes"):
                if own[name] is not None and (name != "shapes" or xla_args.shapes is not None):
                    raise ConfigError(f"the XLA options were given twice: as xla_args= and as {name}=")
        parsed = xla_args if isinstance(xla_args, XLAArguments) else XLAArguments()
        chosen = {name: getattr(parsed, name) if value is None else value for name, value in own.items()}
        return cls(
            config=XLAConfig.resolve(xla_args.to_config() if isinstance(xla_args, XLAArguments) else xla_args, core),
            sharding=sharding if sharding is not None else parsed.to_sharding(),
            safe_checkpoints=check_switch("safe_checkpoints", chosen["safe_checkpoints"]),
            checkpoint=CheckpointConfig.resolve(chosen["checkpoint"]),
            xla_report=check_switch("xla_report", chosen["xla_report"]),
            shapes=ShapePolicy.resolve(chosen["shapes"]),
        )


def take_options(arguments: dict[str, Any]) -> dict[str, Any]:
    """Takes the options of `XLAConfig`, also those of earlier versions, out of keyword arguments of all kinds."""
    names = (*XLAConfig.names(), *REMOVED_OPTIONS)
    return {name: arguments.pop(name) for name in names if name in arguments}


@contextlib.contextmanager
def naming_near_options(arguments: Mapping[str, Any]) -> Iterator[None]:
    """Adds to the TypeError of an argument that no trainer has which options have a name like it."""
    try:
        yield
    except TypeError as error:
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if unknown and unknown[1] in arguments:
            known = [option.name for option in fields(XLAArguments)]
            if near := difflib.get_close_matches(unknown[1], known, n=2):
                raise TypeError(f"{error}; did you mean {' or '.join(near)}?") from None
        raise


def check_checkpoint_options(
    config: CheckpointConfig, *, safe: bool, processes: int, in_parts: bool, limit: Any
) -> None:
    """Raises if an option cannot take effect. Warns if the default of `safe_checkpoints` has none.

    Args:
        config: how checkpoints are saved.
        safe: `safe_checkpoints`.
        processes: how many train together.
        in_parts: whether checkpoints are written shard by shard.
        limit: `save_total_limit`.

    Raises:
        ConfigError: two of them contradict each other.
        UnsupportedOptionError: this run cannot do what one of them asks for.
    """
    needs_store = [
        f"{name}={getattr(config, name)!r}"
        for name in ("asynchronous", "keep_last")
        if getattr(config, name) not in (None, False)
    ]
    if needs_store and not safe:
        raise ConfigError(f"{' and '.join(needs_store)}: only with safe_checkpoints=True")
    if config.keep_last is not None and limit is not None:
        raise ConfigError(
            f"keep_last={config.keep_last} and save_total_limit={limit} say the same in two ways: give one of them"
        )
    refuse_background_shards(config, in_parts)
    if processes > 1 and config != CheckpointConfig():
        raise UnsupportedOptionError(
            f"checkpoint={config!r}: {processes} processes train together, each of which would decide and write for "
            "itself; leave the option out"
        )
    if processes > 1 and safe:
        warnings.warn(
            f"safe_checkpoints has no effect: {processes} processes train together, and transformers has each of them "
            "write files of its own. Checkpoints are written, and loaded unchecked, as transformers does it",
            CheckpointWarning,
            stacklevel=2,
        )


def hold_jit_checkpoint(callbacks: list[Any]) -> None:
    """Makes the callback of `enable_jit_checkpoint` save only after the step. Inside it there are no values yet."""
    for callback in callbacks:
        if isinstance(callback, JITCheckpointCallback):
            callback.on_pre_optimizer_step = _nothing  # type: ignore[method-assign]


def _nothing(*args: Any, **kwargs: Any) -> None: ...


# Entries of `fsdp_config` that change what is computed, or where it is. All others say when parameters are gathered,
# which the compiler decides.
_FSDP_REFUSED = ("cpu_offload", "offload_params", "xla_fsdp_settings")


def take_fsdp(
    given: tuple[Any, ...], named: Mapping[str, Any], options: TrainerOptions
) -> tuple[tuple[Any, ...], dict[str, Any], TrainerOptions]:
    """Takes `fsdp` with `fsdp_config={"xla": True}` out of training arguments: it is `sharding="fsdp"`.

    Args:
        given, named: the arguments of a trainer. Those for training are copied, as they may be given again.
        options: of the trainer.

    Returns:
        The arguments and the options.

    Raises:
        ConfigError: the options ask for another sharding.
        UnsupportedOptionError: the config asks for what XLA does not have.
    """
    fully_sharded = ShardingConfig(scheme="fsdp")

    def taken(value: Any) -> Any:
        nonlocal options
        config: Any = value.fsdp_config if isinstance(value, TrainingArguments) and value.fsdp else {}
        if not config.get("xla"):
            return value
        if refused := [f"{name}={config[name]!r}" for name in _FSDP_REFUSED if config.get(name)]:
            raise UnsupportedOptionError(
                f"fsdp_config has {', '.join(refused)}: parameters stay on the XLA device, in their dtype; leave it "
                "out (bf16=True computes in bfloat16)"
            )
        if options.sharding not in (None, fully_sharded):
            raise ConfigError(f"the training arguments ask for fsdp, and the trainer for {options.sharding}: give one")
        options = replace(options, sharding=fully_sharded)
        copied = copy.copy(value)
        copied.fsdp, copied.fsdp_plugin_args = None, None
        if config.get("xla_fsdp_grad_ckpt") or config.get("activation_checkpointing"):
            setattr(copied, checkpointing_option(copied), True)
        return copied

    return tuple(map(taken, given)), {name: taken(value) for name, value in named.items()}, options


def checkpointing_option(args: TrainingArguments) -> str:
    """The name of the option for activation checkpointing: transformers 5.22 calls it gradient checkpointing."""
    return next(name for name in ("activation_checkpointing", "gradient_checkpointing") if hasattr(args, name))


def check_arguments(args: TrainingArguments, config: XLAConfig) -> None:
    """Raises if a training argument cannot work on XLA.

    Raises:
        UnsupportedOptionError: names the option and an alternative.
    """
    device_type = get_runtime().device.torch_device().type
    if args.use_cpu or args.device.type != device_type:
        raise UnsupportedOptionError(
            f"the training device is {args.device} (use_cpu={args.use_cpu}), and this trainer drives the device "
            f"{device_type!r}: leave use_cpu off (with torch_xla PJRT_DEVICE=CPU runs XLA on the CPU). For the plain "
            "CPU use transformers.Trainer, with USE_TORCH_XLA=0 in the environment where torch_xla is installed: "
            "without it accelerate takes the XLA device, whatever use_cpu says"
        )
    if args.fp16:
        raise UnsupportedOptionError(
            "fp16=True: its gradient scaler reads the gradients on the host at every step, and XLA devices compute in "
            "bfloat16; use bf16=True"
        )
    if args.torch_compile:
        raise UnsupportedOptionError(
            "torch_compile=True: the step is compiled by XLA already (xla_mode='eager+compile'); for the model "
            "compiled by dynamo use xla_mode='eager+dynamo'"
        )
    if args.deepspeed:
        raise UnsupportedOptionError("deepspeed: it drives CUDA devices; XLA shards by SPMD instead: sharding='fsdp'")
    if args.fsdp:
        raise UnsupportedOptionError(
            "fsdp: torch's FSDP wraps modules and drives CUDA devices; give the trainer sharding='fsdp' instead, or "
            "add fsdp_config={'xla': True}, which is the same"
        )
    if args.use_liger_kernel:
        raise UnsupportedOptionError("use_liger_kernel=True: its kernels are Triton kernels for CUDA; leave it off")
    if "fused" in (args.optim_args or ""):
        _refuse_fused(f"optim_args={args.optim_args!r}")
    if args.torch_empty_cache_steps is not None:
        raise UnsupportedOptionError("torch_empty_cache_steps: XLA devices have no such cache; leave it off")


def check_optimizer(optimizer: torch.optim.Optimizer | None, cls_and_kwargs: tuple[Any, dict[str, Any]] | None) -> None:
    """Raises if an optimizer cannot work on XLA, or asks for a fused CUDA kernel.

    Args:
        optimizer: as it was passed to the trainer; None if it was not.
        cls_and_kwargs: the class of one that transformers creates, and its arguments; None if it does not.

    Raises:
        UnsupportedOptionError: names an alternative.
    """
    if cls_and_kwargs is not None:
        # Layer-wise optimizers hold one optimizer for each parameter. Libraries pass parameter groups by that name.
        given = cls_and_kwargs[1].get("optimizer_dict")
        layers = given.values() if isinstance(given, dict) else ()
        for cls in (cls_and_kwargs[0], *map(type, layers)):
            check_supported(cls)
    if cls_and_kwargs is not None and cls_and_kwargs[1].get("fused"):
        _refuse_fused(f"optimizer_cls_and_kwargs has fused=True for {cls_and_kwargs[0].__name__}")
    if optimizer is not None:
        check_supported(type(optimizer))
    if optimizer is not None and any(group.get("fused") for group in optimizer.param_groups):
        _refuse_fused(f"the optimizer {type(optimizer).__name__} was made with fused=True")


def _refuse_fused(where: str) -> None:
    raise UnsupportedOptionError(
        f"{where}: torch has no fused optimizer kernel for XLA. Leave it out: inside the compiled step XLA fuses the "
        "update by itself"
    )


def check_runtime(shards: bool) -> None:
    """Raises if the process uses SPMD, or has several devices, and the trainer does not shard.

    Args:
        shards: whether the trainer shards.

    Raises:
        RuntimeOrderError: the process uses SPMD.
        ConfigError: it has several devices.
    """
    device = get_runtime().device
    if not shards and device.is_spmd():
        raise RuntimeOrderError(
            "the trainer was created without sharding in a process that runs the XLA devices under SPMD: each of the "
            "devices would compute the same. Give auto_sharding=True or sharding=, or use a process without SPMD"
        )
    if not shards and (count := device.count_here()) > 1:
        raise ConfigError(
            f"this process has {count} devices, and the trainer was created without sharding: torch_xla counts each "
            f"device as a process, and this one would wait for the other {count - 1} at the first reduction. Give "
            "auto_sharding=True, or sharding='fsdp', to train on all of them, and call "
            "xla_adapters.initialize(spmd=True) at the start; or have one device by CPU_NUM_DEVICES=1, or on a TPU "
            "TPU_VISIBLE_CHIPS=0"
        )
