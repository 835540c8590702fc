"""The planner: finds the shardings that make a training step fastest, with an integer linear program.

Steps: `capture` exports the forward as a graph (equal layers only twice, `layers`), `graph` turns it into operators
with a choice of layouts, `strategies` lists the choices of each, `storage` those of parameters, `problem` writes the
program, `solve` solves it, `result` makes a plan of the solution, and `peak` predicts its memory on TPUs.
`planner.Planner` drives this; `entry` has the functions to call. The method follows Alpa (Zheng et al., OSDI 2022).
"""

from xla_adapters.sharding.planner.comparing import by_time
from xla_adapters.sharding.planner.entry import evaluate, evaluate_all, meshes_of, plan_model
from xla_adapters.sharding.planner.planner import Planner
from xla_adapters.sharding.planner.storage import ADAM_COPIES
from xla_adapters.sharding.planner.topology import Topology

__all__ = ["ADAM_COPIES", "Planner", "Topology", "by_time", "evaluate", "evaluate_all", "meshes_of", "plan_model"]
