"""Saves and loads the state of a sharded training shard by shard, so that no host needs memory for all of it."""

from xla_adapters.sharding.state.consolidation import consolidate, write_safetensors
from xla_adapters.sharding.state.loading import load_state, load_whole
from xla_adapters.sharding.state.saving import save_state
from xla_adapters.sharding.state.training import (
    load_gradients,
    load_model,
    load_optimizer,
    model_state,
    names_of_updated,
    optimizer_state,
)

__all__ = [
    "consolidate",
    "load_gradients",
    "load_model",
    "load_optimizer",
    "load_state",
    "load_whole",
    "model_state",
    "names_of_updated",
    "optimizer_state",
    "save_state",
    "write_safetensors",
]
