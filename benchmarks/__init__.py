"""Programs that measure this package, each `python -m benchmarks.NAME`.

Importing this package sets what must be set before torch_xla and transformers are imported, for
benchmarks run where there may be no accelerator, no network and no terminal; what the environment
says already is left as it is.
"""

import os

os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
