"""The integer program for a model that cannot be captured: data parallelism, with parameters split where that pays.

Without a graph the order of layers is not known, and a pair of layers that is split in the wrong way communicates more
than it saves. What works for any model is to split the batch over all devices, and to gather split parameters.
"""

from __future__ import annotations

from collections.abc import Mapping

from xla_adapters.sharding.mesh import DATA, MODEL
from xla_adapters.sharding.planner import storage
from xla_adapters.sharding.planner.costs import Fabric
from xla_adapters.sharding.planner.problem import Problem
from xla_adapters.sharding.planner.storage import Parameter


def formulate(
    parameters: Mapping[str, Parameter], fabric: Fabric, *, rows: int, optimizer_bytes: float | None
) -> tuple[Problem, bool]:
    """Writes the program, with choices for parameters only.

    Args:
        parameters: by name.
        fabric: the cost of collectives.
        rows: size of the batch.
        optimizer_bytes: bytes of optimizer state per element; None for Adam's.

    Returns:
        The program, and whether the batch is split over the model axis, too.
    """
    problem = Problem()
    spread = fabric.model > 1 and rows % (fabric.data * fabric.model) == 0
    parts = fabric.data * (fabric.model if spread else 1)
    for name in sorted(parameters):
        parameter = parameters[name]
        # Per row, each element of a weight costs 2 operations in the forward and 4 in the backward.
        work = 6.0 * rows * parameter.size / parameter.itemsize / parts / fabric.topology.flops
        columns = []
        options = [
            (spec, gathers)
            for spec in storage.choices(parameter, fabric.mesh)
            for gathers in storage.gathering(parameter, spec, fabric)
        ]
        for spec, gathers in options:
            stored, whole = storage.split_dim(spec, MODEL), storage.split_dim(spec, DATA) is None
            charges = (
                *storage.data_charges(parameter, spec, fabric, gathers),
                *storage.use_charges(parameter, stored, None, spread, whole, fabric),
            )
            column = problem.program.column(compute=work, charges=charges, integral=True, times=parameter.count)
            problem.program.memory[column] = storage.memory(parameter, spec, fabric, optimizer_bytes, gathers)
            columns.append((spec, column))
        problem.program.choose_one([column for _, column in columns])
        problem.stores[name] = columns
    return problem, spread
