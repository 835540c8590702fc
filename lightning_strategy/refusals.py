"""What Lightning offers and XLA cannot do, refused with the alternative."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_strategy.connector import ConnectorFlags
from xla_adapters import XLAConfig, get_backend
from xla_adapters.errors import ConfigError, RuntimeOrderError, UnsupportedOptionError

_GPU_NAMES = ("gpu", "cuda")
_NO_FUSED_KERNEL = (
    "torch has no fused optimizer kernel for XLA. Leave it out: inside the compiled step XLA fuses the update by itself"
)
_ALL_DEVICES: tuple[Any, ...] = ("auto", 1, "1", -1, "-1")
_ONE_DEVICE: tuple[Any, ...] = (*_ALL_DEVICES, [0], (0,), "0,")


def check_flags(flags: ConnectorFlags, strategy: str) -> None:
    """Raises on arguments of the Trainer or Fabric that contradict the strategy.

    Raises:
        UnsupportedOptionError: with the argument and what to give instead.
    """
    hardware = get_backend().hardware()
    accelerator = flags.accelerator
    if isinstance(accelerator, str) and accelerator not in ("auto", hardware.lower()):
        is_same = (accelerator in _GPU_NAMES and hardware in ("CUDA", "GPU")) or accelerator == "xla"
        if not is_same:
            raise UnsupportedOptionError(
                f"accelerator={accelerator!r} and {strategy}: this strategy drives the PJRT device of the process, "
                f"which is {hardware} (PJRT_DEVICE). Leave accelerator out, or give another strategy"
            )
    check_devices(flags.devices, strategy)
    if flags.num_nodes != 1:
        raise UnsupportedOptionError(
            f"num_nodes={flags.num_nodes} and {strategy}: this version trains in one process on one node"
        )


def check_devices(devices: Any, strategy: str) -> None:
    """Raises on a number of devices other than the strategy's: one, or under sharding those of the mesh.

    Raises:
        UnsupportedOptionError: several devices without sharding.
        ConfigError: sharding, and another number than that of the mesh.
    """
    backend = get_backend()
    if backend.is_spmd():
        number = backend.device_count()
        if devices not in (*_ALL_DEVICES, number, str(number)):
            raise ConfigError(
                f"devices={devices!r} and {strategy}: it shards over a mesh of all {number} devices of the process; "
                f"leave devices out, or give devices={number}"
            )
    elif devices not in _ONE_DEVICE:
        raise UnsupportedOptionError(
            f"devices={devices!r} and {strategy}: without sharding one process trains on one device; leave devices "
            f"out, or give the strategy sharding= to train on all devices of the process, e.g. {strategy}("
            "sharding='dp')"
        )


def check_runtime(strategy: str, *, shards: bool) -> None:
    """Raises if the runtime is in a state the strategy cannot work in.

    Raises:
        RuntimeOrderError: the process runs under SPMD, and the strategy does not shard.
        UnsupportedOptionError: the process is one of several.
    """
    backend = get_backend()
    backend.initialize()
    if backend.is_spmd() and not shards:
        raise RuntimeOrderError(
            f"{strategy}() was created in a process that runs the XLA devices under SPMD, and it does not shard: each "
            "of the devices would compute the same. Give it auto_sharding=True or sharding=, or use it in a process of "
            "its own, without xr.use_spmd() or xla_adapters.initialize(spmd=True)"
        )
    if backend.world_size() > 1:
        raise UnsupportedOptionError(
            f"{strategy}: {backend.world_size()} processes were launched, and this version trains in one"
        )


def check_nesting(active: Sequence[XLAConfig], config: XLAConfig) -> None:
    """Raises if a run begins inside another one with other settings (a fit from a callback of a fit, say).

    Raises:
        ConfigError: with the options that differ.
    """
    for outer in active:
        differing = [
            f"{field.name}={getattr(outer, field.name)!r} there and {getattr(config, field.name)!r} here"
            for field in fields(config)
            if getattr(outer, field.name) != getattr(config, field.name)
        ]
        if differing:
            raise ConfigError(
                "a run begins while another one in this process is under way with other settings: "
                f"{'; '.join(differing)}. The mode belongs to the whole process: give both strategies the same "
                "settings, or start the second run when the first has ended"
            )


def check_trainer(trainer: Trainer, module: LightningModule, config: XLAConfig) -> None:
    """Raises on what the Trainer and the module want and a compiled step cannot do.

    Raises:
        UnsupportedOptionError: with the alternative.
    """
    if trainer._detect_anomaly and config.compiles_step:
        raise UnsupportedOptionError(
            "detect_anomaly=True: it reads every gradient on the host, and inside a compiled step there are none yet. "
            "Use xla_mode='eager' to look for the anomaly, or EarlyStopping(check_finite=True) to stop at it"
        )
    if module.automatic_optimization:
        return
    if config.accumulation == "unrolled":
        raise UnsupportedOptionError(
            "accumulation='unrolled' with manual optimization: your training_step decides when the optimizer steps; "
            "leave the option out"
        )
    if config.free_grads is True:
        raise UnsupportedOptionError(
            "free_grads=True with manual optimization: gradients belong to your training_step; call "
            "optimizer.zero_grad() at its end instead"
        )


def check_fused(optimizer: torch.optim.Optimizer) -> None:
    """Raises on a fused optimizer, made while its parameters were still on the host.

    Raises:
        UnsupportedOptionError: it is one.
    """
    if any(group.get("fused") for group in optimizer.param_groups):
        raise UnsupportedOptionError(f"{type(optimizer).__name__}(fused=True): {_NO_FUSED_KERNEL}")


@contextmanager
def explaining_fused() -> Iterator[None]:
    """Says what to do about a fused optimizer, which torch refuses for XLA parameters.

    Raises:
        UnsupportedOptionError: the body asked for one.
    """
    try:
        yield
    except RuntimeError as error:
        if "fused=True" not in str(error):
            raise
        raise UnsupportedOptionError(f"configure_optimizers asks for fused=True: {_NO_FUSED_KERNEL}") from error
