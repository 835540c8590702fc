"""What is traced and not computed; a part of the seam."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import compress
from typing import TYPE_CHECKING

import torch
import torch_xla
import torch_xla.core.xla_model as xm

if TYPE_CHECKING:
    from xla_adapters.backend.interface import Backend as _Rest
else:
    _Rest = object

_C = torch_xla._XLAC


class PendingValues(_Rest):
    """The pending graph, and its execution; a part of `PJRTBackend`, on whose rest it relies."""

    def pending_count(self) -> int:
        """How many live tensors have been traced but not computed."""
        try:
            return sum(_C._check_device_tensor_need_materialization(str(self.device())))
        except RuntimeError as error:
            if not _has_neither(error):
                raise
            return sum(self.is_pending(tensor) for tensor in self.live_tensors())

    def is_pending(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor has been traced but not computed."""
        return self._any_pending([tensor])

    @staticmethod
    def _any_pending(tensors: Sequence[torch.Tensor]) -> bool:
        try:
            return any(_C._check_tensor_need_materialization(list(tensors)))
        except RuntimeError as error:
            if not _has_neither(error):
                raise
            return True

    def live_tensors(self) -> list[torch.Tensor]:
        """Every tensor on the device that Python code can reach. Slow: not for every step."""
        objects = gc.get_objects()
        # There may be millions: a look at each one's type, and no Python for those that are no tensors.
        kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, torch.Tensor)}
        tensors: list[torch.Tensor] = list(compress(objects, map(kinds.__contains__, map(type, objects))))
        for tensor in tensors:
            # Of a tensor that only C++ holds, this is the object that it will be seen as again: it must be owned.
            tensor._fix_weakref()  # type: ignore[attr-defined]
        with torch._C.DisableTorchFunction():
            return [tensor for tensor in tensors if _is_on_device(tensor)]

    def flush(self) -> None:
        """Executes what is pending. Unlike `torch_xla.sync` it leaves the random stream alone."""
        _C._xla_sync_live_tensors(str(self.device()), [], False)

    def give_any_value(self, tensor: torch.Tensor) -> None:
        """Fills a tensor that has neither value nor graph (a graph that cannot be compiled leaves its results so).

        torch_xla 2.9 executes nothing as long as there is one.
        """
        try:
            _C._check_tensor_need_materialization([tensor])
        except RuntimeError as error:
            if not _has_neither(error):
                raise
            inner = torch._from_functional_tensor(tensor) if torch._is_functional_tensor(tensor) else tensor
            _C._replace_xla_tensor(inner, torch._from_functional_tensor(self.to_device(torch.zeros(()))))

    def compute(self, tensors: Sequence[torch.Tensor]) -> None:
        """Executes what is pending, if one of these tensors is. A tenth of what `flush` costs if none is."""
        if self._any_pending(tensors):
            self.flush()

    def finish_step(self) -> None:
        """Executes the pending graph as one step.

        The profiler's scopes are left alone, so a step may stand inside an open `xp.Trace`.
        """
        torch_xla.sync(reset_scope=False)

    def discard_pending(self) -> None:
        """Forgets what is pending; the tensors concerned can no longer be read."""
        _C._clear_pending_irs(str(self.device()))

    def wait(self) -> None:
        """Blocks until the device is idle."""
        xm.wait_device_ops()

    def graph_hash(self, outputs: Sequence[torch.Tensor]) -> str:
        """Names the pending graph of these tensors: the same operations on the same shapes, the same name."""
        ordered = sorted(outputs, key=_C._xla_get_tensor_id)
        return str(_C._get_graph_hash(ordered))

    @contextmanager
    def scalars_as_inputs(self) -> Iterator[None]:
        """Python scalars become inputs of the graph, 0 and 1 too (else these two are constants)."""
        previous = _C._get_xla_handle_special_scalars()
        _C._set_xla_handle_special_scalars(False)
        try:
            yield
        finally:
            _C._set_xla_handle_special_scalars(previous)

    def is_forbidden_execution(self, error: BaseException) -> bool:
        """Whether the error is torch_xla's refusal to execute while execution is not allowed."""
        return isinstance(error, RuntimeError) and "Unexpected execution happens inside" in str(error)

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether the device had too little memory, to compile for or to execute in."""
        return isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" in str(error)


def _is_on_device(tensor: torch.Tensor) -> bool:
    try:
        return tensor.device.type == "xla"
    except RuntimeError as error:
        # An undefined tensor: what the garbage collector finds of one that is being taken apart.
        if "does not have a device" not in str(error):
            raise
        return False


def _has_neither(error: RuntimeError) -> bool:
    """Whether torch_xla met a tensor without value and graph: a refused execution leaves one behind."""
    return any(text in str(error) for text in ("XLATensor without XLAData and IR", "data()->tensor_data"))
