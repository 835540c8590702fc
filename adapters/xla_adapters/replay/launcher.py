"""`Launcher`: runs the executable of a traced call again, with all that these runs have in common precomputed."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import repeat
from operator import attrgetter, is_, is_not
from typing import Any

import torch

from xla_adapters.replay.number_inputs import HostUpdate, Number, numbers_of
from xla_adapters.replay.state_values import StateValues
from xla_adapters.replay.tensor_places import CallTensors, CannotReplay, TensorPlace, is_state
from xla_adapters.replay.traced_call import TracedCall
from xla_adapters.runtime import Runtime

_grad = attrgetter("grad")


class Launcher:
    """Runs the executable of a traced call: checks that it still applies, collects its inputs, stores its outputs.

    Args:
        call: two traced calls agreed on it.
        fixed: numbers of the optimizers that are no input of the graph; see `find_roles`.
        runtime: the runtime.

    Attributes:
        call: what is replayed.
        compiled: how many executables the process had compiled when this one was last used.
    """

    def __init__(self, call: TracedCall, fixed: Sequence[tuple[int, float]], runtime: Runtime) -> None:
        self.call = call
        self.compiled = runtime.counters.executables_compiled()
        self._fixed = list(fixed)
        self._sources = sources = call.values.sources
        self._donated = call.values.donated
        read = [(index, source.owner) for index, source in enumerate(sources) if is_state(source)]
        self._changing = [(index, source) for index, source in enumerate(sources) if not is_state(source)]
        targets = [(index, place) for index, places in enumerate(call.values.targets) for place in places]
        written = [(index, place.owner) for index, place in targets if is_state(place)]
        self._assigned = [(index, place) for index, place in targets if not is_state(place)]
        self._state = call.values.state
        positions = {id(tensor): position for position, tensor in enumerate(self._state)}
        # For each input the position of its tensor in the state; any for inputs that are no part of the state.
        self._order = [0] * len(sources)
        for index, tensor in read:
            self._order[index] = positions[id(tensor)]
        self._written = [positions[id(tensor)] for _, tensor in written]
        self._outputs = [index for index, _ in written]
        modules = [module for _, module in call.snapshot.modules]
        self._parameters = [item for module in modules for item in module._parameters.values() if item is not None]
        self._leaves_with = [leaf for leaf, was_there in call.gradients.before if was_there]
        self._leaves_without = [leaf for leaf, was_there in call.gradients.before if not was_there]
        self._layouts = runtime.spmd.layouts(self._state) if runtime.device.is_spmd() else []
        self._state_values: StateValues | None = None
        self._ahead = RunAhead()
        self._copies = -1
        self._donated_by_form: dict[Hashable, list[int]] = {}

    # ---- before a replay ---------------------------------------------------------------------------

    def reason_to_trace(
        self, tensors: CallTensors, runtime: Runtime, set_modes: Callable[[], object] | None
    ) -> str | None:
        """Why the next call of the step is not this one, in words; None if it is.

        Args:
            tensors: of the call.
            runtime: the runtime.
            set_modes: puts the modules into train or eval mode, as the step itself does first.
        """
        change = self.call.snapshot.changed_in_modes(set_modes) or self.call.host.reason_to_trace()
        if change is not None:
            return change
        if not _have_none(self._leaves_without):
            return "a gradient exists that did not when the step was traced"
        if not all(map(is_not, map(_grad, self._leaves_with), repeat(None))):
            return "a gradient is absent that existed when the step was traced"
        sharing = self._sharing(tensors, runtime)
        if sharing is not None:
            return sharing
        if self._layouts and runtime.spmd.layouts(self._state) != self._layouts:
            return "a tensor of the state is sharded otherwise"
        if runtime.counters.executables_compiled() - self.compiled > runtime.counters.executables_kept() // 2:
            return "so many others were compiled that the executable may have been evicted"
        return None

    def _sharing(self, tensors: CallTensors, runtime: Runtime) -> str | None:
        """Which tensors of the batch and the state share their storage now, in words; None if none do."""
        if self._state_values is None:
            self._state_values = StateValues(self._state, self.call.sharing, runtime)
        return self._state_values.sharing([place.get(tensors) for place in self.call.values.elsewhere], tensors.batch)

    def new_numbers(self, updates: Sequence[HostUpdate]) -> list[tuple[Number, float]]:
        """The inputs that are other numbers in the next call, with their values.

        Args:
            updates: the optimizers' host math of that call.

        Raises:
            CannotReplay: numbers that shared an input differ now, or one changed that is no input.
        """
        numbers = numbers_of(updates)
        for role, value in self._fixed:
            if numbers[role] != value:
                raise CannotReplay(
                    f"a number of the optimizer that is no input of the graph: {value:g} -> {numbers[role]:g}"
                )
        new: list[tuple[Number, float]] = []
        for _, source in self._changing:
            if isinstance(source, Number) and source.roles:
                value = source.next(numbers)
                if value != source.present:
                    new.append((source, value))
        return new

    # ---- the replay --------------------------------------------------------------------------------

    def inputs(self, tensors: CallTensors, new: Sequence[tuple[Number, float]], runtime: Runtime) -> list[torch.Tensor]:
        """The inputs of the executable.

        Args:
            tensors: of the call.
            new: see `new_numbers`.
            runtime: the runtime.
        """
        uploads = runtime.transfers.upload_numbers([(value, number.value.dtype) for number, value in new])
        for (number, value), upload in zip(new, uploads, strict=True):
            number.value, number.present = upload, value
        assert self._state_values is not None
        values = self._state_values.present()
        # One `map` for all positions: those that are no part of the state are replaced below.
        found: list[Any] = list(map(values.__getitem__, self._order)) if values else [None] * len(self._sources)
        for index, source in self._changing:
            if isinstance(source, Number):
                found[index] = source.value
            elif isinstance(source, TensorPlace):
                tensor = source.get(tensors)
                # What is updated goes in as its value, which can outlive the update (see `Executables.run`).
                found[index] = tensor if source.kind == "batch" else runtime.values.snapshot(tensor)
            else:
                found[index] = runtime.random.seed_input()
        return found

    def own_buffers(self, inputs: list[torch.Tensor], tensors: CallTensors, runtime: Runtime) -> None:
        """Copies what shares a buffer with a donated input, before the executable overwrites that.

        Args:
            inputs: of the executable; replaced in place where a copy was made.
            tensors: of the call.
            runtime: the runtime.
        """
        if runtime.shared_buffers.copies_made() != self._copies:
            # Copies made since the last run may share the buffers of donated inputs.
            places = [
                place for place in map(self._sources.__getitem__, self._donated) if isinstance(place, TensorPlace)
            ]
            sharing = runtime.shared_buffers.may_share([place.get(tensors) for place in places])
            runtime.shared_buffers.separate(sharing)
            self._copies = runtime.shared_buffers.copies_made()
            if sharing:
                inputs[:] = self.inputs(tensors, (), runtime)
        # A tensor of the batch may be one of the state.
        batch = [
            index for index, source in self._changing if isinstance(source, TensorPlace) and source.kind == "batch"
        ]
        given = [inputs[index] for index in batch]
        shared = runtime.lazy.aliases(given, self._donated_like(given, inputs))
        if shared:
            copies = runtime.values.copies([given[position] for position in shared])
            for position, copy in zip(shared, copies, strict=True):
                inputs[batch[position]] = copy

    def _donated_like(self, given: Iterable[torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The donated inputs that have the dtype and shape of one of these tensors."""
        if not self._donated_by_form:
            for index in self._donated:
                self._donated_by_form.setdefault(_form(inputs[index]), []).append(index)
        forms = set(map(_form, given))
        return [inputs[index] for form in forms for index in self._donated_by_form.get(form, ())]

    def run(self, inputs: Sequence[torch.Tensor], runtime: Runtime) -> list[torch.Tensor]:
        """Calls the executable; returns its outputs."""
        return runtime.executables.run(self.call.executable, inputs, taken=[inputs[index] for index in self._donated])

    # ---- after it ----------------------------------------------------------------------------------

    def write_back(self, results: Sequence[torch.Tensor], tensors: CallTensors, runtime: Runtime) -> None:
        """Stores the outputs of the executable where the step stores them, and does what else it does on the host."""
        assert self._state_values is not None
        gradients, host = self.call.gradients, self.call.host
        self._state_values.write(self._written, list(map(runtime.lazy.inner, map(results.__getitem__, self._outputs))))
        others: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for index, place in self._assigned:
            if place.kind == "grad" and id(place.owner) in gradients.created:
                place.owner.grad = results[index]
            elif place.kind == "buffer":
                place.owner._buffers[place.name] = results[index]
            elif place.kind == "state":
                place.owner[place.name] = results[index]
            elif place.key in host.reassigned:
                setattr(place.owner, str(place.name), results[index])
            else:
                others.append(place.get(tensors))
                values.append(results[index])
        runtime.values.write(others, values)
        runtime.shared_buffers.note_own_buffers(others)
        self._ahead.written(lambda: self._forget_writes(others, runtime))
        for leaf in gradients.dropped:
            leaf.grad = None
        for attribute in host.attributes:
            attribute.apply()

    def _forget_writes(self, others: Sequence[torch.Tensor], runtime: Runtime) -> None:
        assert self._state_values is not None
        self._state_values.forget_writes()
        runtime.lazy.forget_writes(others)

    def without_gradients(self) -> bool:
        """Whether no parameter of the modules has a gradient."""
        with torch._C.DisableTorchFunction():
            return _have_none(self._parameters)


