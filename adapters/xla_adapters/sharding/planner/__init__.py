"""The planner: finds the shardings that make a training step fastest, with an integer linear program.

Steps: `capture` exports the forward as a graph (equal layers only twice), `graph` turns it into operators with a choice
of layouts, `strategies` lists the choices of each and `costs` those of parameters, `program` writes and solves the
program, `solution` makes a plan of the solution, and `memory` predicts its peak on TPUs. `planner.Planner` drives this.
The method follows Alpa (Zheng et al., OSDI 2022).
"""

from xla_adapters.sharding.planner.costs import ADAM_COPIES, Topology, collective_seconds
from xla_adapters.sharding.planner.planner import Planner, by_time, meshes_of

__all__ = ["ADAM_COPIES", "Planner", "Topology", "by_time", "collective_seconds", "meshes_of"]
