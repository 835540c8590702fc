"""`make_runtime`: the runtime interface on TorchTPU 0.2, put together from the objects of this folder.

What is private in `torch_tpu` is pinned by `tests/torch_tpu`.
"""

from __future__ import annotations

from xla_adapters.runtime.interface import Runtime
from xla_adapters.runtime.torch_tpu.counters import TPUCounters
from xla_adapters.runtime.torch_tpu.device import TPUDevice, unknown_version
from xla_adapters.runtime.torch_tpu.placeholders import TPUPlaceholders
from xla_adapters.runtime.torch_tpu.random_numbers import TPURandom
from xla_adapters.runtime.torch_tpu.tensors import TPUAbstractTensors, TPUTransfers, TPUValues
from xla_adapters.runtime.torch_tpu.tracing import TPUTracing


def make_runtime() -> Runtime:
    """The runtime of this process; starts nothing yet."""
    device = TPUDevice()
    counters = TPUCounters(device)
    tracing = TPUTracing()
    placeholders = TPUPlaceholders(device, counters)
    is_known = unknown_version() is None
    return Runtime(
        name="torch_tpu",
        dynamo_backend="tpu",
        device=device,
        transfers=TPUTransfers(device, counters),
        tracing=tracing,
        values=TPUValues(tracing),
        random=TPURandom(device, placeholders),
        counters=counters,
        why_no_replay=_why_no_replay,
        placeholders=placeholders if is_known else None,
        abstract=TPUAbstractTensors() if is_known else None,
    )


def _why_no_replay(runtime: Runtime) -> str | None:
    version = unknown_version()
    return None if version is None else f"torch_tpu {version} is not known"
