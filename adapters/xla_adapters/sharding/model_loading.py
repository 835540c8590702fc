"""`load_model`: makes a model on the meta device, from a configuration file or by a factory of the user's."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch

from xla_adapters.errors import ConfigError

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
    """
    if name.endswith(".json"):
        loaders = list(entry_points(group=MODEL_FILES))
        if not loaders:
            raise ConfigError(f"{name}: nothing installed reads configuration files; install xla-adapters[hf]")
        if not Path(name).is_file():
            raise ConfigError(f"{name}: there is no such file")
        loaded: tuple[torch.nn.Module, Mapping[str, Any], Around] = loaders[0].load()(Path(name), rows, length)
        return loaded
    module, separator, factory = name.partition(":")
    if not separator:
        raise ConfigError(f"--model {name}: give a .json file, or module:factory")
    try:
        make = getattr(importlib.import_module(module), factory)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"--model {name}: {error}") from error
    with torch.device("meta"):
        made = make(rows, length)
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], torch.nn.Module)):
        raise ConfigError(
            f"--model {name}: the factory is called with the number of samples and their length (None if not given) "
            f"and returns (model, batch); it returned {type(made).__name__}"
        )
    return (*made, nullcontext)


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
