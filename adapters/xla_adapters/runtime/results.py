"""`restate_results`: prepares the state that replays have written for a step that is traced."""

from __future__ import annotations

import torch

from xla_adapters.runtime.interface import Runtime


def restate_results(runtime: Runtime) -> None:
    """Makes results of executables hash as results of traced steps do; see `LazyTensors.restate_results`."""
    if not runtime.has_lazy_tensors:
        return
    with torch.no_grad(), torch._C.DisableTorchFunction():
        restated = runtime.lazy.restate_results()
        if runtime.has_shared_buffers:
            runtime.shared_buffers.note_own_buffers(restated)
