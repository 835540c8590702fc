"""The planner: which layouts make a training step fastest, found by an integer linear program."""

from xla_adapters.sharding.planner.entry import evaluate, evaluate_all, meshes_of, plan_model
from xla_adapters.sharding.planner.planner import ADAM_BYTES, Planner, by_time
from xla_adapters.sharding.planner.topology import Topology

__all__ = ["ADAM_BYTES", "Planner", "Topology", "by_time", "evaluate", "evaluate_all", "meshes_of", "plan_model"]
