"""The planner: which layouts make a training step fastest, found by an integer linear program."""

from xla_adapters.sharding.planner.entry import evaluate, evaluate_all, plan_model
from xla_adapters.sharding.planner.topology import Topology

__all__ = ["Topology", "evaluate", "evaluate_all", "plan_model"]
