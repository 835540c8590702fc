"""`Sharder`: shards a training for an adapter: makes the plan, places the model and the batches.

`make_plan` makes a plan alone; `annotated` reads the sharding of parameters that the user annotated before.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from xla_adapters.config import XLAConfig
from xla_adapters.errors import ConfigError, UnsupportedOptionError
from xla_adapters.runtime import Runtime, TileAssignment, get_runtime
from xla_adapters.sharding.config import ShardingConfig
from xla_adapters.sharding.mesh import DimSpec, Mesh, Spec, tiles_of
from xla_adapters.sharding.placement import Placement
from xla_adapters.sharding.plan import ShardingPlan
from xla_adapters.sharding.templates import default_mesh, template


def annotated(model: torch.nn.Module, meshes: Sequence[Mesh], runtime: Runtime) -> tuple[Mesh | None, dict[str, Spec]]:
    """The mesh and the specs of the parameters that are already sharded.

    Args:
        model: on any device.
        meshes: the candidates; the first that explains all annotations is returned.
        runtime: the runtime.

    Returns:
        The mesh (None if no parameter is sharded), and the spec of each sharded parameter by name.

    Raises:
        ConfigError: no candidate explains all annotations.
    """
    cut = {
        name: tiles
        for name, parameter in model.named_parameters()
        if runtime.device.owns(parameter) and (tiles := runtime.spmd.tiles_of(parameter)) is not None
    }
    if not cut:
        return None, {}
    odd: set[str] = set()
    for mesh in meshes:
        specs = {name: spec_of(mesh, tiles) for name, tiles in cut.items()}
        found = {name: spec for name, spec in specs.items() if spec is not None}
        if len(found) == len(cut):
            return mesh, found
        odd |= cut.keys() - found.keys()
    raise ConfigError(
        f"the annotations of {', '.join(sorted(odd)[:3])}{' and others' if len(odd) > 3 else ''} are none of the "
        f"mesh {', or '.join(map(str, meshes))}: give the mesh they were made for as mesh_shape and axis_names (or as "
        "device_mesh), or keep_user_sharding=False to shard them anew"
    )


def possible_meshes(config: ShardingConfig, devices: int) -> list[Mesh]:
    """The meshes that annotations of the user may belong to, given these options."""
    if (asked := config.mesh(devices)) is not None:
        return [asked]
    if config.scheme != "auto":
        return [default_mesh(config.scheme, devices)]
    first = [default_mesh(scheme, devices) for scheme in ("2d", "fsdp", "tp")]
    lengths = (length for length in range(2, devices) if devices % length == 0)
    return list(dict.fromkeys([*first, *(Mesh.data_and_model(devices // n, n) for n in lengths)]))


def spec_of(mesh: Mesh, tiles: TileAssignment) -> Spec | None:
    """The spec on this mesh that gives this tile assignment; None if there is none."""
    choices: list[list[DimSpec]] = []
    for count in tiles.counts:
        ways: list[DimSpec] = [None] if count == 1 else []
        for length in range(1, len(mesh.axis_names) + 1):
            for axes in itertools.permutations(mesh.axis_names, length):
                if mesh.parts(axes) == count:
                    ways.append(axes[0] if length == 1 else axes)
        choices.append(ways)
    for spec in itertools.product(*choices):
        used = [axis for dim in spec if dim is not None for axis in ((dim,) if isinstance(dim, str) else dim)]
        if len(set(used)) == len(used) and tiles_of(mesh, spec) == tiles:
            return spec
    return None


logger = logging.getLogger("xla_adapters")


class Sharder:
    """Switches the runtime to SPMD, and shards one training. Create it before the model is moved to the device.

    Args:
        config: the options for sharding.
        steps: the options of the training steps.

    Raises:
        RuntimeOrderError: the runtime was started without SPMD before.
        ConfigError: the mesh in the options needs another number of devices.
        UnsupportedOptionError: the mode of the steps does not support sharding.
    """

    def __init__(self, config: ShardingConfig, steps: XLAConfig | None = None) -> None:
        if steps is not None and steps.xla_mode == "eager+dynamo":
            raise UnsupportedOptionError(
                "xla_mode='eager+dynamo' and sharding: dynamo's graphs do not know how tensors are cut; use "
                "xla_mode='eager+compile'"
            )
        self.config = config
        self._runtime: Runtime = get_runtime()
        if steps is not None:
            self._runtime.device.use_compile_cache(steps.cache_dir)
        self._runtime.device.initialize(spmd=True)
        # Says what the runtime lacks, before anything is made.
        _ = self._runtime.spmd
        self.devices = self._runtime.device.count()
        config.mesh(self.devices)
        self._placement: Placement | None = None

    @property
    def placement(self) -> Placement | None:
        """The plan applied to the devices; None before `prepare`."""
        return self._placement

    @property
    def plan(self) -> ShardingPlan:
        """The plan.

        Raises:
            ConfigError: there is none yet; `prepare` makes it.
        """
        if self._placement is None:
            raise ConfigError("there is no sharding plan yet: it is made when the model's first run begins")
        return self._placement.plan

    @property
    def summary(self) -> str:
        """The plan in words; empty if there is none yet."""
        return "" if self._placement is None else self._placement.plan.report()

    def prepare(
        self,
        model: torch.nn.Module,
        example: Callable[[], Any],
        *,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
        folder: Path | None = None,
    ) -> ShardingPlan:
        """Makes the plan, unless there is one that fits the model, and shards the model's parameters.

        Args:
            model: on the device.
            example: returns a batch on the host; called only if the plan depends on it.
            around: returns the context that forward passes run in; another process must be able to import it.
            folder: of the run; the plan is stored there for a restart. None stores nothing.

        Raises:
            ConfigError: no plan satisfies the options.
        """
        if self._placement is None or not self._placement.plan.fits(model):
            mesh, fixed = (
                annotated(model, possible_meshes(self.config, self.devices), self._runtime)
                if self.config.keep_user_sharding
                else (None, {})
            )
            plan = make_plan(
                model, self.config, self.devices, mesh=mesh, fixed=fixed, example=example, around=around, folder=folder
            )
            self._placement = Placement(plan, self._runtime)
            for note in plan.notes:
                logger.warning("sharding: %s", note)
            logger.info("%s", plan.report())
        self._placement.place_model(model)
        return self._placement.plan

    def check_batch_size(self, size: int, option: str) -> None:
        """Raises if batches of this size cannot be split.

        Args:
            size: number of samples in a batch.
            option: the option that set it, for the message.

        Raises:
            ConfigError: the size does not divide; the message has the nearest sizes that do.
        """
        assert self._placement is not None
        mesh, axes = self.plan.mesh, self.plan.batch
        parts = math.prod(mesh.axis_size(axis) for axis in axes)
        if size % parts:
            above = -(-size // parts) * parts
            raise ConfigError(
                f"{option}={size}: batches are split into {parts} parts ({mesh}), and {size} does not divide; use "
                f"{above}" + (f" or {above - parts}" if above > parts else "") + ", or a mesh with a shorter data axis"
            )

    def place_batch(self, batch: Any) -> Any:
        """Shards a batch on the device in place, and returns it; does nothing before `prepare`."""
        return batch if self._placement is None else self._placement.place_batch(batch)

    @contextmanager
    def holding(self, model: torch.nn.Module) -> Iterator[None]:
        """The context of a run: activations are constrained, loaded state is sharded, saving gathers on the host."""
        with ExitStack() as stack:
            stack.enter_context(self._runtime.spmd.gathering_on_host())
            if self._placement is not None:
                stack.enter_context(self._placement.constraining(model))
                stack.enter_context(self._placement.resharding_loaded_state(model))
            yield


def make_plan(
    model: torch.nn.Module,
    config: ShardingConfig,
    devices: int,
    *,
    mesh: Mesh | None = None,
    fixed: dict[str, Spec] | None = None,
    example: Callable[[], Any] | None = None,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    folder: Path | None = None,
) -> ShardingPlan:
    """Makes the plan for a model; nothing is moved.

    Args:
        model: on any device.
        config: the options.
        devices: number of devices.
        mesh: to use if the options give none; None to choose.
        fixed: specs of parameters that must keep their sharding.
        example: returns a batch; needed for `"auto"`.
        around, folder: as for `Sharder.prepare`.

    Raises:
        ConfigError: no plan satisfies the options.
    """
    mesh = config.mesh(devices) or mesh
    if config.plan is not None:
        return _given(config.plan, model, fixed or {})
    if config.scheme != "auto":
        mesh = mesh if mesh is not None else default_mesh(config.scheme, devices)
        return template(config.scheme, model, mesh, config=config, fixed=fixed)
    from xla_adapters.sharding.automatic import automatic_plan

    return automatic_plan(
        model, config, devices, mesh=mesh, fixed=fixed or {}, example=example, around=around, folder=folder
    )


def _given(plan: ShardingPlan, model: torch.nn.Module, fixed: Mapping[str, Spec]) -> ShardingPlan:
    if not plan.fits(model):
        raise ConfigError(f"the plan {plan.name!r} was made for another model: parameters or their shapes differ")
    other = [name for name, spec in fixed.items() if plan.spec_of(name) != spec]
    if other:
        raise ConfigError(
            f"{', '.join(other[:3])}{' and others' if len(other) > 3 else ''} are annotated otherwise than the plan "
            f"{plan.name!r} says; remove the annotations, or give keep_user_sharding=False"
        )
    return plan
