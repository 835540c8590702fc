"""Lists the parameters of a model, with tied names and given specs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn

from xla_adapters.errors import ConfigError
from xla_adapters.sharding.mesh import Mesh, Spec
from xla_adapters.sharding.plan_data import ParameterPlan


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One parameter of the user's model.

    Attributes:
        name: as in `named_parameters()`.
        tied: its other names.
        tensor: the parameter.
        fixed: its spec, if it is given by the user.
        decided_by: `"planner"`, `"user"` (annotated) or `"override"`.
    """

    name: str
    tied: tuple[str, ...]
    tensor: torch.Tensor
    fixed: Spec | None
    decided_by: str

    def planned(self, spec: Spec, used: Spec | None = None) -> ParameterPlan:
        """The parameter's entry in a plan.

        Args:
            spec: how it is stored.
            used: see `ParameterPlan`.
        """
        return ParameterPlan(
            name=self.name,
            shape=tuple(self.tensor.shape),
            dtype=str(self.tensor.dtype).removeprefix("torch."),
            spec=spec,
            tied=self.tied,
            decided_by=self.decided_by,
            used=used,
        )


def take(model: nn.Module, fixed: Mapping[str, Spec], overrides: Mapping[str, Spec]) -> list[Entry]:
    """Lists all parameters; those with several names (tied weights) once.

    Args:
        model: the model.
        fixed: specs that the user annotated, by any name; they have priority over overrides.
        overrides: specs by name pattern; the first pattern that matches counts.

    Raises:
        ConfigError: `fixed` has an unknown name, or different specs for one parameter.
    """
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        tensors[id(parameter)] = parameter
    unknown = sorted(set(fixed) - {name for group in names.values() for name in group})
    if unknown:
        raise ConfigError(f"specs are fixed for {', '.join(unknown)}, and the model has no such parameter")
    entries = []
    for identity, (name, *tied) in names.items():
        given = {fixed[item] for item in (name, *tied) if item in fixed}
        if len(given) > 1:
            raise ConfigError(f"{name} is tied to {', '.join(tied)}, and their fixed specs differ: {given}")
        spec, decided_by = None, "planner"
        if given:
            spec, decided_by = given.pop(), "user"
        else:
            for pattern, override in overrides.items():
                if any(fnmatchcase(item, pattern) for item in (name, *tied)):
                    spec, decided_by = override, "override"
                    break
        entries.append(Entry(name=name, tied=tuple(tied), tensor=tensors[identity], fixed=spec, decided_by=decided_by))
    return entries


def check(entries: list[Entry], mesh: Mesh) -> None:
    """Raises if a parameter cannot be split as given.

    Raises:
        ConfigError: an axis is unknown, or a dimension does not divide.
    """
    for entry in entries:
        if entry.fixed is not None:
            mesh.check(entry.name, tuple(entry.tensor.shape), entry.fixed)
