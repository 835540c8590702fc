"""`KeptPlans`: plans kept beside a run, so that a restart neither plans nor measures again."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree

from xla_adapters.errors import ConfigError
from xla_adapters.sharding.config import ShardingConfig
from xla_adapters.sharding.measure.results import PlanResult
from xla_adapters.sharding.mesh import Spec
from xla_adapters.sharding.plan import FORMAT, ShardingPlan
from xla_adapters.sharding.tiling import tiles_of

_RESULTS = "measured.json"

logger = logging.getLogger("xla_adapters")


class KeptPlans:
    """Plans of a run, one file for each thing that was planned for.

    Args:
        folder: of the run; `sharding_plans` in it is made when a plan is kept.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "sharding_plans"

    def path(self, digest: str) -> Path:
        """Of the file."""
        return self._folder / f"{digest}.json"

    def find(self, digest: str) -> ShardingPlan | None:
        """The plan that was kept under this digest.

        Raises:
            ConfigError: the file is no plan (any more); the message names it.
        """
        path = self.path(digest)
        if not path.is_file():
            return None
        logger.info("sharding: the plan is that of %s, planned before for the same model, batch and options", path)
        return ShardingPlan.load(path)

    def keep(self, digest: str, plan: ShardingPlan) -> None:
        """Writes the plan."""
        self._folder.mkdir(parents=True, exist_ok=True)
        plan.save(self.path(digest))

    def results(self) -> dict[str, PlanResult]:
        """What was measured in this run so far, by `digest_of_step`.

        Raises:
            ConfigError: the file with it is damaged.
        """
        path = self._folder / _RESULTS
        if not path.is_file():
            return {}
        try:
            return {digest: PlanResult.from_values(values) for digest, values in json.loads(path.read_text()).items()}
        except (json.JSONDecodeError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"{path} is damaged ({error}): remove it, and plans are measured again") from error

    def keep_results(self, results: Mapping[str, PlanResult]) -> None:
        """Writes what was measured."""
        self._folder.mkdir(parents=True, exist_ok=True)
        values = {digest: dataclasses.asdict(result) for digest, result in results.items()}
        (self._folder / _RESULTS).write_text(json.dumps(values, indent=2) + "\n")


def digest_of(
    model: torch.nn.Module, batch: Any, config: ShardingConfig, devices: int, topology: str, fixed: Mapping[str, Spec]
) -> str:
    """Names what a plan depends on: structure, shapes, options, devices, links and versions; 16 hexadecimal digits."""
    return _digest(_step(model, batch), repr(config), devices, topology, sorted(fixed.items()))


def digest_of_step(model: torch.nn.Module, batch: Any, plan: ShardingPlan) -> str:
    """Names what a measurement depends on: structure, shapes, versions, and where the plan puts everything."""
    stored = [tiles_of(plan.mesh, spec) for entry in plan.parameters for spec in (entry.spec, entry.spec_in_use)]
    held = [(entry.module, entry.of, tiles_of(plan.mesh, entry.spec)) for entry in plan.activations]
    # Collectives are told apart by the names of the mesh's axes.
    return _digest(_step(model, batch), stored, held, tiles_of(plan.mesh, (plan.batch,)), repr(plan.mesh))


def _step(model: torch.nn.Module, batch: Any) -> tuple[Any, ...]:
    # With every name, so that ties count.
    named = model.named_parameters(remove_duplicate=False)
    parameters = [(name, tuple(item.shape), str(item.dtype), item.requires_grad) for name, item in named]
    leaves, structure = _pytree.tree_flatten(batch)
    shapes = [(tuple(leaf.shape), str(leaf.dtype)) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves]
    return (repr(model), parameters, shapes, repr(structure), torch.__version__)


def _digest(*parts: Any) -> str:
    return hashlib.sha256(repr((FORMAT, *parts)).encode()).hexdigest()[:16]
