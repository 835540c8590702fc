"""Sharded checkpoints: folders as Lightning's FSDP strategy writes them, which its tools read, too."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io import CheckpointIO
from torch.optim import Optimizer

from lightning_strategy.checkpoints import EXACT_STATE, XLAEagerCheckpointIO
from lightning_strategy.sharding import on_host
from lightning_strategy.steps import GRADIENTS
from xla_adapters.errors import ConfigError, UnsupportedOptionError
from xla_adapters.sharding.state import load_gradients, load_model, load_optimizer, optimizer_state, save_state
from xla_adapters.utils.nested_values import identity
from xla_adapters.utils.unpickling import load_values

# Lightning's names for the file of everything but tensors and for the model (lightning.fabric.strategies.fsdp).
META, MODEL = "meta.pt", "model"
# The key in a loaded checkpoint for the folder of its shards.
FOLDER = "xla_adapters_folder"


def is_sharded(path: Any) -> bool:
    """Whether there is a sharded checkpoint at this path."""
    return (Path(path) / META).is_file()


def check_io(strategy: str, io: CheckpointIO | None) -> XLAEagerCheckpointIO:
    """The `checkpoint_io` that commits sharded checkpoints; raises if it is a plugin of the user's.

    Args:
        strategy: its name, for the message.
        io: of the strategy; None for a new one.

    Raises:
        UnsupportedOptionError: it is a plugin of the user's, which would not be used.
    """
    if io is not None and not isinstance(io, XLAEagerCheckpointIO):
        raise UnsupportedOptionError(
            f"{strategy} with checkpoints='sharded' writes parts itself, and has no use for {type(io).__name__}: leave "
            "checkpoints at 'whole', or the plugin away"
        )
    return io if io is not None else XLAEagerCheckpointIO()


def save(
    io: XLAEagerCheckpointIO,
    checkpoint: Mapping[str, Any],
    path: Any,
    module: torch.nn.Module,
    optimizers: list[Optimizer],
) -> None:
    """Writes the Trainer's checkpoint to a folder: weights and optimizer states in shards, the rest in a file.

    Args:
        io: commits it.
        checkpoint: what Lightning saves, on the device.
        path: of the folder; one that exists is replaced when the new one is complete.
        module: whose weights are saved.
        optimizers: of the module.
    """
    rest = {name: value for name, value in checkpoint.items() if name not in ("state_dict", "optimizer_states")}
    state: dict[str, Any] = {MODEL: _each_once(checkpoint["state_dict"])}
    if "optimizer_states" in checkpoint:
        rest["optimizer_states"] = []
        state |= {_key(index): optimizer_state(module, optimizer) for index, optimizer in enumerate(optimizers)}
    own = dict(rest.get(EXACT_STATE, {}))
    if GRADIENTS in own:
        state[GRADIENTS] = own.pop(GRADIENTS)
        rest[EXACT_STATE] = own
    write(io, state, rest, path)


def write(io: XLAEagerCheckpointIO, state: Mapping[str, Any], rest: dict[str, Any], path: Any) -> None:
    """Writes a folder, which appears when it is complete.

    Args:
        io: commits it.
        state: nested tensors, which are saved in shards.
        rest: everything else.
        path: of the folder.

    Raises:
        UnsupportedOptionError: the path is no local one.
    """
    if "://" in os.fspath(path):
        raise UnsupportedOptionError(f"{path}: checkpoints in parts are written to local folders only")
    folder = Path(path).absolute()

    def put(target: Path) -> None:
        save_state(state, target)
        torch.save(on_host(rest), target / META)

    if folder.name.startswith((".", "_")):
        # A temporary checkpoint of Lightning's. A store uses such names for itself, and never loads them.
        _remove(folder)
        folder.mkdir(parents=True)
        put(folder)
        return
    io.save_folder(int(rest.get("global_step", 0)), put, folder)


def read_rest(io: CheckpointIO, path: Any, weights_only: bool | None = None) -> dict[str, Any]:
    """Everything in a sharded checkpoint but the shards, and where these are (`FOLDER`).

    Args:
        io: of the strategy; compares the folder with its manifest.
        path: of the folder.
        weights_only: as for `torch.load`.

    Raises:
        CheckpointDamagedError: the folder differs from its manifest.
        CheckpointUnsafeError: a file names code, and the user did not say `weights_only=False`.
    """
    (io if isinstance(io, XLAEagerCheckpointIO) else XLAEagerCheckpointIO()).verify(path)
    rest: dict[str, Any] = load_values(Path(path) / META, weights_only=weights_only)
    return {**rest, FOLDER: os.fspath(path)}


def load_weights(checkpoint: Mapping[str, Any], module: torch.nn.Module, *, strict: bool) -> None:
    """Reads the weights of a checkpoint that `read_rest` returned, into a module on any device."""
    load_model(module, checkpoint[FOLDER], key=MODEL, strict=strict)


def load_optimizers(checkpoint: Mapping[str, Any], module: torch.nn.Module, optimizers: list[Optimizer]) -> None:
    """Reads the optimizer states of a checkpoint that `read_rest` returned, sharded as the parameters are now."""
    for index, optimizer in enumerate(optimizers):
        load_optimizer(module, optimizer, checkpoint[FOLDER], key=_key(index))


def load_accumulated(checkpoint: Mapping[str, Any], module: torch.nn.Module) -> None:
    """Reads the gradients of a checkpoint that was saved in the middle of an accumulation."""
    load_gradients(module, checkpoint[FOLDER], key=GRADIENTS)


def save_objects(
    io: XLAEagerCheckpointIO,
    state: Mapping[str, Any],
    rest: dict[str, Any],
    path: Any,
    filter: Mapping[str, Callable[[str, Any], bool]],
) -> None:
    """Writes the state that Fabric's user saves: modules and optimizers in shards, under their keys.

    Args:
        io: commits it.
        state: as the user gave it.
        rest: everything in it that is neither module nor optimizer, ready to be saved.
        path: of the folder.
        filter: by key of a module, a function that says which entries of its state dict are saved.
    """
    parts: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, torch.nn.Module):
            wanted = filter.get(key, _all)
            entries = {name: entry for name, entry in value.state_dict().items() if wanted(name, entry)}
            parts[key] = _each_once(entries)
        elif isinstance(value, Optimizer):
            parts[key] = optimizer_state(_owner(value, state), value)
    write(io, parts, rest, path)


def load_objects(
    io: CheckpointIO, state: dict[str, Any], path: Any, *, strict: bool, weights_only: bool | None
) -> dict[str, Any]:
    """Reads what `save_objects` wrote into the user's objects; returns the entries that the user did not ask for.

    Raises:
        KeyError: under `strict`, the checkpoint lacks an entry that is neither module nor optimizer.
    """
    rest = read_rest(io, path, weights_only)
    del rest[FOLDER]
    for key, value in state.items():
        if isinstance(value, torch.nn.Module):
            load_model(value, path, key=key, strict=strict)
        elif isinstance(value, Optimizer):
            load_optimizer(_owner(value, state), value, path, key=key)
        elif key in rest and hasattr(value, "load_state_dict"):
            value.load_state_dict(rest.pop(key))
        elif key in rest:
            state[key] = rest.pop(key)
        elif strict:
            raise KeyError(f"{path} has no entry {key!r}; it has {', '.join(map(repr, rest)) or 'none but parts'}")
    return rest


def _owner(optimizer: Optimizer, state: Mapping[str, Any]) -> torch.nn.Module:
    """The module in the state whose parameters the optimizer updates."""
    parameters = {id(item) for group in optimizer.param_groups for item in group["params"]}
    for value in state.values():
        if isinstance(value, torch.nn.Module) and parameters <= {id(item) for item in value.parameters()}:
            return value
    raise ConfigError(
        "a checkpoint in parts names an optimizer's state by the parameters of its module, and none of the modules in "
        "the state has them all: put the module beside its optimizer"
    )


def _all(name: str, value: Any) -> bool:
    return True


def _key(index: int) -> str:
    return f"optimizer_{index}"


def _each_once(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Weights with one name each: a tied weight has several."""
    kept: dict[str, Any] = {}
    seen: set[object] = set()
    for name, value in weights.items():
        if isinstance(value, torch.Tensor):
            if identity(value) in seen:
                continue
            seen.add(identity(value))
        kept[name] = value
    return kept


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    elif path.exists():
        path.unlink()
