"""The part of the seam that step replay stands on: a pending graph's inputs, its executable, runs of it.

Written against torch_xla 2.9; `replay_works` tries all of it out.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as xla_metrics
from torch_xla.utils.buffer_donor_context import alias_with_buffer_donor_config

from xla_adapters.backend.in_flight import TakenValues
from xla_adapters.waiting_steps import settle

if TYPE_CHECKING:
    from xla_adapters.backend.interface import Backend as _Rest
else:
    _Rest = object

_C = torch_xla._XLAC
# How torch_xla moves its random stream on at the end of a step (`DeviceContextArena::MarkStep`).
_SEED_FACTOR, _SEED_SHIFT, _SEED_MASK = 7012063, 1012031, (1 << 64) - 1
# Entries of torch_xla's cache of uploaded Python numbers.
_SCALAR_CACHE = 128
# torch_xla forgets executables, the least recently used first, when it has this many.
_EXECUTABLES = 2048


@dataclass(frozen=True, kw_only=True)
class GraphInput:
    """An input of a pending graph.

    Attributes:
        handle: names the buffer; as long as it lives, no other has it.
        number: of the tensor that used the buffer last.
        value: a tensor that shares the buffer.
    """

    handle: int
    number: int
    value: torch.Tensor


class CachedGraphs(_Rest):
    """Executables that can be run again without tracing; a part of `PJRTBackend`, on whose rest it relies."""

    _scalars_evicted = 0
    # `to_host` without riders.
    _copy_to_host: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]

    def __init__(self) -> None:
        self._riders: list[tuple[list[torch.Tensor], Callable[[list[torch.Tensor]], None]]] = []
        self._taken = TakenValues()

    @cached_property
    def _name(self) -> str:
        return str(self.device())

    # ---- the pending graph -----------------------------------------------------------------------

    def tensor_number(self, tensor: torch.Tensor) -> int:
        """The number of the device tensor behind a tensor; aliases share it."""
        return int(_C._xla_get_tensor_id(tensor))

    def handles(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """The buffers of tensors that have a value.

        A result of an execution that has not begun yet has no buffer, and another handle until then (in torch_xla
        the address of its placeholder): to be compared after `wait`.
        """
        return list(_C._get_tensors_handle(list(tensors)))

    def buffers_of(self, tensors: Sequence[torch.Tensor]) -> set[int]:
        """As `handles`, without those whose buffer is gone (an executable took it)."""
        found = set()
        for tensor in tensors:
            try:
                found.update(self.handles([tensor]))
            except RuntimeError as error:
                if "is deleted" not in str(error):
                    raise
        return found

    def graph_inputs(self, outputs: Sequence[torch.Tensor]) -> list[GraphInput]:
        """What the pending graph of these tensors reads, in the order of its parameters."""
        numbers, values = _C._get_tensors_xla_device_data_node(list(outputs))
        return [
            GraphInput(handle=handle, number=number, value=value)
            for number, handle, value in zip(numbers, self.handles(values), values, strict=True)
        ]

    def seed_number(self) -> int:
        """The `number` of the input that is the random seed."""
        return int(_C._get_seed_info_id())

    def separate_scalars(self) -> None:
        """Numbers uploaded from here on share no input with earlier ones, be they equal."""
        anchor = torch.zeros(1, device=self.device())
        for _ in range(_SCALAR_CACHE):
            CachedGraphs._scalars_evicted += 1
            anchor * (0.5 + CachedGraphs._scalars_evicted)

    # ---- executables -------------------------------------------------------------------------------

    def executable_name(self, outputs: Sequence[torch.Tensor], donated: Sequence[torch.Tensor]) -> bytes:
        """The name that `compile_graph` would return; compiles nothing."""
        with _donating(donated, for_good=False):
            return bytes(_C._get_graph_hash(list(outputs)))

    def compile_graph(self, outputs: Sequence[torch.Tensor], donated: Sequence[torch.Tensor]) -> bytes:
        """Compiles the pending graph, if it is new, without executing it; returns the executable's name.

        Args:
            outputs: all that is pending, in a fixed order.
            donated: inputs whose buffers the executable may reuse.
        """
        with _donating(donated, for_good=True):
            name = bytes(_C._get_graph_hash(list(outputs)))
            _C._xla_warm_up_cache(list(outputs), [])
        return name

    def run_graph(
        self, name: bytes, inputs: Sequence[torch.Tensor], *, taken: Sequence[torch.Tensor] = ()
    ) -> list[torch.Tensor]:
        """Executes; returns the outputs, which the device may still be computing.

        Args:
            name: of the executable.
            inputs: in the order of its parameters.
            taken: the inputs (as `inner`) whose buffers it may reuse: see `TakenValues`.
        """
        results = list(_C._run_cached_graph(name, list(inputs)))
        if taken:
            self._taken.add(list(taken))
        return results

    def fill(self, tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        """Gives pending tensors (as `inner`) the values that an executable computed; nothing is pending then."""
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(self.inner(value))
        _C._clear_pending_irs(self._name)

    def finish_replayed(self) -> None:
        """What `torch_xla.sync` does after an execution: moves the random stream on, runs step closures."""
        seed = _C._xla_get_rng_seed()
        _C._xla_set_rng_seed((_SEED_SHIFT + seed * _SEED_FACTOR) & _SEED_MASK, self._name)
        if xm.is_master_ordinal():
            xm.ms.save_metrics()
        xm._run_step_closures()

    def executables_compiled(self) -> int:
        """Executables compiled so far, those of single operations too."""
        data = (xla_metrics.metric_data(name) for name in ("CompileTime", "EagerOpCompileTime"))
        return sum(int(item[0]) for item in data if item is not None)

    def executables_kept(self) -> int:
        """How many executables may be compiled before the least recently used one is forgotten."""
        return int(os.environ.get("XLA_COMPILATION_CACHE_SIZE", _EXECUTABLES))

    # ---- values --------------------------------------------------------------------------------------

    def ride_along(self, tensors: Sequence[torch.Tensor], receive: Callable[[list[torch.Tensor]], None]) -> None:
        """Copies tensors to the host with the next transfer, whoever asks for it, and hands the copies over."""
        self._riders.append((list(tensors), receive))

    def to_host(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies of all tensors on the host, in one transfer."""
        settle("values are copied to the host")
        if not tensors or not self._riders:
            return self._copy_to_host(tensors)
        return self._copy_with_riders(tensors)

    def deliver_riders(self) -> None:
        """A transfer for those that wait for one."""
        if self._riders:
            self._copy_with_riders([])

    def _copy_with_riders(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        riders, self._riders = self._riders, []
        copies = self._copy_to_host([*tensors, *(tensor for group, _ in riders for tensor in group)])
        rest = copies[len(tensors) :]
        for group, receive in riders:
            receive(rest[: len(group)])
            rest = rest[len(group) :]
        return copies[: len(tensors)]

    def inner(self, tensor: torch.Tensor) -> torch.Tensor:
        """The device tensor behind a tensor."""
        return torch._from_functional_tensor(tensor)

    def forget_writes(self, tensors: Sequence[torch.Tensor]) -> None:
        """Lets the view machinery go of former values: it keeps each that `write` replaced."""
        for tensor in tensors:
            torch._sync(tensor)  # type: ignore[attr-defined,no-untyped-call]

    def storage_marks(self, tensors: Sequence[torch.Tensor]) -> tuple[list[int], list[int]]:
        """Of each tensor the name of its storage, and how often this was written to, by its views and aliases too.

        `replace` writes once. What changes the device tensor itself (a collective in place) shows in `snapshot`.
        """
        name, writes = torch._C._storage_id, torch._functionalize_mutation_counter  # type: ignore[attr-defined]
        return [name(tensor) for tensor in tensors], [writes(tensor) for tensor in tensors]

    def replace(self, tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        """Gives tensors new values (as `inner`), seen through their views and aliases too."""
        replace, commit = torch._functionalize_replace, torch._functionalize_commit_update
        for tensor, value in zip(tensors, values, strict=True):
            replace(tensor, value)
            commit(tensor)

    def write(self, tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        """As `replace`, given tensors that hold the values."""
        self.replace(tensors, list(map(torch._from_functional_tensor, values)))

    def seed_input(self) -> torch.Tensor:
        """The present random seed as an input of a graph."""
        seed: torch.Tensor = _C._get_base_seed_as_tensor(self._name)
        return seed

    def upload_numbers(self, numbers: Sequence[tuple[float, torch.dtype]]) -> list[torch.Tensor]:
        """Numbers as inputs of a graph, in one transfer."""
        if not numbers:
            return []
        hosts = [torch.tensor(value, dtype=dtype) for value, dtype in numbers]
        return list(_C._xla_tensors_from_aten(hosts, [self._name] * len(hosts), None))

    def shared(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Which of these tensors (their positions) share their buffer with another tensor.

        Copying a tensor into another copies nothing (torch_xla 2.9): both share the buffer, and an
        executable that reuses it for one would take it from the other. Executes what is pending, if it reads one.
        """
        # A tensor that nothing was computed from since its value was written holds no node of a graph.
        names = map(_C._unique_id_for_ir_and_data, tensors)
        used = [position for position, name in enumerate(names) if "," in name]
        if not used:
            return []
        self.flush()
        # Before an execution has begun, its results have other handles than afterwards.
        self.wait()
        inputs = {item.handle: item.number for item in self.graph_inputs([tensors[position] for position in used])}
        handles = self.handles([tensors[position] for position in used])
        return [
            position
            for position, handle in zip(used, handles, strict=True)
            if inputs[handle] != self.tensor_number(tensors[position])
        ]

    def aliases(self, tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> list[int]:
        """Which of these tensors (their positions) are the device tensor of another one (by `detach()`, say)."""
        names = set(map(_C._unique_id_for_ir_and_data, others)) if tensors else set()
        return [position for position, tensor in enumerate(tensors) if _C._unique_id_for_ir_and_data(tensor) in names]

    def copies(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The same values in buffers of their own. Executes what is pending."""
        eager = self.eager()
        # Executed by itself, a clone is the same buffer again; a graph's results never are its inputs.
        self.set_eager(False)
        try:
            copies = [tensor.detach().clone() for tensor in tensors]
            self.flush()
        finally:
            self.set_eager(eager)
        return copies

    def layouts(self, tensors: Sequence[torch.Tensor]) -> list[str]:
        """How tensors lie on the devices, as text to compare."""
        return list(_C._get_xla_sharding_specs(list(tensors)))

    # ---- the self-test -----------------------------------------------------------------------------

    @cached_property
    def replay_works(self) -> bool:
        """Whether this torch_xla runs cached graphs as version 2.9 does; compiles two tiny graphs to see."""
        works = _try_out(self)
        if not works:
            warnings.warn(
                f"torch_xla {torch_xla.__version__} does not run cached graphs as 2.9 does: steps are traced again at "
                "each call instead of being replayed",
                UserWarning,
                stacklevel=2,
            )
        return works


@contextmanager
def _donating(tensors: Sequence[torch.Tensor], *, for_good: bool) -> Iterator[None]:
    """What is compiled inside may reuse the buffers of these tensors; the marks stay, unless it fails."""
    for tensor in tensors:
        _C._set_buffer_donation(tensor, True)
    stay = False
    try:
        with alias_with_buffer_donor_config(True):
            yield
        stay = for_good
    finally:
        if not stay:
            for tensor in tensors:
                _C._set_buffer_donation(tensor, False)


def _try_out(graphs: Any) -> bool:
    eager = graphs.eager()
    graphs.set_eager(False)
    try:
        state, batch = graphs.to_device(torch.arange(3.0)), graphs.to_device(torch.ones(3))
        graphs.flush()
        before = graphs.inner(state)
        alias, (own, given) = state.view(3), graphs.handles([state, batch])
        state.mul_(1.5).add_(batch)
        output = graphs.inner(state)
        inputs = graphs.graph_inputs([output])
        places = {own: "state", given: "batch"}
        kinds = [places.get(item.handle, "number") for item in inputs]
        if sorted(kinds) != ["batch", "number", "state"]:
            return False
        name = graphs.compile_graph([output], [before])
        graphs.fill([output], graphs.run_graph(name, [item.value for item in inputs]))
        compiled = graphs.compile_totals()[0]
        names, writes = graphs.storage_marks([state])
        for factor in (2.0, 3.0):
            (number,) = graphs.upload_numbers([(factor, torch.float32)])
            feed = {"state": state, "batch": batch, "number": number}
            graphs.write([state], graphs.run_graph(name, [feed[kind] for kind in kinds]))
        if graphs.compile_totals()[0] != compiled:
            return False
        expected = ((torch.arange(3.0) * 1.5 + 1) * 2 + 1) * 3 + 1
        found = graphs.to_host([state, alias])
        graphs.write([alias], [batch])
        told = graphs.storage_marks([state]) == (names, [writes[0] + 3])
        return told and all(torch.equal(value, expected) for value in found)
    except (AttributeError, RuntimeError, TypeError, KeyError):
        return False
    finally:
        graphs.set_eager(eager)
