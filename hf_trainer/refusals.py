"""Checks of training arguments and optimizers, before anything is built: raises on what cannot work on XLA."""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainingArguments

from xla_adapters import XLAConfig, get_runtime
from xla_adapters.errors import ConfigError, RuntimeOrderError, UnsupportedOptionError
from xla_adapters.tracing.optimizer_packages import check_supported


def check_arguments(args: TrainingArguments, config: XLAConfig) -> None:
    """Raises if a training argument cannot work on XLA.

    Raises:
        UnsupportedOptionError: names the option and an alternative.
    """
    device_type = get_runtime().device.torch_device().type
    if args.use_cpu or args.device.type != device_type:
        raise UnsupportedOptionError(
            f"the training device is {args.device} (use_cpu={args.use_cpu}), and this trainer drives the device "
            f"{device_type!r}: leave use_cpu off (with torch_xla PJRT_DEVICE=CPU runs XLA on the CPU), or use "
            "transformers.Trainer on the plain CPU"
        )
    if args.fp16 or args.fp16_full_eval:
        option = "fp16" if args.fp16 else "fp16_full_eval"
        raise UnsupportedOptionError(
            f"{option}=True: its gradient scaler reads the gradients on the host at every step, and XLA devices "
            f"compute in bfloat16; use {option.replace('fp16', 'bf16')}=True"
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
            "fsdp: transformers' FSDP on XLA never creates the optimizer (5.23) and cannot train; leave it off and "
            "give the trainer sharding='fsdp'"
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
            "auto_sharding=True, or sharding='fsdp', to train on all of them; or have one device by CPU_NUM_DEVICES=1, "
            "or on a TPU TPU_VISIBLE_CHIPS=0"
        )
