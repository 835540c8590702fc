"""What must be set before torch_xla and transformers are imported; import this module first."""

from __future__ import annotations

import os

# Benchmarks run where there is no accelerator, no network and no terminal unless told otherwise.
os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
