"""Crash-safe checkpoints: committed atomically, verified when opened, optionally written in the background."""

from xla_adapters.checkpoint.async_saver import SAVE_FAILED_EXIT_CODE, AsyncSaver
from xla_adapters.checkpoint.commit import Draft
from xla_adapters.checkpoint.config import CheckpointConfig
from xla_adapters.checkpoint.group import Group, OneProcess, TorchGroup
from xla_adapters.checkpoint.inspection import verify
from xla_adapters.checkpoint.manifest import MANIFEST, Checkpoint, Manifest
from xla_adapters.checkpoint.mismatch import differences, warn_of_differences
from xla_adapters.checkpoint.preemption import Preemption
from xla_adapters.checkpoint.schedule import SaveReason, SaveSchedule
from xla_adapters.checkpoint.snapshot import snapshot
from xla_adapters.checkpoint.store import CheckpointStore, refuse_inside_step
from xla_adapters.checkpoint.training_state import TrainingState
from xla_adapters.checkpoint.watchdog import Watchdog
from xla_adapters.errors import CheckpointMismatchWarning, CheckpointWarning

__all__ = [
    "MANIFEST",
    "SAVE_FAILED_EXIT_CODE",
    "AsyncSaver",
    "Checkpoint",
    "CheckpointConfig",
    "CheckpointMismatchWarning",
    "CheckpointStore",
    "CheckpointWarning",
    "Draft",
    "Group",
    "Manifest",
    "OneProcess",
    "Preemption",
    "SaveReason",
    "SaveSchedule",
    "TorchGroup",
    "TrainingState",
    "Watchdog",
    "differences",
    "refuse_inside_step",
    "snapshot",
    "verify",
    "warn_of_differences",
]
