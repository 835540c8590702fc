"""The runtime interface: what the package asks of a device runtime, one small protocol for each subject.

`Runtime` holds them. A runtime implements `Device`, `Transfers`, `Tracing`, `Values`, `Random` and `Counters`, and
either `LazyTensors` and `Executables` or `Placeholders`: how a step becomes one executable. `Spmd`, `SharedBuffers`,
`CustomKernels` and `AbstractTensors` are optional.
"""

from xla_adapters.runtime.interface.device import CompiledMemory, Counters, Device, Metrics, Random
from xla_adapters.runtime.interface.executables import Executables
from xla_adapters.runtime.interface.lazy_tensors import LazyTensors
from xla_adapters.runtime.interface.placeholders import Placeholders
from xla_adapters.runtime.interface.runtime import Runtime
from xla_adapters.runtime.interface.shared_buffers import SharedBuffers
from xla_adapters.runtime.interface.tensors import AbstractTensors, CustomKernels, Spmd, Transfers, Values
from xla_adapters.runtime.interface.tracing import RuntimeEvent, Tracing

__all__ = [
    "AbstractTensors",
    "CompiledMemory",
    "Counters",
    "CustomKernels",
    "Device",
    "Executables",
    "LazyTensors",
    "Metrics",
    "Placeholders",
    "Random",
    "Runtime",
    "RuntimeEvent",
    "SharedBuffers",
    "Spmd",
    "Tracing",
    "Transfers",
    "Values",
]
