"""Checkpoints that survive: committed at one instant, checked when opened, written while training goes on."""

from xla_adapters.checkpoint.commit import Draft
from xla_adapters.checkpoint.config import CheckpointConfig
from xla_adapters.checkpoint.group import Group, OneProcess, TorchGroup
from xla_adapters.checkpoint.inspection import CheckpointWarning
from xla_adapters.checkpoint.manifest import MANIFEST, Checkpoint, Manifest
from xla_adapters.checkpoint.store import CheckpointStore

__all__ = [
    "MANIFEST",
    "Checkpoint",
    "CheckpointConfig",
    "CheckpointStore",
    "CheckpointWarning",
    "Draft",
    "Group",
    "Manifest",
    "OneProcess",
    "TorchGroup",
]
