"""`ShardingConfig`: the user's options for sharding."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from xla_adapters.errors import ConfigError
from xla_adapters.sharding.mesh import Mesh, Spec, as_spec
from xla_adapters.sharding.plan import ShardingPlan

Scheme = Literal["auto", "dp", "fsdp", "tp", "2d"]
TopologyName = Literal["cpu", "v4", "v5e", "v5p", "v6e", "tpu7x"]
Checkpoints = Literal["whole", "sharded"]
# How many of the planner's plans are compiled if nothing is said.
MEASURED_PLANS = 2
_SLICE = re.compile(r"(\w+):\d+(?:x\d+)*")


@dataclass(frozen=True, kw_only=True)
class ShardingConfig:
    """How a model is split over the devices.

    Args:
        scheme: `"dp"` splits the batch and copies the model; `"fsdp"` splits parameters, gradients and
            optimizer state too; `"tp"` splits layers (Megatron-LM); `"2d"` combines the last two, each on an
            axis of its own; `"auto"` takes the cheapest of the planner's plans and these templates.
        mesh_shape: devices along each axis; chosen if not given.
        axis_names: of the mesh; `("data", "model")` if not given.
        partitioner: `"planner"`, the only one; so the dict of RFC pytorch/xla#6322 can be given.
        keep_user_sharding: keep the sharding of parameters that are already annotated, and plan the others.
        memory_budget: bytes per device for parameters, gradients, optimizer state and activations; if not
            given, nine tenths of the topology's memory (on the CPU no limit).
        topology: the kind of devices and links, for the planner: `"cpu"`, `"v4"`, `"v5e"`, `"v5p"`,
            `"v6e"` or `"tpu7x"` (Ironwood); that of the device if not given. Or a slice of TPUs with its chips
            along each dimension, `"v5p:2x2x2"`, for `measure_top_k`.
        measure_top_k: how many of the planner's plans are compiled, beside the templates, in separate processes, and
            compared by communication volume and memory of the compiled step. 0 compares predictions. If not given,
            2 on CPU devices; 0 on TPUs, for which libtpu compiles (extra `preflight`): that takes minutes.
        plan: a finished plan (`ShardingPlan.load`); nothing is planned then.
        overrides: specs by name pattern (shell style, e.g. `{"*.lm_head.weight": ("model", None)}`); the
            first pattern that matches a parameter counts.
        checkpoints: `"whole"` gathers the state on the host and writes the files of an unsharded run; with
            `"sharded"` each process writes what its devices hold.

    Raises:
        ConfigError: a value is not valid; the message lists the valid ones.
    """

    scheme: Scheme = "auto"
    mesh_shape: tuple[int, ...] | None = None
    axis_names: tuple[str, ...] | None = None
    partitioner: str = "planner"
    keep_user_sharding: bool = True
    memory_budget: int | None = None
    topology: str | None = None
    measure_top_k: int | None = None
    plan: ShardingPlan | None = None
    overrides: Mapping[str, Spec] = field(default_factory=dict)
    checkpoints: Checkpoints = "whole"

    def __post_init__(self) -> None:
        for name, value, choices in (
            ("scheme", self.scheme, get_args(Scheme)),
            ("topology", self.generation, (None, *get_args(TopologyName))),
            ("keep_user_sharding", self.keep_user_sharding, (True, False)),
            ("checkpoints", self.checkpoints, get_args(Checkpoints)),
        ):
            if value not in choices or (choices == (True, False) and not isinstance(value, bool)):
                listed = ", ".join(map(repr, choices))
                raise ConfigError(f"{name}={value!r} is not a valid value; valid values: {listed}")
        if self.partitioner != "planner":
            raise ConfigError(
                f"partitioner={self.partitioner!r} is not supported: plans are made by the planner of this package; "
                "leave the option out, or give partitioner='planner'"
            )
        budget = self.memory_budget
        if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget < 1):
            raise ConfigError(f"memory_budget={budget!r} is not a valid value; valid values: an integer >= 1")
        top = self.measure_top_k
        if top is not None and (isinstance(top, bool) or not isinstance(top, int) or top < 0):
            raise ConfigError(f"measure_top_k={top!r} is not a valid value; valid values: an integer >= 0")
        if self.plan is not None:
            self._check_plan(self.plan)
        for name in ("memory_budget", "topology", "measure_top_k"):
            if getattr(self, name) is not None and self.scheme != "auto":
                raise ConfigError(
                    f"{name}={getattr(self, name)!r} is for planning; scheme={self.scheme!r} is a template, which does "
                    "not look at it: use scheme='auto'"
                )
        if self.axis_names is not None and self.mesh_shape is None:
            raise ConfigError(f"axis_names={self.axis_names!r} name the axes of mesh_shape, which is not given")
        if self.mesh_shape is not None:
            if isinstance(self.mesh_shape, str) or not isinstance(self.mesh_shape, Iterable):
                raise ConfigError(
                    f"mesh_shape={self.mesh_shape!r} is not a valid value; valid values: devices along "
                    "each axis, e.g. (2, 4)"
                )
            shape = tuple(self.mesh_shape)
            object.__setattr__(self, "mesh_shape", shape)
            if self.axis_names is None and len(shape) != 2:
                raise ConfigError(f"mesh_shape={shape} needs axis_names=; without them it is (data, model)")
            mesh = Mesh(shape=shape, axis_names=("data", "model") if self.axis_names is None else self.axis_names)
            names = mesh.axis_names
            if "data" not in names and "model" not in names:
                raise ConfigError(
                    f"axis_names={names}: the batch is split over an axis named 'data', layers over one named 'model'; "
                    "the mesh has neither"
                )
            object.__setattr__(self, "axis_names", mesh.axis_names)
        if not isinstance(self.overrides, Mapping):
            raise ConfigError(
                f"overrides={self.overrides!r} is not a valid value; valid values: a dict of specs by name pattern, "
                "e.g. {'*.lm_head.weight': ('model', None)}"
            )
        object.__setattr__(self, "overrides", {name: as_spec(spec) for name, spec in self.overrides.items()})

    @property
    def generation(self) -> str | None:
        """The kind of devices that `topology` names, without the chips of a slice."""
        found = _SLICE.fullmatch(self.topology) if isinstance(self.topology, str) else None
        return self.topology if found is None else found.group(1)

    def _check_plan(self, plan: ShardingPlan) -> None:
        if not isinstance(plan, ShardingPlan):
            raise ConfigError(
                f"plan={plan!r} is not a valid value; valid values: a ShardingPlan; read a file with ShardingPlan.load"
            )
        for name in ("mesh_shape", "memory_budget", "topology", "measure_top_k"):
            if getattr(self, name) is not None:
                raise ConfigError(f"{name}={getattr(self, name)!r} is for planning, and plan= is made already")
        if self.scheme != "auto" or self.overrides:
            raise ConfigError("scheme and overrides are for planning, and plan= is made already")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ShardingConfig:
        """Builds a config from plain values; an unknown key lists the valid ones.

        The dict of RFC pytorch/xla#6322 is understood, but for its partitioner:
        `{"auto_sharding": {"partitioner": "planner", "keep_user_sharding": True}}`.
        """
        values = dict(values)
        inner = values.pop("auto_sharding", None)
        if inner is not None:
            if values:
                raise ConfigError(f"beside 'auto_sharding' there are {', '.join(sorted(values))}: put them inside")
            if inner is False:
                raise ConfigError("{'auto_sharding': False}: leave the option out to train on one device")
            if inner is not True and not isinstance(inner, Mapping):
                raise ConfigError(
                    f"auto_sharding={inner!r} is not a valid value; valid values: True, a dict of options"
                )
            values = dict(inner) if isinstance(inner, Mapping) else {}
        known = [item.name for item in fields(cls)]
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ConfigError(f"unknown sharding option(s) {', '.join(unknown)}; valid options: {', '.join(known)}")
        return cls(**values)

    @classmethod
    def resolve(
        cls,
        *,
        auto_sharding: bool | Mapping[str, Any] | None,
        sharding: str | Mapping[str, Any] | ShardingConfig | ShardingPlan | None,
    ) -> ShardingConfig | None:
        """The config from either flag of an adapter; None is training on one device.

        Raises:
            ConfigError: both flags are given, or a value is not valid.
        """
        if auto_sharding is not None and auto_sharding is not False and sharding is not None:
            raise ConfigError(f"give auto_sharding= or sharding=, not both (sharding={sharding!r})")
        if isinstance(auto_sharding, Mapping):
            return cls.from_dict(
                {"auto_sharding": auto_sharding} if "auto_sharding" not in auto_sharding else auto_sharding
            )
        if auto_sharding is True:
            return cls()
        if auto_sharding is not None and auto_sharding is not False:
            raise ConfigError(
                f"auto_sharding={auto_sharding!r} is not a valid value; valid values: True, False, a dict of options; "
                "a scheme or a ShardingConfig goes to sharding="
            )
        if sharding is None or isinstance(sharding, ShardingConfig):
            return sharding
        if isinstance(sharding, Mapping):
            return cls.from_dict(sharding)
        if isinstance(sharding, ShardingPlan):
            return cls(plan=sharding)
        if sharding not in get_args(Scheme):
            listed = ", ".join(map(repr, get_args(Scheme)))
            raise ConfigError(
                f"sharding={sharding!r} is not a valid value; valid values: {listed}, a ShardingConfig, its options, a "
                "ShardingPlan"
            )
        return cls(scheme=sharding)  # type: ignore[arg-type]

    def mesh(self, devices: int) -> Mesh | None:
        """The mesh of these options or of `plan`; None if it is to be chosen.

        Raises:
            ConfigError: the mesh is for another number of devices.
        """
        if self.plan is not None:
            if self.plan.mesh.size != devices:
                raise ConfigError(
                    f"plan={self.plan.name!r} is for {self.plan.mesh.size} devices ({self.plan.mesh}), and there are "
                    f"{devices}"
                )
            return self.plan.mesh
        if self.mesh_shape is None or self.axis_names is None:
            return None
        mesh = Mesh(shape=self.mesh_shape, axis_names=self.axis_names)
        if mesh.size != devices:
            raise ConfigError(
                f"mesh_shape={self.mesh_shape} is for {mesh.size} devices, and there are {devices}: its product "
                "must be the number of devices"
            )
        return mesh
