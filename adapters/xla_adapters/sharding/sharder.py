"""`Sharder`: the sharding of one training, from the options to tensors on the mesh."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from xla_adapters.backend import Backend, get_backend
from xla_adapters.config import XLAConfig
from xla_adapters.errors import ConfigError, UnsupportedOptionError
from xla_adapters.sharding.annotated import annotated, possible_meshes
from xla_adapters.sharding.config import ShardingConfig
from xla_adapters.sharding.mesh import Mesh, Spec
from xla_adapters.sharding.placement import Placement
from xla_adapters.sharding.plan import ShardingPlan
from xla_adapters.sharding.templates import default_mesh, template

logger = logging.getLogger("xla_adapters")


class Sharder:
    """Drives all devices as one, and shards a model over them. Adapters create it before the model is moved.

    Args:
        config: the options.
        steps: the options of the steps that are to run sharded.

    Raises:
        RuntimeOrderError: the runtime was started without SPMD before.
        ConfigError: the mesh that was asked for needs another number of devices.
        UnsupportedOptionError: the mode or the compiler of this device cannot do what was asked for.
    """

    def __init__(self, config: ShardingConfig, steps: XLAConfig | None = None) -> None:
        if steps is not None and steps.xla_mode == "eager+dynamo":
            raise UnsupportedOptionError(
                "xla_mode='eager+dynamo' and sharding: dynamo's graphs do not know how tensors are cut; use "
                "xla_mode='eager+compile'"
            )
        if steps is not None and steps.steps_per_execution > 1:
            raise UnsupportedOptionError(
                f"steps_per_execution={steps.steps_per_execution} with sharding: the executable of several steps is "
                "made for one device; leave one of them out"
            )
        self.config = config
        self._backend: Backend = get_backend()
        self._backend.initialize(spmd=True)
        self.devices = self._backend.device_count()
        config.mesh(self.devices)
        if config.partitioner == "alpa":
            raise UnsupportedOptionError(_no_alpa(self._backend.hardware()))
        self._placement: Placement | None = None

    @property
    def placement(self) -> Placement | None:
        """What is applied; None before `prepare`."""
        return self._placement

    @property
    def plan(self) -> ShardingPlan:
        """What was planned.

        Raises:
            ConfigError: nothing is planned yet.
        """
        if self._placement is None:
            raise ConfigError("there is no sharding plan yet: it is made when the model's first run begins")
        return self._placement.plan

    def prepare(
        self,
        model: torch.nn.Module,
        example: Callable[[], Any],
        *,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
        folder: Path | None = None,
    ) -> ShardingPlan:
        """Plans for the model, if that is not done yet for one like it, and cuts its parameters.

        Args:
            model: on the device.
            example: returns a batch on the host; called only if the plan depends on it.
            around: gives the context that forward passes run in; a function that another process can import.
            folder: of the run, where the plan is kept for a restart; None keeps nothing.

        Raises:
            ConfigError: nothing fits what was asked for.
        """
        if self._placement is None or not self._placement.plan.fits(model):
            mesh, fixed = (
                annotated(model, possible_meshes(self.config, self.devices), self._backend)
                if self.config.keep_user_sharding
                else (None, {})
            )
            plan = make_plan(
                model, self.config, self.devices, mesh=mesh, fixed=fixed, example=example, around=around, folder=folder
            )
            self._placement = Placement(plan, self._backend)
            for note in plan.notes:
                logger.warning("sharding: %s", note)
            logger.info("%s", plan.report())
        self._placement.place_model(model)
        return self._placement.plan

    def check_batch_size(self, size: int, option: str) -> None:
        """Raises if batches of this size cannot be split.

        Args:
            size: samples in a batch.
            option: what set it, for the message.

        Raises:
            ConfigError: with the nearest sizes that work.
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
        """Cuts a batch on the device; does nothing before `prepare`."""
        return batch if self._placement is None else self._placement.place_batch(batch)

    @contextmanager
    def holding(self, model: torch.nn.Module) -> Iterator[None]:
        """Around a run: intermediate values are held to the plan, what is loaded is cut, what is saved is put together
        on the host."""
        with ExitStack() as stack:
            stack.enter_context(self._backend.gathering_on_host())
            if self._placement is not None:
                stack.enter_context(self._placement.constraining(model))
                stack.enter_context(self._placement.cutting_what_is_loaded(model))
            yield


def _no_alpa(hardware: str) -> str:
    if hardware == "TPU":
        return (
            "partitioner='alpa': the XLA compiler for TPU has this pass, and no way was found yet to see what it did "
            "before it is trusted with a run; leave partitioner at 'planner'"
        )
    return (
        f"partitioner='alpa': the XLA compiler for {hardware} has no pass that shards by itself (it accepts the "
        "request and shards nothing); leave partitioner at 'planner'"
    )


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
    """The plan for a model; nothing is moved.

    Args:
        model: on any device.
        config: the options.
        devices: how many there are.
        mesh: to use where the options leave it open; None to choose.
        fixed: specs of parameters that stay as they are.
        example: returns a batch; needed for `"auto"`.
        around, folder: as for `Sharder.prepare`.

    Raises:
        ConfigError: nothing fits what was asked for.
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
