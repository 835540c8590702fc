"""The part of the seam that has a value computed once, not again in each operation that reads it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
import torch_xla
import torch_xla.runtime as xr

from xla_adapters.backend.compiler_flags import keep_barriers, keeps_barriers

if TYPE_CHECKING:
    from xla_adapters.backend.interface import Backend as _Rest
else:
    _Rest = object

_C = torch_xla._XLAC

_log = logging.getLogger("xla_adapters")


class Barriers(_Rest):
    """Barriers in the graph; a part of `PJRTBackend`."""

    _finds_blocks: bool
    _asked_for_barriers = False

    def _keep_barriers(self, *, wanted: bool = True) -> None:
        """Has XLA's compiler for the CPU fuse nothing across barriers, if its runtime has not started; says so."""
        if wanted and not self.runtime_started() and xr.device_type() == "CPU":
            self._asked_for_barriers = keep_barriers() or self._asked_for_barriers
        if self._asked_for_barriers:
            # Again as the runtime is used: who imports a Trainer has no log yet.
            _log.info(
                "XLA_FLAGS has --xla_disable_hlo_passes=cse_barrier_expander: in steps on one device what layer norms "
                "read is computed once, not again in each operation that reads it. Put a flag of that name there "
                "yourself, with other passes or none, to have it otherwise"
            )

    def fuses_up_to_barriers(self) -> bool:
        """Whether a barrier ends what the device's compiler fuses, and that is of use: for one CPU, without blocks."""
        return self.hardware() == "CPU" and not self.is_spmd() and not self._finds_blocks and keeps_barriers()

    def compute_once(self, tensor: torch.Tensor) -> None:
        """Puts a barrier behind a value that is traced, and nothing behind one that is there."""
        if torch._is_functional_tensor(tensor):
            torch._sync(tensor)  # type: ignore[attr-defined,no-untyped-call]
        if self.is_pending(tensor):
            _C._xla_optimization_barrier_([self.inner(tensor)])
