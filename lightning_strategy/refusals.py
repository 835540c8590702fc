"""Checks that raise on what Lightning offers and XLA does not support, each with the alternative."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from lightning.fabric.connector import _Connector
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

from xla_adapters import XLAConfig, get_runtime, initialize
from xla_adapters.errors import ConfigError, RuntimeOrderError, UnsupportedOptionError
from xla_adapters.runtime import check_mode
from xla_adapters.sharding import accept_placements

_CONSTRUCTORS = {_AcceleratorConnector.__init__.__code__, _Connector.__init__.__code__}


@dataclass(frozen=True, kw_only=True)
class ConnectorFlags:
    """The arguments of a Trainer or Fabric that concern a strategy.

    Attributes:
        accelerator, devices, num_nodes, precision: as the user gave them; precision is None if not given.
        connector: Lightning's object under construction.
    """

    accelerator: Any
    devices: Any
    num_nodes: Any
    precision: Any
    connector: Any


def flags_under_construction() -> ConnectorFlags | None:
    """The flags of the Trainer or Fabric whose constructor is running now; `None` if none is."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _CONSTRUCTORS:
            given = frame.f_locals
            return ConnectorFlags(
                accelerator=given["accelerator"],
                devices=given["devices"],
                num_nodes=given["num_nodes"],
                precision=given["precision"],
                connector=given["self"],
            )
        frame = frame.f_back  # type: ignore[assignment]
    return None


_GPU_NAMES = ("gpu", "cuda")
_NO_FUSED_KERNEL = (
    "torch has no fused optimizer kernel for XLA. Leave it out: inside the compiled step XLA fuses the update by itself"
)
_ALL_DEVICES: tuple[Any, ...] = ("auto", 1, "1", -1, "-1")
_ONE_DEVICE: tuple[Any, ...] = (*_ALL_DEVICES, [0], (0,), "0,")


def check_flags(flags: ConnectorFlags, strategy: str) -> None:
    """Raises on arguments of the Trainer or Fabric that contradict the strategy.

    Raises:
        UnsupportedOptionError: with the argument, and what to give instead.
    """
    hardware = get_runtime().device.hardware()
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
    """Raises on another number of devices than one, or under sharding than that of the mesh.

    Raises:
        UnsupportedOptionError: several devices without sharding.
        ConfigError: sharding, and another number than that of the mesh.
    """
    runtime = get_runtime()
    if runtime.device.is_spmd():
        number = runtime.device.count()
        if devices not in (*_ALL_DEVICES, number, str(number)):
            raise ConfigError(
                f"devices={devices!r} and {strategy}: it shards over a mesh of all {number} devices of the process; "
                f"leave devices out, or give devices={number}"
            )
    elif runtime.device.ranks is not None:
        number = runtime.device.ranks.size
        if devices not in (*_ALL_DEVICES, number, str(number)):
            raise ConfigError(
                f"devices={devices!r} and {strategy}: {number} processes were launched, with a device each; leave "
                f"devices out, or give devices={number}"
            )
    elif devices not in _ONE_DEVICE:
        raise UnsupportedOptionError(
            f"devices={devices!r} and {strategy}: without sharding one process trains on one device; leave devices "
            f"out, or give the strategy sharding= to train on all devices of the process, e.g. {strategy}("
            "sharding='dp')"
        )


def start_runtime(strategy: str, config: XLAConfig, *, shards: bool, ranks: bool = False) -> None:
    """Starts the XLA runtime and makes the process eager; raises where the strategy does not work.

    Args:
        strategy: its name, for messages.
        config: its options; by them operations outside of steps execute at once, from now on.
        shards: whether it shards.
        ranks: whether it trains together with other processes.

    Raises:
        RuntimeOrderError: the process runs under SPMD, and the strategy does not shard.
        UnsupportedOptionError: the process is one of several, or the runtime lacks the mode.
    """
    runtime = get_runtime()
    runtime.device.use_compile_cache(config.cache_dir)
    runtime.device.initialize()
    check_mode(config.xla_mode)
    if runtime.device.is_spmd() and not shards:
        raise RuntimeOrderError(
            f"{strategy}() was created in a process that runs the XLA devices under SPMD, and it does not shard: each "
            "of the devices would compute the same. Give it auto_sharding=True or sharding=, or use it in a process of "
            "its own, without xr.use_spmd() or xla_adapters.initialize(spmd=True)"
        )
    if runtime.device.world_size() > 1 and not ranks:
        raise UnsupportedOptionError(
            f"{strategy}: {runtime.device.world_size()} processes were launched, and this version trains in one"
        )
    initialize(eager=config.eager_by_default)


