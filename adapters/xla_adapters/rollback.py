"""`StepJournal`: what a step changed, so that a step that fails can be undone to the last bit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from xla_adapters.backend import Backend
from xla_adapters.discarded import mark_discarded


@dataclass
class TensorEntry:
    """A tensor and the value it had; under `twin` where the value itself may have been written."""

    tensor: torch.Tensor
    value: torch.Tensor
    on_device: bool
    twin: torch.Tensor | None = None
    was_pending: bool = False

    @property
    def former(self) -> torch.Tensor:
        """The value it had, as the step's graph reads it."""
        return self.value if self.twin is None else self.twin


@dataclass
class _ModuleEntry:
    module: torch.nn.Module
    buffers: dict[str, torch.Tensor | None]


@dataclass
class _OptimizerEntry:
    optimizer: Optimizer
    state: list[tuple[Any, dict[Any, Any] | Any]]
    groups: list[dict[str, Any]]


_retired: list[torch.Tensor | None] = []


def release_retired() -> None:
    """Lets go of the last executed step's old values; may wait for the device."""
    _retired.clear()


class StepJournal:
    """Records the values that a step is about to replace.

    XLA tensors are functional underneath: an in-place operation points the tensor at a new value.
    The journal keeps the old one, which costs no copy. It is filled just before a value changes, so
    it holds what the step touched and nothing else.
    """

    def __init__(self, backend: Backend, *, enclosing: StepJournal | None = None) -> None:
        """
        Args:
            backend: the seam.
            enclosing: the journal of the step around this one. Then tensors that are not computed
                yet are recorded too, since they may be the enclosing step's.
        """
        self._backend = backend
        self._enclosing = enclosing
        self._tensors: dict[int, TensorEntry] = {}
        self._leaves: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._modules: dict[int, _ModuleEntry] = {}
        self._optimizers: dict[int, _OptimizerEntry] = {}

    def record(self, tensor: torch.Tensor, *, written_through: bool = False) -> None:
        """Keeps the present value of a tensor that is about to be written in place.

        Args:
            tensor: on the device or the host.
            written_through: the operation may change the kept value itself; see `PJRTBackend.twin`.
        """
        entry = self._tensors.get(id(tensor))
        if entry is not None:
            if written_through and entry.on_device and entry.twin is None and not self._backend.is_pending(entry.value):
                entry.twin = self._backend.twin(entry.value)
            return
        base = tensor._base
        if base is not None:
            # Writing into a view changes its base; the view itself may be a value nobody computed yet.
            self.record(base, written_through=written_through)
            return
        if self._backend.is_backend_tensor(tensor):
            # A tensor that is still pending was made inside this step: there is nothing to go back to,
            # and holding its value would turn an intermediate result into an output of the graph.
            pending = self._backend.is_pending(tensor)
            if self._enclosing is None and pending:
                return
            value = self._backend.snapshot(tensor)
            twin = self._backend.twin(value) if written_through else None
            self._tensors[id(tensor)] = TensorEntry(tensor, value, True, twin, pending)
        elif tensor.device.type == "cpu":
            self._tensors[id(tensor)] = TensorEntry(tensor, tensor.detach().clone(), False)

    def record_leaf(self, leaf: torch.Tensor) -> None:
        """Keeps a parameter that takes part in the step, and its gradient."""
        if id(leaf) in self._leaves:
            return
        grad = leaf.grad
        self.record(leaf)
        if grad is not None:
            self.record(grad)
        self._leaves[id(leaf)] = (leaf, grad)

    def record_enclosing_leaves(self) -> None:
        """Keeps the gradients of what the enclosing steps have computed with: a backward comes."""
        for enclosing in self.chain()[1:]:
            for leaf, _ in list(enclosing._leaves.values()):
                self.record_leaf(leaf)

    def record_module(self, module: torch.nn.Module) -> None:
        """Keeps which tensors a module's buffers are: its forward may bind them anew."""
        if module._buffers and id(module) not in self._modules:
            self._modules[id(module)] = _ModuleEntry(module, dict(module._buffers))

    def record_optimizer(self, optimizer: Optimizer) -> None:
        """Keeps an optimizer's whole state before it steps."""
        if id(optimizer) in self._optimizers:
            return
        state = [(key, dict(value) if isinstance(value, dict) else value) for key, value in optimizer.state.items()]
        groups = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]
        for group in groups:
            for parameter in group["params"]:
                self.record_leaf(parameter)
            for value in group.values():
                if isinstance(value, torch.Tensor):
                    self.record(value)
        self.record_optimizer_state(optimizer)
        # Last: whoever is interrupted in between has recorded too little.
        self._optimizers[id(optimizer)] = _OptimizerEntry(optimizer, state, groups)

    def record_optimizer_state(self, optimizer: Optimizer) -> None:
        """Keeps the tensors of an optimizer's state; also those created since `record_optimizer`."""
        for values in optimizer.state.values():
            if isinstance(values, dict):
                for value in _tensors_in(values.values()):
                    self.record(value)

    def chain(self) -> list[StepJournal]:
        """This journal and those of the steps around it, from the inside out."""
        journals, enclosing = [self], self._enclosing
        while enclosing is not None:
            journals.append(enclosing)
            enclosing = enclosing._enclosing
        return journals

    def merge_up_to(self, outermost: StepJournal) -> None:
        """Merges this journal and those around it into the outermost: steps were left open inside."""
        for journal in self.chain():
            if journal is not outermost and journal._enclosing is not None:
                journal.merge_into(journal._enclosing)

    def forget_executed(self) -> None:
        """Drops what is about to be executed in mid-step: the old values' buffers are reused then.

        What was done so far stays done; a gradient that did not exist before can still be dropped.
        """
        self._tensors = {
            key: entry
            for key, entry in self._tensors.items()
            if entry.on_device and not self._backend.is_pending(entry.tensor)
        }
        self._optimizers.clear()
        self._modules.clear()

    def entries(self) -> list[TensorEntry]:
        """What is recorded of tensors on the device."""
        return [entry for entry in self._tensors.values() if entry.on_device]

    def leaves(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """The parameters that took part, and the gradients they had."""
        return list(self._leaves.values())

    def optimizers(self) -> list[Optimizer]:
        """The optimizers that stepped."""
        return [entry.optimizer for entry in self._optimizers.values()]

    def rebound_buffers(self) -> list[tuple[torch.nn.Module, str, torch.Tensor | None]]:
        """Buffers that are other tensors now, and which they were."""
        return [
            (entry.module, name, before)
            for entry in self._modules.values()
            for name, before in entry.buffers.items()
            if entry.module._buffers.get(name) is not before
        ]

    def pending_tensors(self) -> list[torch.Tensor]:
        """The recorded tensors that have a new value, not computed yet."""
        tensors = [entry.tensor for entry in self._tensors.values() if entry.on_device]
        return [tensor for tensor in tensors if self._backend.is_pending(tensor)]

    def apply_writes(self) -> None:
        """Brings tensors up to date that were written through views: later they would need what may be lost then."""
        for entry in self._tensors.values():
            if entry.on_device:
                self._backend.snapshot(entry.tensor)

    def restate_dtypes(self) -> None:
        """Makes the parameters that optimizers updated like those that were brought to the device."""
        with torch.no_grad():
            for entry in self._optimizers.values():
                for group in entry.optimizer.param_groups:
                    for value in group["params"]:
                        if self._backend.is_backend_tensor(value) and self._backend.is_pending(value):
                            self._backend.restate_dtype(value)

    def detach_new_grads(self) -> None:
        """Makes new gradients tensors of their own.

        Those of biases and of transposed weights are views of tensors that nobody sees, which would be
        outputs of the graph beside them. A clone adds nothing to it.
        """
        with torch.no_grad():
            for leaf, before in self._leaves.values():
                grad = leaf.grad
                if grad is None or grad is before or not self._backend.is_backend_tensor(grad):
                    continue
                if self._backend.is_pending(grad):
                    leaf.grad = grad.clone()

    def retire(self) -> None:
        """Ends the journal of a step that was executed, and forgets everything.

        The old values are let go of only after the next step was handed to the device: freeing a
        buffer that the running step still uses would wait for it, and the next step could not be
        traced meanwhile.
        """
        global _retired
        _retired = [value for entry in self._tensors.values() for value in (entry.value, entry.twin)]
        self.clear()

    def clear(self) -> None:
        """Forgets everything: what was done so far stays done."""
        self._tensors.clear()
        self._leaves.clear()
        self._optimizers.clear()
        self._modules.clear()

    def free_grads(self) -> None:
        """Drops the gradients of all parameters that took part."""
        for leaf, _ in self._leaves.values():
            leaf.grad = None

    def merge_into(self, outer: StepJournal) -> None:
        """Hands the entries to the journal of the enclosing step, where older ones win."""
        for key, entry in self._tensors.items():
            outer._tensors.setdefault(key, entry)
        for key, leaf in self._leaves.items():
            outer._leaves.setdefault(key, leaf)
        for key, optimizer in self._optimizers.items():
            outer._optimizers.setdefault(key, optimizer)
        for key, module in self._modules.items():
            outer._modules.setdefault(key, module)
        # Values that were pending when recorded belong to the enclosing step: keeping them alive
        # would make them outputs of its graph.
        for key, entry in self._tensors.items():
            if entry.was_pending and outer._tensors.get(key) is entry:
                del outer._tensors[key]

    def undo(self, *, discard: bool) -> None:
        """Puts every recorded value back.

        Args:
            discard: forget the pending graph too. Without it (a step inside a step) what the
                enclosing step has traced so far stays.
        """
        backend = self._backend
        with torch.no_grad():
            for item in self._tensors.values():
                if item.twin is not None:
                    backend.rewrite(item.value, item.twin)
        changed = [
            item for item in self._tensors.values() if not (item.on_device and backend.holds(item.tensor, item.value))
        ]
        sharing: list[torch.Tensor] = []
        if discard and backend.pending_count():
            sharing = mark_discarded(backend, [entry.tensor for entry in self._tensors.values() if entry.on_device])
        if discard:
            backend.discard_pending()
        for entry in self._optimizers.values():
            _restore_optimizer(entry)
        for module in self._modules.values():
            module.module._buffers.clear()
            module.module._buffers.update(module.buffers)
        for leaf, grad in self._leaves.values():
            leaf.grad = grad
        with torch.no_grad():
            restored = []
            for item in changed:
                if item.on_device:
                    backend.restore(item.tensor, item.value)
                    restored.append(item.tensor)
                else:
                    item.tensor.copy_(item.value)
            for tensor in sharing:
                backend.snapshot(tensor)
        # A value restored through a view (gradients of biases are such) is a pending update of the view's
        # base. All of them are brought up to date here: later, in eager mode, each would be an execution.
        if sum(backend.is_pending(tensor) for tensor in restored) and discard:
            backend.flush()


def _tensors_in(values: Iterable[Any]) -> Iterable[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors_in(value)
        elif isinstance(value, dict):
            yield from _tensors_in(value.values())


def _restore_optimizer(entry: _OptimizerEntry) -> None:
    state = entry.optimizer.state
    before = dict(entry.state)
    for key in [key for key in state if key not in before]:
        del state[key]
    for key, values in before.items():
        if isinstance(values, dict) and isinstance(state.get(key), dict):
            state[key].clear()
            state[key].update(values)
        else:
            state[key] = values
    for group, saved in zip(entry.optimizer.param_groups, entry.groups, strict=False):
        group.clear()
        group.update(saved)
    del entry.optimizer.param_groups[len(entry.groups) :]
