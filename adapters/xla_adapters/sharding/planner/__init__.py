"""The planner: which layouts make a training step fastest, found by an integer linear program."""

from xla_adapters.sharding.planner.entry import ADAM_BYTES, evaluate, evaluate_all, plan_model
from xla_adapters.sharding.planner.topology import Topology

__all__ = ["ADAM_BYTES", "Topology", "evaluate", "evaluate_all", "plan_model"]
