"""PyTorch/XLA on any PJRT device; the files of this folder are the only ones that import torch_xla.

Written against torch_xla 2.9. Calls into `torch_xla._XLAC` are private; `tests/contract` pins each one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as xla_metrics
import torch_xla.debug.profiler as xla_profiler
import torch_xla.runtime as xr
import torch_xla.utils.checkpoint as xla_checkpoint

from xla_adapters.backend.barriers import Barriers
from xla_adapters.backend.compiler_flags import leaves_out_slow_passes
from xla_adapters.backend.computations import Computations
from xla_adapters.backend.interface import FastCompile, Metrics, SeamEvent
from xla_adapters.backend.kept_memory import KeptMemory
from xla_adapters.backend.kernels import Kernels
from xla_adapters.backend.packed_graphs import PackedGraphs
from xla_adapters.backend.pending_values import PendingValues
from xla_adapters.backend.repeated_graphs import RepeatedGraphs
from xla_adapters.backend.sharded_tensors import ShardedTensors
from xla_adapters.backend.tiles import put_together
from xla_adapters.errors import ConfigError, RuntimeOrderError

_C = torch_xla._XLAC
_NANOSECONDS = 1e-9
# Constants of their rounds (Salmon et al.: Parallel Random Numbers: As Easy as 1, 2, 3, 2011); a lowered operation
# of the device's own algorithm has neither.
_RANDOM_ALGORITHMS = {"philox": "constant(2654435769)", "three_fry": "constant(466688986)"}
_SYNC_CALLS = ("_xla_step_marker", "_xla_sync_multi", "_xla_sync_live_tensors")


class PJRTBackend(
    Barriers, Computations, Kernels, KeptMemory, PendingValues, PackedGraphs, RepeatedGraphs, ShardedTensors
):
    """The seam on torch_xla's lazy tensors."""

    name = "torch_xla"
    dynamo_backend = "openxla"
    random_algorithm_variable = "XLA_RNG_BIT_GENERATOR"

    def __init__(self) -> None:
        super().__init__()
        self._initialized = self._has_sync_points = False
        self._device: torch.device | None = None
        self._random_algorithm: str | None = None
        self._stock_get_cpu_tensors: Callable[..., Any] = _C._xla_get_cpu_tensors

    # ---- runtime -------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Says what the runtime must know before it starts, for those who have others start it; may set `XLA_FLAGS`."""
        self._divide_memory()
        self._keep_barriers()

    def initialize(
        self, *, spmd: bool = False, fast_compile: FastCompile = False, keep_memory: bool | None = None
    ) -> None:
        """Starts the runtime, SPMD first if asked for.

        Raises:
            RuntimeOrderError: SPMD or fast compiles are wanted, but a device was already used without.
            ConfigError: the environment switches functionalization off, or what is asked for is not for this device.
        """
        if fast_compile is not False:
            self._compile_fast(fast_compile)
        if keep_memory is not None or not self._initialized:
            self._keep_memory(keep_memory)
            self._keep_barriers(wanted=not (spmd or self._finds_blocks))
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

    def cuts_sums(self) -> bool:
        """Whether the device's compiler cuts sums in windows, each of which it compiles by itself."""
        return self.hardware() == "CPU" and not leaves_out_slow_passes()

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

    def preemption_sync_point(self) -> Callable[[int], bool] | None:
        """Says of a step whether all processes are to save after it, since one will be ended; None for one process.

        Only a TPU's processes have such a thing. It takes SIGTERM over when it is first asked.
        """
        return self._sync_point_reached if self.hardware() == "TPU" and xr.process_count() > 1 else None

    def _sync_point_reached(self, step: int) -> bool:
        if not self._has_sync_points:
            # As torch_xla's CheckpointManager does.
            _C._ensure_xla_coordinator_initialized(xr.process_index(), xr.process_count(), xr.get_master_ip())
            _C._activate_preemption_sync_manager()
            self._has_sync_points = True
        return bool(_C._sync_point_reached(step))

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
        if self.is_spmd() or self.is_pending(snapshot):
            return torch._from_functional_tensor(snapshot.clone())
        # Not a clone: that would be pending, and lost with the graph that cannot be compiled. (Under SPMD this would be
        # another graph: it does not know how it lies on the devices.)
        _, (value,) = _C._get_tensors_xla_device_data_node([snapshot])
        return torch._from_functional_tensor(value)

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

    def to_device_together(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """As `to_device`, in one transfer."""
        return list(_C._xla_tensors_from_aten(list(tensors), [str(self.device())] * len(tensors), None))

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

    def ask_for_random_algorithm(self, name: str) -> str | None:
        """Asks for an algorithm, unless the environment does; returns what the environment asks for.

        torch_xla reads the variable when it lowers the first random operation of the process: now, and then the
        variable is taken away again.

        Raises:
            ConfigError: the environment asks for none that torch_xla knows.
        """
        given = os.environ.get(self.random_algorithm_variable)
        known = ("default", *_RANDOM_ALGORITHMS)
        if given is not None and given not in known:
            raise ConfigError(
                f"{self.random_algorithm_variable}={given!r} is not a valid value; valid values: {', '.join(known)}"
            )
        if given is None:
            os.environ[self.random_algorithm_variable] = name
            try:
                self.random_algorithm()
            finally:
                del os.environ[self.random_algorithm_variable]
        return given

    def random_algorithm(self) -> str:
        """What random numbers are drawn with, read off a lowered operation; from then on it is settled."""
        if self._random_algorithm is not None:
            return self._random_algorithm
        seed, eager = self.seed(), self.eager()
        self.set_eager(False)
        try:
            drawn = torch.rand(1, device=self.device())
            text = str(_C._get_xla_tensors_hlo([drawn]))
        finally:
            self.set_eager(eager)
            self.set_seed(seed)
        del drawn
        self._random_algorithm = next((name for name, sign in _RANDOM_ALGORITHMS.items() if sign in text), "default")
        return self._random_algorithm

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


def _samples(metric: str) -> int:
    data = xla_metrics.metric_data(metric)
    return 0 if data is None else int(data[0])
