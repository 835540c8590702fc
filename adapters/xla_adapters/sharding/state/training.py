"""The state of models and optimizers for checkpoints, with the names of parameters as keys."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import set_element

from xla_adapters.errors import ConfigError
from xla_adapters.runtime import get_runtime
from xla_adapters.runtime.transfers import to_host_in_one_transfer
from xla_adapters.sharding.state.loading import Destination, OnDevice, Reader, destination_of
from xla_adapters.utils.unpickling import load_values

MODEL, OPTIMIZER = "model", "optimizer"
# torch.optim keeps its step count on the host, unless the group is `capturable` or `fused`.
_COUNT = "step"


def model_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name; a tied weight only under its first name."""
    persistent = model.state_dict(keep_vars=True).keys()
    tensors = [*model.named_parameters(remove_duplicate=True), *model.named_buffers(remove_duplicate=True)]
    return {name: tensor for name, tensor in tensors if name in persistent}


def optimizer_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state with names of parameters as keys, so that it does not depend on mesh or order.

    Args:
        model: whose parameters the optimizer updates.
        optimizer: a `torch.optim.Optimizer`.

    Raises:
        ConfigError: the optimizer updates a parameter that the model does not have.
    """
    names = names_of_updated(model, optimizer)
    groups = [
        {**group, "params": [names[id(parameter)] for parameter in group["params"]]} for group in optimizer.param_groups
    ]
    packed = io.BytesIO()
    torch.save(to_host_in_one_transfer(groups), packed)
    state = {names[id(parameter)]: dict(values) for parameter, values in optimizer.state.items() if values}
    return {"state": state, "groups": packed.getvalue()}


def load_model(model: torch.nn.Module, folder: str | Path, *, key: str = MODEL, strict: bool = True) -> None:
    """Loads a model from a checkpoint, in place; parameters keep their present sharding.

    Args:
        model: on the device or the host, sharded or not.
        folder: written by `save_state({"model": model_state(model), ...}, folder)`.
        key: the key of the model's state (`model_state`, or the whole `state_dict()`) in the checkpoint.
        strict: whether model and checkpoint must have the same names; otherwise the common names are loaded.

    Raises:
        ConfigError: the checkpoint is of another model, or there is none.
    """
    runtime, reader = get_runtime(), Reader(folder)
    saved = reader.under(key)
    names = {str(path[0]) for path in saved.values()}
    in_place, expected = model_state(model), set(model.state_dict().keys())
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - in_place.keys()
    if strict:
        lacks, has = sorted(expected - names - tied), sorted(names - expected)
        if lacks or has:
            named = [f"{verb} {', '.join(some[:5])}" for verb, some in (("lacks", lacks), ("has", has)) if some]
            raise ConfigError(f"{folder} is a checkpoint of another model ({'; '.join(named)})")
    targets = {full: in_place[full_name] for full, path in saved.items() if (full_name := str(path[0])) in in_place}
    for full, value in reader.read({full: destination_of(tensor) for full, tensor in targets.items()}):
        if runtime.device.owns(targets[full]):
            runtime.values.restore(targets[full], runtime.values.snapshot(value))
    # Extra state of modules (`get_extra_state`) is loaded by their own methods.
    rest = {full: path for full, path in saved.items() if path[0] in expected - in_place.keys() - tied}
    if rest:
        own: dict[str, Any] = {}
        for full, value in reader.on_host(list(rest)):
            set_element(own, rest[full], value)
        model.load_state_dict(own, strict=False)


def load_optimizer(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: str | Path, *, key: str = OPTIMIZER
) -> None:
    """Loads an optimizer from a checkpoint; its state gets the present sharding of the parameters.

    Args:
        model: whose parameters the optimizer updates, on the device or the host.
        optimizer: needs no state yet.
        folder: written by `save_state({"optimizer": optimizer_state(model, optimizer), ...}, folder)`.
        key: the key of the optimizer's state in the checkpoint.

    Raises:
        ConfigError: the checkpoint is of another optimizer or model, or there is none.
    """
    reader = Reader(folder)
    names = names_of_updated(model, optimizer)
    parameters = {names[id(item)]: item for group in optimizer.param_groups for item in group["params"]}
    groups = _groups(reader, f"{key}.groups", optimizer, names)
    of_group = {name: saved for saved in groups for name in saved["params"]}
    destinations: dict[str, Destination] = {}
    objects: list[str] = []
    places: dict[str, tuple[str, str]] = {}
    for full, path in reader.under(key).items():
        if path[0] != "state":
            continue
        name, entry = str(path[1]), str(path[2])
        if len(path) != 3 or name not in parameters:
            raise ConfigError(f"{folder} has a state {full!r}, which fits no parameter of this optimizer")
        places[full] = name, entry
        if full in reader.tensors:
            group = of_group[name]
            # As torch's `Optimizer.load_state_dict`.
            on_host = entry == _COUNT and not (group.get("capturable") or group.get("fused"))
            destinations[full] = _destination(reader, full, parameters[name], on_host=on_host)
        else:
            objects.append(full)
    states: dict[str, dict[str, Any]] = {}
    for full, value in (*reader.objects(objects).items(), *reader.read(destinations)):
        name, entry = places[full]
        states.setdefault(name, {})[entry] = value
    optimizer.state.clear()
    for name, values in states.items():
        optimizer.state[parameters[name]] = values
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        group.update({option: value for option, value in saved.items() if option != "params"})


def load_gradients(model: torch.nn.Module, folder: str | Path, *, key: str) -> None:
    """Loads gradients that were saved by name of the parameter; they get the present sharding of the parameters.

    Args:
        model: on the device or the host.
        folder: written by `save_state({key: gradients, ...}, folder)`.
        key: the key of the gradients in the checkpoint.

    Raises:
        ConfigError: the gradients are of another model, or there is no checkpoint.
    """
    reader, parameters = Reader(folder), dict(model.named_parameters())
    names = {full: ".".join(map(str, path)) for full, path in reader.under(key).items()}
    strangers = sorted(set(names.values()) - parameters.keys())
    if strangers:
        raise ConfigError(f"{folder} has gradients of another model ({', '.join(strangers[:5])})")
    destinations = {full: _destination(reader, full, parameters[name]) for full, name in names.items()}
    for full, value in reader.read(destinations):
        parameters[names[full]].grad = value


def _destination(reader: Reader, full: str, parameter: torch.Tensor, *, on_host: bool = False) -> Destination:
    """A new tensor on the parameter's device, with its sharding if it has its shape."""
    saved = reader.tensors[full]
    runtime = get_runtime()
    if on_host or not runtime.device.owns(parameter):
        return Destination(saved.size, saved.properties.dtype)
    like = parameter if saved.size == parameter.shape else None
    return OnDevice(saved.size, saved.properties.dtype, like=like, runtime=runtime)


def _groups(
    reader: Reader, name: str, optimizer: torch.optim.Optimizer, names: Mapping[int, str]
) -> list[dict[str, Any]]:
    if name not in reader.metadata.state_dict_metadata:
        raise ConfigError(f"{reader.folder} has no state of an optimizer ({name})")
    saved: list[dict[str, Any]] = load_values(io.BytesIO(reader.objects([name])[name]), f"{reader.folder} ({name})")
    own = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
    if [sorted(group["params"]) for group in saved] != [sorted(group) for group in own]:
        raise ConfigError(
            f"{reader.folder}: the optimizer's groups hold other parameters in the checkpoint than here; make it with "
            "the same groups"
        )
    return saved


def names_of_updated(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[int, str]:
    """The names of the model's parameters by `id`.

    Raises:
        ConfigError: the optimizer updates parameters that the model does not have.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    strangers = sum(id(parameter) not in names for group in optimizer.param_groups for parameter in group["params"])
    if strangers:
        raise ConfigError(
            f"the optimizer updates {strangers} parameters that the model does not have: it was made for another "
            "model, before the model was moved to the device, or before its DTensors were accepted; make it afterwards"
        )
    return names
