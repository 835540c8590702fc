"""PyTorch/XLA on any PJRT device; the files of this folder are the only ones that import torch_xla.

Written against torch_xla 2.9. Calls into `torch_xla._XLAC` are private; `tests/contract` pins each one.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import compress
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as xla_metrics
import torch_xla.debug.profiler as xla_profiler
import torch_xla.runtime as xr
import torch_xla.utils.checkpoint as xla_checkpoint

from xla_adapters.backend.cached_graphs import CachedGraphs
from xla_adapters.backend.interface import Metrics, SeamEvent
from xla_adapters.backend.sharded_tensors import ShardedTensors
from xla_adapters.backend.tiles import put_together
from xla_adapters.errors import ConfigError, RuntimeOrderError

_C = torch_xla._XLAC
_NANOSECONDS = 1e-9
_SYNC_CALLS = ("_xla_step_marker", "_xla_sync_multi", "_xla_sync_live_tensors")


class PJRTBackend(CachedGraphs, ShardedTensors):
    """The seam on torch_xla's lazy tensors."""

    name = "torch_xla"
    dynamo_backend = "openxla"

    def __init__(self) -> None:
        super().__init__()
        self._initialized = False
        self._device: torch.device | None = None
        self._stock_get_cpu_tensors: Callable[..., Any] = _C._xla_get_cpu_tensors

    # ---- runtime -------------------------------------------------------------------------------

    def initialize(self, *, spmd: bool = False) -> None:
        """Starts the runtime, SPMD first if asked for.

        Raises:
            RuntimeOrderError: SPMD is wanted, but a device was already used without it.
            ConfigError: the environment switches functionalization off.
        """
        if self._initialized and (not spmd or xr.is_spmd()):
            return
        if os.environ.get("XLA_DISABLE_FUNCTIONALIZATION", "0").lower() in ("1", "true"):
            raise ConfigError(
                "XLA_DISABLE_FUNCTIONALIZATION is set: without functionalization a failed step cannot be undone. "
                "Unset it before torch_xla is imported."
            )
        if spmd and not xr.is_spmd():
            if _C._xla_get_spmd_config_is_locked():
                raise RuntimeOrderError(
                    "SPMD was asked for after the XLA runtime had started without it, and it cannot be switched on any "
                    "more (torch_xla 2.9 crashes at the first execution). Call xla_adapters.initialize(spmd=True) at "
                    "the start of the program, before a tensor or model is moved to the XLA device and before "
                    "transformers.TrainingArguments are created, which start the runtime; or set XLA_USE_SPMD=1."
                )
            xr.use_spmd()
        # Under SPMD the device alone does not start the runtime; counting devices does.
        xr.global_runtime_device_count()
        self._device = torch_xla.device()
        self._initialized = True

    def runtime_started(self) -> bool:
        """Whether the runtime runs: from then on SPMD cannot be switched on any more."""
        return bool(_C._xla_get_spmd_config_is_locked())

    def device(self) -> torch.device:
        """The device a training process computes on (the virtual device under SPMD)."""
        self.initialize()
        assert self._device is not None
        return self._device

    def hardware(self) -> str:
        """The PJRT device type: `CPU`, `TPU`, `NEURON`, ..."""
        return str(xr.device_type())

    def device_count(self) -> int:
        """Devices of all processes together."""
        return int(xr.global_runtime_device_count())

    def is_spmd(self) -> bool:
        """Whether all devices of the process are driven as one."""
        return bool(xr.is_spmd())

    def memory_info(self) -> dict[str, float]:
        """Bytes of the device's memory by name; empty where the device does not tell (the CPU does not)."""
        try:
            info = xm.get_memory_info(str(self.device()))
        except RuntimeError as error:
            if "UNIMPLEMENTED" not in str(error):
                raise
            return {}
        return {name: float(value) for name, value in info.items()}

    def world_size(self) -> int:
        """Training replicas, each with a process (or thread) of its own; 1 under SPMD."""
        return int(xr.world_size())

    def process_index(self) -> int:
        """The replica this process is, from 0."""
        return int(xr.global_ordinal())

    def is_backend_tensor(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lives on an XLA device."""
        return tensor.device.type == "xla"

    # ---- modes ---------------------------------------------------------------------------------

    def eager(self) -> bool:
        """Whether operations execute at once."""
        return bool(_C._get_use_eager_mode())

    def set_eager(self, enabled: bool) -> None:
        """Executes operations at once from now on, or traces them."""
        _C._set_use_eager_mode(enabled)

    def execution_allowed(self) -> bool:
        """Whether a pending graph may be executed."""
        return bool(_C._get_allow_execution())

    def set_execution_allowed(self, allowed: bool) -> None:
        """If not allowed, an execution raises inside torch_xla."""
        _C._set_allow_execution(allowed)

    def graph_name(self) -> str:
        """The name that graphs get in dumps and debug output."""
        return str(_C._get_current_graph_name())

    def set_graph_name(self, name: str) -> None:
        """Names the graphs traced from now on."""
        _C._set_current_graph_name(name)

    # ---- the pending graph -----------------------------------------------------------------------

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
        try:
            return bool(_C._check_tensor_need_materialization([tensor])[0])
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

    # ---- values --------------------------------------------------------------------------------

    def snapshot(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor's present value; costs no copy, since XLA values never change in place."""
        torch._sync(tensor)  # type: ignore[attr-defined,no-untyped-call]
        return torch._from_functional_tensor(tensor)

    def twin(self, snapshot: torch.Tensor) -> torch.Tensor:
        """Another tensor of the same value, which shares the buffer.

        Some operations (batch norm on its running statistics, `copy_`) change the inner tensor itself
        instead of pointing the outer one at a new value, and a snapshot with it.
        """
        return torch._from_functional_tensor(snapshot.clone())

    def rewrite(self, snapshot: torch.Tensor, twin: torch.Tensor) -> None:
        """Gives a snapshot the value of its twin. The twin itself put back would be another graph."""
        snapshot.copy_(twin)

    def holds(self, tensor: torch.Tensor, snapshot: torch.Tensor) -> bool:
        """Whether the tensor has the snapshot's value still (asked before the graph is discarded)."""
        inner = self.snapshot(tensor)
        return bool(_C._xla_get_tensor_id(inner) == _C._xla_get_tensor_id(snapshot)) and not self.is_pending(inner)

    def restore(self, tensor: torch.Tensor, snapshot: torch.Tensor) -> None:
        """Gives the tensor a former value back, seen through its views and aliases too."""
        torch._functionalize_replace(tensor, snapshot)
        torch._functionalize_commit_update(tensor)

    def restate_dtype(self, tensor: torch.Tensor) -> None:
        """Makes the device tensor name its dtype again, as a tensor does that was brought there.

        The result of some operations (addcdiv, the last one of Adam) does not, which sums, means and
        softmax of what is computed from it hash differently: another graph from the second step on.
        Adds nothing to the graph.
        """
        inner = self.snapshot(tensor)
        again = torch._from_functional_tensor(torch.ops.aten._to_copy(inner, dtype=inner.dtype))
        # It takes over which input's buffer it may be written to; without, the update needs a second one.
        torch.ops.aten._propagate_xla_data(inner, again)
        self.restore(tensor, again)
        del inner
        # The view machinery holds the former value until then: it would be one more output of the graph.
        torch._sync(tensor)  # type: ignore[attr-defined,no-untyped-call]

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a host tensor on the device, in a buffer of its own.

        `tensor.to("xla")` makes a constant of a scalar 0 or 1, and shares other scalars: what begins
        its life so and is updated in a step makes the first step another graph than the later ones.
        """
        copy: torch.Tensor = _C._xla_tensors_from_aten([tensor.detach()], [str(self.device())], None)[0]
        return copy

    def _copy_to_host(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if not tensors:
            return []
        tensors = [tensor.detach() for tensor in tensors]
        copies: list[torch.Tensor | None] = [None] * len(tensors)
        if self.is_spmd():
            if any(self.is_pending(tensor) for tensor in tensors):
                self.flush()
            self.wait()
            cut = [index for index, tensor in enumerate(tensors) if self.tiles_of(tensor) is not None]
            parts = [tensors[index] for index in cut]
            places = _C._get_local_shard_replica_and_indices(parts) if parts else []
            for index, shards, where in zip(cut, _C._get_local_shards(parts) if parts else [], places, strict=True):
                copies[index] = put_together(tensors[index], [shard for shard, _ in shards], where)
        missing = [index for index, copy in enumerate(copies) if copy is None]
        if missing:
            found = self._stock_get_cpu_tensors([tensors[index] for index in missing])
            for index, copy in zip(missing, found, strict=True):
                copies[index] = copy.detach()
        return [copy for copy in copies if copy is not None]

    # ---- random numbers --------------------------------------------------------------------------

    def seed(self) -> int:
        """The state of the device's random stream."""
        return int(xm.get_rng_state())

    def set_seed(self, seed: int) -> None:
        """Sets the device's random stream; the seed is an input of graphs, so no new graph results."""
        xm.set_rng_state(seed)

    # ---- observation -----------------------------------------------------------------------------

    def metrics(self) -> Metrics:
        """The totals; waits for the device, since executions are counted when they end."""
        xm.wait_device_ops()
        compiles, seconds = self.compile_totals()
        return Metrics(
            compiles=compiles,
            compile_seconds=seconds,
            executions=_samples("ExecuteTime") + _samples("ExecuteReplicatedTime"),
            transfers_to_host=_samples("TransferFromDeviceTime"),
            transfers_to_device=_samples("TransferToDeviceTime"),
            eager_compiles=_samples("EagerOpCompileTime"),
            eager_ops=_samples("EagerOpExecuteTime"),
        )

    def compile_totals(self) -> tuple[int, float]:
        """Graphs compiled so far and the seconds it took."""
        data = xla_metrics.metric_data("CompileTime")
        return (0, 0.0) if data is None else (int(data[0]), float(data[1]) * _NANOSECONDS)

    @contextmanager
    def intercept(self, notify: Callable[[SeamEvent, object], None]) -> Iterator[None]:
        """Reports syncs, waits and profiler scopes to `notify` before they happen, until the exit.

        `notify` may raise: the call then does not take place.
        """

        def reporting(event: SeamEvent, call: Callable[..., Any]) -> Callable[..., Any]:
            def reported(*args: Any, **kwargs: Any) -> Any:
                notify(event, args[0] if args else None)
                return call(*args, **kwargs)

            return reported

        patches: list[tuple[Any, str, SeamEvent]] = [(_C, name, SeamEvent.SYNC) for name in _SYNC_CALLS]
        patches.append((_C, "_xla_wait_device_ops", SeamEvent.WAIT))
        patches.append((xla_profiler.Trace, "__enter__", SeamEvent.PROFILER_ENTER))
        patches.append((xla_profiler.Trace, "__exit__", SeamEvent.PROFILER_EXIT))
        originals = [(owner, name, getattr(owner, name)) for owner, name, _ in patches]
        for owner, name, event in patches:
            setattr(owner, name, reporting(event, getattr(owner, name)))
        try:
            yield
        finally:
            for owner, name, original in originals:
                setattr(owner, name, original)

    # ---- activation checkpointing ------------------------------------------------------------------

    def checkpoint(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Recomputes `function` in the backward pass, behind barriers XLA cannot optimise away."""
        kwargs["use_reentrant"] = True
        return xla_checkpoint.checkpoint(function, *args, **kwargs)


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
    return "XLATensor without XLAData and IR" in str(error)


def _samples(metric: str) -> int:
    data = xla_metrics.metric_data(metric)
    return 0 if data is None else int(data[0])