def refuse_ranks(strategy: str) -> None:
    """Raises if several processes were launched, each with one device.

    Raises:
        UnsupportedOptionError: with the alternative.
    """
    launched = get_runtime().device.launched()
    if launched > 1:
        raise UnsupportedOptionError(
            f"{strategy}: {launched} processes were launched, and with Fabric each would train for itself, on the same "
            "samples as the others. Use Lightning's Trainer with XLAEagerStrategy(), or a loop of your own with "
            "xla_adapters.distribute_module; or start the script without torchrun"
        )


def check_fabric_config(config: XLAConfig) -> None:
    """Raises on options that need a loop of Lightning's, or a step that is a function.

    Raises:
        UnsupportedOptionError: with the alternative.
    """
    if config.accumulation == "unrolled":
        raise UnsupportedOptionError(
            "accumulation='unrolled' with Fabric: the loop is yours; put one `with fabric.strategy.step():` around "
            "all micro batches of an update instead"
        )
    if config.step_replay is True:
        raise UnsupportedOptionError(
            "step_replay=True with Fabric: the body of a `with` block cannot be left out; make the "
            "step a function and decorate it with xla_adapters.CompiledStep"
        )


def check_placed(module: torch.nn.Module) -> None:
    """Makes plain sharded parameters of a module's `DTensor`s; raises if there are any.

    Raises:
        ConfigError: an optimizer may refer to the parameters from before already.
    """
    if placed := accept_placements(module):
        raise ConfigError(
            f"{placed[0]} is a DTensor, of which a plain parameter was made, and an optimizer would update the "
            "former one: call xla_adapters.sharding.accept_placements(module) before the optimizer is made"
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


def config_of_run(trainer: Trainer, config: XLAConfig) -> XLAConfig:
    """The options of a run: where the Trainer looks for anomalies, its steps are not compiled.

    Raises:
        UnsupportedOptionError: an option needs compiled steps.
    """
    if not (trainer._detect_anomaly and config.compiles_step):
        return config
    why = "detect_anomaly=True reads every gradient on the host, and inside a compiled step there are none yet"
    try:
        eager = replace(config, xla_mode="eager")
    except ConfigError as error:
        raise UnsupportedOptionError(f"{why}. It is looked for with xla_mode='eager', but {error}") from error
    warnings.warn(
        f"{why}: this run executes each operation by itself, as with xla_mode='eager', which is slow. Leave the option "
        "out when the anomaly is found; EarlyStopping(check_finite=True) stops at one in compiled steps",
        stacklevel=2,
    )
    return eager


def check_trainer(trainer: Trainer, module: LightningModule, config: XLAConfig) -> None:
    """Raises on options of the Trainer and of the module that a compiled step does not support.

    Raises:
        UnsupportedOptionError: with the alternative.
    """
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
    """Raises on a fused optimizer: torch allows one that is created while its parameters are on the host.

    Raises:
        UnsupportedOptionError: it is one.
    """
    if any(group.get("fused") for group in optimizer.param_groups):
        raise UnsupportedOptionError(f"{type(optimizer).__name__}(fused=True): {_NO_FUSED_KERNEL}")


@contextmanager
def explaining_fused() -> Iterator[None]:
    """Translates torch's error about a fused optimizer for XLA parameters into one that says what to do.

    Raises:
        UnsupportedOptionError: the body asked for one.
    """
    try:
        yield
    except RuntimeError as error:
        if "fused=True" not in str(error):
            raise
        raise UnsupportedOptionError(f"configure_optimizers asks for fused=True: {_NO_FUSED_KERNEL}") from error
