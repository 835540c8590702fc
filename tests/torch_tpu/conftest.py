"""Where torch_tpu is not installed nothing of this folder is collected; see `session`."""

from __future__ import annotations

from tests.device import ON_TORCH_TPU

collect_ignore_glob = [] if ON_TORCH_TPU else ["test_*.py"]
