"""Which runtime the tests of this process run on: torch_xla, or TorchTPU where `make test-torch-tpu` runs."""

from __future__ import annotations

from importlib.util import find_spec

ON_TORCH_TPU = find_spec("torch_tpu") is not None
# The type of the runtime's device.
DEVICE = "tpu" if ON_TORCH_TPU else "xla"
