"""What of a training is saved: the state of a model and of an optimizer, by the names of the parameters."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import set_element

from xla_adapters.backend import get_backend
from xla_adapters.errors import ConfigError
from xla_adapters.sharding.state.loading import Destination, OnDevice, Reader, destination_of
from xla_adapters.transfers import to_host_in_one_transfer

MODEL, OPTIMIZER = "model", "optimizer"
# torch.optim counts steps on the host, unless the group says otherwise.
_COUNT = "step"


def model_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers that belong to a checkpoint, each once: a tied weight under its first name."""
    persistent = model.state_dict(keep_vars=True).keys()
    tensors = [*model.named_parameters(remove_duplicate=True), *model.named_buffers(remove_duplicate=True)]
    return {name: tensor for name, tensor in tensors if name in persistent}


def optimizer_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state by the names of the parameters, so that it fits any mesh and any order of groups.

    Args:
        model: that the optimizer updates.
        optimizer: any of torch.optim's kind.

    Raises:
        ConfigError: it updates a parameter that the model does not have.
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
    """Reads the model's part of a checkpoint: `save_state({"model": model_state(model), ...}, folder)`.

    Args:
        model: on the device or the host, sharded in any way or not.
        folder: the checkpoint.
        key: under which the model's state was saved, `model_state` or its whole `state_dict()`.
        strict: whether model and checkpoint must have the same names; otherwise what both have is read.

    Raises:
        ConfigError: it is another model's, or no checkpoint.
    """
    backend, reader = get_backend(), Reader(folder)
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
        if backend.is_backend_tensor(targets[full]):
            backend.restore(targets[full], backend.snapshot(value))
    # What modules save by methods of their own, they load by such.
    rest = {full: path for full, path in saved.items() if path[0] in expected - in_place.keys() - tied}
    if rest:
        own: dict[str, Any] = {}
        for full, value in reader.on_host(list(rest)):
            set_element(own, rest[full], value)
        model.load_state_dict(own, strict=False)


def load_optimizer(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: str | Path, *, key: str = OPTIMIZER
) -> None:
    """Reads the optimizer's part of a checkpoint, cut as the parameters are cut now.

    Args:
        model: that the optimizer updates, on the device or the host.
        optimizer: as it was made; it needs no state yet.
        folder: that `save_state({"optimizer": optimizer_state(model, optimizer), ...}, folder)` wrote.
        key: under which the optimizer's state was saved.

    Raises:
        ConfigError: it is another optimizer's or model's, or no checkpoint.
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
            destinations[full] = _destination(reader, full, parameters[name], entry, of_group[name])
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
    """Reads gradients that were saved by the names of their parameters, cut as the parameters are cut now.

    Args:
        model: on the device or the host.
        folder: that `save_state({key: gradients, ...}, folder)` wrote.
        key: under which they were saved.

    Raises:
        ConfigError: they are another model's, or it holds no checkpoint.
    """
    reader, parameters = Reader(folder), dict(model.named_parameters())
    names = {full: ".".join(map(str, path)) for full, path in reader.under(key).items()}
    strangers = sorted(set(names.values()) - parameters.keys())
    if strangers:
        raise ConfigError(f"{folder} has gradients of another model ({', '.join(strangers[:5])})")
    backend, destinations = get_backend(), dict[str, Destination]()
    for full, name in names.items():
        saved, parameter = reader.tensors[full], parameters[name]
        destinations[full] = (
            OnDevice(saved.size, saved.properties.dtype, like=parameter, backend=backend)
            if backend.is_backend_tensor(parameter)
            else Destination(saved.size, saved.properties.dtype)
        )
    for full, value in reader.read(destinations):
        parameters[names[full]].grad = value


def _destination(
    reader: Reader, full: str, parameter: torch.Tensor, entry: str, group: Mapping[str, Any]
) -> Destination:
    """Where torch's `Optimizer.load_state_dict` puts it: with the parameter, but for counts of steps."""
    saved = reader.tensors[full]
    backend = get_backend()
    on_host = entry == _COUNT and not (group.get("capturable") or group.get("fused"))
    if on_host or not backend.is_backend_tensor(parameter):
        return Destination(saved.size, saved.properties.dtype)
    like = parameter if saved.size == parameter.shape else None
    return OnDevice(saved.size, saved.properties.dtype, like=like, backend=backend)


def _groups(
    reader: Reader, name: str, optimizer: torch.optim.Optimizer, names: Mapping[int, str]
) -> list[dict[str, Any]]:
    if name not in reader.metadata.state_dict_metadata:
        raise ConfigError(f"{reader.folder} has no state of an optimizer ({name})")
    saved: list[dict[str, Any]] = torch.load(io.BytesIO(reader.objects([name])[name]), weights_only=False)
    own = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
    if [sorted(group["params"]) for group in saved] != [sorted(group) for group in own]:
        raise ConfigError(
            f"{reader.folder}: the optimizer's groups hold other parameters in the checkpoint than here; make it with "
            "the same groups"
        )
    return saved


def names_of_updated(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[int, str]:
    """The names of the model's parameters by `id`, all that the optimizer updates among them.

    Raises:
        ConfigError: it updates others.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    strangers = sum(id(parameter) not in names for group in optimizer.param_groups for parameter in group["params"])
    if strangers:
        raise ConfigError(
            f"the optimizer updates {strangers} parameters that the model does not have: it was made for another "
            "model, before the model was moved to the device, or before its DTensors were accepted; make it afterwards"
        )
    return names
