"""`preflight_run`: the pre-flight of a training that a program has set up and not begun."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from xla_adapters.preflight import script_process
from xla_adapters.preflight.run_preflight import RunPreflight
from xla_adapters.preflight.script import preflight_process
from xla_adapters.preflight.target import Target
from xla_adapters.scripts.put_in import Hand
from xla_adapters.sharding.measure import Job, MeasuringError, pack


@dataclass(frozen=True, kw_only=True)
class RunJob(Job):
    """A training, pickled for the tracing process without the values of its parameters.

    Attributes:
        batch: what the loops are fed with, on the host.
        run: called there with the model, `batch` and the hand that ends the loops; runs the training.
    """

    run: Callable[[torch.nn.Module, Any, Hand], object]

    def empty(self, value: Any) -> Any:
        """Samples are sent as they are: what makes batches of them may depend on their values."""
        return value


def preflight_run(
    what: str,
    topology: str,
    model: torch.nn.Module,
    samples: Any,
    run: Callable[[torch.nn.Module, Any, Hand], object],
    *,
    sharded: bool,
    timeout: float,
) -> RunPreflight:
    """Traces a training in a process of its own, compiles its graphs for a slice of TPUs, and reports.

    Args:
        what: is trained, in words.
        topology: the slice.
        model: on any device; the values of its parameters are not used.
        samples: as `RunJob.batch`.
        run: as `RunJob.run`; it is pickled.
        sharded: whether the training is sharded.
        timeout: seconds for tracing, and for each compile.

    Raises:
        ConfigError: there is no such slice, or what traces with TorchTPU is not installed.
    """
    target = Target.parse(topology)
    try:
        data = pickle.dumps((target.generation, sharded, pack(RunJob(model=model, batch=samples, plans=(), run=run))))
    except MeasuringError as error:
        return RunPreflight(what=what, topology=str(target), problem=str(error))
    return preflight_process(
        what, target, lambda folder: (folder / script_process.JOB).write_bytes(data), timeout=timeout
    )
