"""`PlanCache`: stores plans and measurements in a folder, so that a restart does not repeat them."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree

from xla_adapters.errors import ConfigError
from xla_adapters.runtime import get_runtime
from xla_adapters.runtime.compile_cache import COMPILE_CACHE
from xla_adapters.sharding.config import ShardingConfig
from xla_adapters.sharding.measure.measuring_process import PlanResult
from xla_adapters.sharding.mesh import Spec
from xla_adapters.sharding.plan import FORMAT, ShardingPlan
from xla_adapters.sharding.plan_data import tiles_of_plan

_RESULTS = "measured.json"

logger = logging.getLogger("xla_adapters")


class PlanCache:
    """Stores plans (one file per digest) and measurements of a run.

    Args:
        folder: of the run; the files are in its subfolder `sharding_plans`. None stores plans beside the compiled
            programs only.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = None if folder is None else folder / "sharding_plans"

    @classmethod
    def of_run(cls, folder: Path | None) -> PlanCache | None:
        """That of a run's folder, and of the compile cache; None if there is neither."""
        return cls(folder) if folder is not None or COMPILE_CACHE.plans is not None else None

    def find(self, digest: str) -> ShardingPlan | None:
        """The plan stored under this digest; None if there is none.

        Raises:
            ConfigError: the file is not a plan; the message names it.
        """
        path = None if self._folder is None else self._folder / f"{digest}.json"
        if path is None or not path.is_file():
            return None
        logger.info("sharding: the plan is that of %s, planned before for the same model, batch and options", path)
        return ShardingPlan.load(path)

    def find_in_cache(self, digest: str) -> ShardingPlan | None:
        """The plan that another run stored beside its compiled programs; it is stored in this run's folder, too."""
        cache = COMPILE_CACHE.plans
        # Processes of one run must have the same plan, and their folders may differ.
        if cache is None or get_runtime().device.world_size() > 1:
            return None
        try:
            found = PlanCache(cache).find(digest)
        except (ConfigError, OSError) as error:
            logger.info("sharding: a damaged plan is not used: %s", error)
            return None
        if found is not None:
            self._keep(digest, found)
        return found

    def keep(self, digest: str, plan: ShardingPlan) -> None:
        """Stores a plan, beside the compiled programs, too, if they are kept."""
        self._keep(digest, plan)
        if COMPILE_CACHE.plans is not None:
            # It may be read-only, or full.
            with contextlib.suppress(OSError):
                PlanCache(COMPILE_CACHE.plans)._keep(digest, plan)

    def _keep(self, digest: str, plan: ShardingPlan) -> None:
        if self._folder is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{digest}.json"
        # Whole or not at all: the process may be killed, and others look for it.
        draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            plan.save(draft)
            draft.replace(path)
        except OSError:
            draft.unlink(missing_ok=True)
            raise

    def copy_to(self, folder: Path) -> None:
        """Stores the plans, whatever their digests, in another folder, too."""
        for path in [] if self._folder is None else self._folder.glob("*.json"):
            if path.name != _RESULTS:
                PlanCache(folder)._keep(path.stem, ShardingPlan.load(path))

    def results(self) -> dict[str, PlanResult]:
        """The stored measurements, by `digest_of_step`.

        Raises:
            ConfigError: their file is damaged.
        """
        path = None if self._folder is None else self._folder / _RESULTS
        if path is None or not path.is_file():
            return {}
        try:
            return {digest: PlanResult.from_values(values) for digest, values in json.loads(path.read_text()).items()}
        except (json.JSONDecodeError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"{path} is damaged ({error}): remove it, and plans are measured again") from error

    def keep_results(self, results: Mapping[str, PlanResult]) -> None:
        """Stores measurements, in place of those stored before."""
        if self._folder is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        values = {digest: dataclasses.asdict(result) for digest, result in results.items()}
        (self._folder / _RESULTS).write_text(json.dumps(values, indent=2) + "\n")


def digest_of(
    model: torch.nn.Module,
    batch: Any,
    config: ShardingConfig,
    devices: int,
    topology: str,
    fixed: Mapping[str, Spec],
    compiler: str,
) -> str:
    """A hash of all that a plan depends on: model structure, shapes, options, devices, topology, versions, compiler."""
    return _digest(_step(model, batch), repr(config), devices, topology, sorted(fixed.items()), compiler)


def digest_of_step(model: torch.nn.Module, batch: Any, plan: ShardingPlan, compiler: str = "cpu") -> str:
    """A hash of all that a measurement depends on: model structure, shapes, versions, tile assignments, compiler."""
    # The mesh is part of it, because results list collectives by names of its axes.
    return _digest(_step(model, batch), tiles_of_plan(plan), repr(plan.mesh), compiler)


def _step(model: torch.nn.Module, batch: Any) -> tuple[Any, ...]:
    # With repeated names, so that tied weights make a difference.
    named = model.named_parameters(remove_duplicate=False)
    parameters = [(name, tuple(item.shape), str(item.dtype), item.requires_grad) for name, item in named]
    leaves, structure = _pytree.tree_flatten(batch)
    shapes = [(tuple(leaf.shape), str(leaf.dtype)) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves]
    # Heads of an attention, say, are seen in no shape.
    config = repr(getattr(model, "config", None))
    return (
        repr(model),
        config,
        parameters,
        shapes,
        repr(structure),
        torch.__version__,
        metadata.version("xla-adapters"),
    )


def _digest(*parts: Any) -> str:
    return hashlib.sha256(repr((FORMAT, *parts)).encode()).hexdigest()[:16]