def _have_none(leaves: Iterable[torch.Tensor]) -> bool:
    return all(map(is_, map(_grad, leaves), repeat(None)))


def _form(tensor: torch.Tensor) -> Hashable:
    return tensor.dtype, tensor.shape


# ---- how far the host is ahead ------------------------------------------------------------------


# Replays between two waits. Many, because after a wait the host's caches are cold...
WRITES_KEPT = 8
# ...but they may take no longer than this in all, because a save or Ctrl-C waits for them.
SECONDS_AHEAD = 0.5


class RunAhead:
    """Decides after which replays the values are released that the replays have replaced.

    After a release, only `TakenValues` references the values whose buffers executions reuse, and it waits for these
    executions. The duration of that wait cannot be measured in one place. So the time between two releases is
    measured, which is the pace of host and device together.

    Args:
        clock: the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._kept = 1
        self._writes = 0
        self._forgot: float | None = None

    def written(self, forget: Callable[[], object]) -> None:
        """Called after each replay.

        Args:
            forget: releases the values that all replays so far have replaced.
        """
        self._writes += 1
        if self._writes < self._kept:
            return
        forget()
        now = self._clock()
        if self._forgot is not None:
            pace = max((now - self._forgot) / self._writes, 1e-6)
            # At most doubled: the first steps are fast for the host, however long the device takes.
            self._kept = max(1, min(WRITES_KEPT, 2 * self._kept, int(SECONDS_AHEAD / pace)))
        self._forgot = now
        self._writes = 0
