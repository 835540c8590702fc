"""Programs that measure this package, each `python -m benchmarks.NAME`.

Importing this package sets environment variables that torch_xla and transformers read at import, for machines without
accelerator, network or terminal. Variables that are already set are not changed.
"""

import os

os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
