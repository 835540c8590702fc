"""The runtime interface: what the package asks of a device runtime, one small protocol for each subject.

`Runtime` holds them. A runtime implements `Device`, `Transfers`, `Tracing`, `Values`, `Random` and `Counters`, and
either `LazyTensors` and `Executables` or `Placeholders`: how a step becomes one executable. `Spmd`, `SharedBuffers`,
`CustomKernels` and `AbstractTensors` are optional.
"""

from xla_adapters.runtime.interface.abstract_tensors import AbstractTensors
from xla_adapters.runtime.interface.counters import CompiledMemory, Counters, Metrics
from xla_adapters.runtime.interface.custom_kernels import CustomKernels
from xla_adapters.runtime.interface.device import Device
from xla_adapters.runtime.interface.executables import Executables
from xla_adapters.runtime.interface.lazy_tensors import LazyTensors
from xla_adapters.runtime.interface.placeholders import Placeholders
from xla_adapters.runtime.interface.random_numbers import Random
from xla_adapters.runtime.interface.runtime import Runtime
from xla_adapters.runtime.interface.shared_buffers import SharedBuffers
from xla_adapters.runtime.interface.spmd import Spmd
from xla_adapters.runtime.interface.tracing import RuntimeEvent, Tracing
from xla_adapters.runtime.interface.transfers import Transfers
from xla_adapters.runtime.interface.values import Values

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
