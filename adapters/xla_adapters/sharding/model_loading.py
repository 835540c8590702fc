"""`load_model`: makes a model on the meta device, from a configuration file or by a factory of the user's."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree

from xla_adapters.errors import MODEL_FAILURES, ConfigError
from xla_adapters.utils.location import described

# Entry point group: a package that can read a framework's model files registers
# `load(path, rows, length) -> (model, batch, around)` here.
MODEL_FILES = "xla_adapters.model_files"
Around = Callable[[], AbstractContextManager[Any]]


def load_model(name: str, rows: int, length: int | None) -> tuple[torch.nn.Module, Mapping[str, Any], Around]:
    """Loads a model on the meta device.

    Args:
        name: a `.json` file, or `module:factory`.
        rows: number of samples in the batch.
        length: of a sample; None if not given.

    Returns:
        The model, a batch, and a function that returns the context for forward passes.

    Raises:
        ConfigError: there is no such model, or it cannot be made; the message says why.
    """
    path = Path(name)
    if path.is_dir():
        raise ConfigError(f"--model {name}: it is a folder; give the configuration file in it: {path / 'config.json'}")
    if name.endswith(".json"):
        loaders = list(entry_points(group=MODEL_FILES))
        if not loaders:
            raise ConfigError(f"{name}: nothing installed reads configuration files; install xla-adapters[hf]")
        if not path.is_file():
            raise ConfigError(f"{name}: there is no such file")
        loaded: tuple[torch.nn.Module, Mapping[str, Any], Around] = loaders[0].load()(path, rows, length)
        return loaded
    make = _factory(name)
    try:
        with torch.device("meta"):
            made = make(rows, length)
    except ConfigError:
        raise
    except (*MODEL_FAILURES, OSError) as error:
        raise ConfigError(
            f"--model {name}: the factory, called with {rows} samples and length {length}, raised {described(error)}"
        ) from error
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], torch.nn.Module)):
        raise ConfigError(
            f"--model {name}: the factory is called with the number of samples and their length (None if not given) "
            f"and returns (model, batch); it returned {type(made).__name__}"
        )
    if not isinstance(made[1], (Mapping, tuple, list)):
        raise ConfigError(
            f"--model {name}: the batch is a dictionary of the keyword arguments of forward, or a tuple of its "
            f"positional ones; the factory returned {type(made[1]).__name__}"
        )
    model, batch = made
    sizes = {size for leaf in _pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor) for size in leaf.shape}
    if sizes and rows not in sizes:
        raise ConfigError(
            f"--model {name}: the factory was called with {rows} samples, and no tensor of its batch has so many"
        )
    return model, dict(batch) if isinstance(batch, Mapping) else batch, nullcontext


def _factory(name: str) -> Callable[[int, int | None], Any]:
    """What `module:factory` names; modules are found in the present folder, as by `python -m`."""
    module, _, factory = name.partition(":")
    if not (module and factory):
        raise ConfigError(f"--model {name}: give a .json file, or module:factory (nothing is downloaded)")
    if module.endswith(".py"):
        raise ConfigError(f"--model {name}: give the module by its name: {Path(module).stem}:{factory}")
    # The script of a console command has its own folder there. Processes that are started inherit the path.
    present = str(Path.cwd())
    if not {"", present} & set(sys.path):
        sys.path.insert(0, present)
    try:
        found: Any = importlib.import_module(module)
        for part in factory.split("."):
            found = getattr(found, part)
    except (*MODEL_FAILURES, SyntaxError, OSError) as error:
        raise ConfigError(f"--model {name}: {described(error)}") from error
    if not callable(found):
        raise ConfigError(f"--model {name}: it is no function, but of the type {type(found).__name__}")
    made: Callable[[int, int | None], Any] = found
    return made


def checkpoint_activations(model: torch.nn.Module) -> None:
    """Switches on gradient checkpointing.

    Raises:
        ConfigError: the model has no method for it.
    """
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    enable = next((getattr(model, name) for name in names if hasattr(model, name)), None)
    if enable is None:
        raise ConfigError(f"--gradient-checkpointing: {type(model).__name__} has no {names[1]}()")
    enable()
