"""Crash-safe checkpoints: committed atomically, verified when opened, optionally written in the background."""

from typing import TYPE_CHECKING, Any

from xla_adapters.checkpoint.commit import Draft, remove_checkpoint
from xla_adapters.checkpoint.group import Group, OneProcess, TorchGroup, Watchdog
from xla_adapters.checkpoint.manifest import IF_ON_PURPOSE, MANIFEST, Checkpoint, Manifest, read_manifest, verify
from xla_adapters.checkpoint.schedule import CheckpointConfig, Preemption, SaveReason, SaveSchedule
from xla_adapters.checkpoint.storage import LocalStorage, naming_failed_writes
from xla_adapters.checkpoint.store import CheckpointStore, refuse_inside_step
from xla_adapters.errors import CheckpointMismatchWarning, CheckpointWarning
from xla_adapters.utils import load_late

if TYPE_CHECKING:
    from xla_adapters.checkpoint.async_saver import SAVE_FAILED_EXIT_CODE, AsyncSaver
    from xla_adapters.checkpoint.training_state import TrainingState, differences, snapshot, warn_of_differences

__all__ = [
    "IF_ON_PURPOSE",
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
    "LocalStorage",
    "Manifest",
    "OneProcess",
    "Preemption",
    "SaveReason",
    "SaveSchedule",
    "TorchGroup",
    "TrainingState",
    "Watchdog",
    "differences",
    "naming_failed_writes",
    "read_manifest",
    "refuse_inside_step",
    "remove_checkpoint",
    "snapshot",
    "verify",
    "warn_of_differences",
]

# Where the names are that need torch: imported when they are used, so that the command line answers at once.
_HOMES = {
    "SAVE_FAILED_EXIT_CODE": "async_saver",
    "AsyncSaver": "async_saver",
    "TrainingState": "training_state",
    "differences": "training_state",
    "snapshot": "training_state",
    "warn_of_differences": "training_state",
}


def __getattr__(name: str) -> Any:
    return load_late(__name__, _HOMES, name)
