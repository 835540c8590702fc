"""`UndoLog`: the values that a step has replaced, to restore them after an error."""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import not_
from typing import Any

import torch
from torch.optim import Optimizer

from xla_adapters.errors import DiscardedTensorError
from xla_adapters.runtime import Runtime
from xla_adapters.utils.torch_modes import is_bare, is_fake


@dataclass
class TensorEntry:
    """A tensor of which the step writes the value.

    Attributes:
        tensor: on the device or the host.
        value: what it held before the step.
        on_device: whether it is on the device.
        second_copy: of the value, if an operation may have written `value` itself.
        was_pending: whether the value was not computed yet when it was recorded.
    """

    tensor: torch.Tensor
    value: torch.Tensor
    on_device: bool
    second_copy: torch.Tensor | None = None
    was_pending: bool = False

    @property
    def before_step(self) -> torch.Tensor:
        """The value before the step, as the step's graph reads it."""
        return self.value if self.second_copy is None else self.second_copy


@dataclass
class _LeafEntry:
    """A parameter that the step uses.

    Attributes:
        leaf: returns it, or None if it is gone.
        kept: the parameter itself; None if the step has made it. A reference would make what is gone before the end
            of the step (as what torch_xla's `scan` is traced with) an output of the graph.
        grad: its gradient before the step.
    """

    leaf: weakref.ref[torch.Tensor]
    kept: torch.Tensor | None
    grad: torch.Tensor | None


@dataclass
class _ModuleEntry:
    module: torch.nn.Module
    buffers: dict[str, torch.Tensor | None]


@dataclass
class _OptimizerEntry:
    optimizer: Optimizer
    state: list[tuple[Any, dict[Any, Any] | Any]]
    groups: list[dict[str, Any]]


_to_free: list[torch.Tensor | None] = []


def free_replaced_values() -> None:
    """Frees the replaced values of the last executed step; may wait for the device."""
    _to_free.clear()


class UndoLog:
    """Records the values that a step is about to replace, and restores them if the step fails.

    XLA tensors are functional: an in-place operation makes the tensor refer to a new value. The log keeps a reference
    to the old value, so recording copies nothing. A value is recorded right before it changes.

    Args:
        runtime: the runtime.
        enclosing: the undo log of the step around this one. Then tensors that are not computed yet are recorded too,
            because the enclosing step may have made them.
    """

    def __init__(self, runtime: Runtime, *, enclosing: UndoLog | None = None) -> None:
        self._runtime = runtime
        self._enclosing = enclosing
        self._spmd = runtime.device.is_spmd()
        self._tensors: dict[int, TensorEntry] = {}
        self._leaves: dict[int, _LeafEntry] = {}
        self._modules: dict[int, _ModuleEntry] = {}
        self._optimizers: dict[int, _OptimizerEntry] = {}

    def record(self, tensor: torch.Tensor, *, written_through: bool = False) -> None:
        """Records the value of a tensor that is about to be written in place.

        Args:
            tensor: on the device or the host.
            written_through: the operation may change the recorded value itself; see `Values.second_copy`.
        """
        entry = self._tensors.get(id(tensor))
        if entry is not None:
            if (
                written_through
                and entry.on_device
                and entry.second_copy is None
                and not self._runtime.tracing.is_pending(entry.value)
            ):
                entry.second_copy = self._runtime.values.second_copy(entry.value)
            return
        base = tensor._base
        if base is not None:
            # Writing into a view changes its base; the value of the view itself may be pending.
            self.record(base, written_through=written_through)
            return
        if is_fake(tensor) or is_bare(tensor):
            return
        if self._runtime.device.owns(tensor):
            # A pending tensor was made inside this step, so there is no value to restore. A reference to its value
            # would make an intermediate result an output of the graph.
            pending = self._runtime.tracing.is_pending(tensor)
            if self._enclosing is None and pending:
                return
            if self._spmd and not pending:
                # torch_xla hands the annotation on to the new value, and annotates all results of a step. Without one
                # now, the first step would be another graph than the later ones.
                self._runtime.spmd.annotate_whole(tensor)
            value = self._runtime.values.snapshot(tensor)
            second_copy = self._runtime.values.second_copy(value) if written_through else None
            self._tensors[id(tensor)] = TensorEntry(tensor, value, True, second_copy, pending)
        elif tensor.device.type == "cpu":
            self._tensors[id(tensor)] = TensorEntry(tensor, tensor.detach().clone(), False)

    def record_leaf(self, leaf: torch.Tensor) -> None:
        """Records a parameter that the step uses, and its gradient."""
        known = self._leaves.get(id(leaf))
        if (known is not None and known.leaf() is leaf) or is_fake(leaf):
            return
        if leaf._base is not None and not torch.is_grad_enabled():
            # A view made without gradients counts as a leaf (in the forward of an autograd function, say) and gets no
            # gradient. A reference would keep what it is a view of alive, as an output of the graph.
            return
        grad = leaf.grad
        self.record(leaf)
        if grad is not None:
            self.record(grad)
        is_new = self._runtime.device.owns(leaf) and self._runtime.tracing.is_pending(leaf)
        if self._runtime.has_lazy_tensors and self._runtime.device.owns(leaf) and leaf._base is None and not is_new:
            self._runtime.lazy.count_as_written(leaf)
        self._leaves[id(leaf)] = _LeafEntry(weakref.ref(leaf), None if is_new else leaf, grad)

    def record_enclosing_leaves(self) -> None:
        """Records the leaves of enclosing steps: a backward is about to change their gradients."""
        for enclosing in self.chain()[1:]:
            for leaf, _ in enclosing.leaves():
                self.record_leaf(leaf)

    def record_module(self, module: torch.nn.Module) -> None:
        """Records which tensors a module's buffers are: its forward may assign other ones."""
        if module._buffers and id(module) not in self._modules:
            self._modules[id(module)] = _ModuleEntry(module, dict(module._buffers))

    def record_optimizer(self, optimizer: Optimizer) -> None:
        """Records an optimizer's state, groups and parameters before it steps."""
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
        # Last: after Ctrl-C above, the next call records everything.
        self._optimizers[id(optimizer)] = _OptimizerEntry(optimizer, state, groups)

    def record_optimizer_state(self, optimizer: Optimizer) -> None:
        """Records the tensors of an optimizer's state, including those created since `record_optimizer`."""
        for values in optimizer.state.values():
            if isinstance(values, dict):
                for value in values.values():
                    if isinstance(value, torch.Tensor):
                        self.record(value)
                    else:
                        self._record_nested(value)

    def _record_nested(self, value: Any) -> None:
        for tensor in _tensors_in((value,)):
            self.record(tensor)

    def chain(self) -> list[UndoLog]:
        """This undo log and those of the enclosing steps, the innermost first."""
        undo_logs, enclosing = [self], self._enclosing
        while enclosing is not None:
            undo_logs.append(enclosing)
            enclosing = enclosing._enclosing
        return undo_logs

    def merge_up_to(self, outermost: UndoLog) -> None:
        """Merges this undo log and the enclosing ones into the outermost one: inner steps were not closed."""
        for undo_log in self.chain():
            if undo_log is not outermost and undo_log._enclosing is not None:
                undo_log.merge_into(undo_log._enclosing)

    def forget_executed(self) -> None:
        """Removes the tensors whose new values are about to be executed before the end of the step.

        The execution reuses the buffers of their old values, so these changes cannot be undone. A gradient that did
        not exist before the step can still be removed.
        """
        self._tensors = {id(entry.tensor): entry for entry in self.entries() if not self._is_pending(entry)}
        self._optimizers.clear()
        self._modules.clear()

    def entries(self) -> list[TensorEntry]:
        """The recorded tensors on the device, but not those that a module's move has exchanged for one on the host."""
        owns = self._runtime.device.owns
        return [entry for entry in self._tensors.values() if entry.on_device and owns(entry.tensor)]

    def leaves(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """The recorded parameters, with their gradients before the step."""
        found = ((entry.leaf(), entry.grad) for entry in self._leaves.values())
        return [(leaf, grad) for leaf, grad in found if leaf is not None]

    def optimizers(self) -> list[Optimizer]:
        """The optimizers that stepped."""
        return [entry.optimizer for entry in self._optimizers.values()]

    def reassigned_buffers(self) -> list[tuple[torch.nn.Module, str, torch.Tensor | None]]:
        """Buffers that were assigned another tensor: module, name, and the tensor before the step."""
        return [
            (entry.module, name, before)
            for entry in self._modules.values()
            for name, before in entry.buffers.items()
            if entry.module._buffers.get(name) is not before
        ]

    def pending_tensors(self) -> list[torch.Tensor]:
        """The recorded tensors whose new value is not computed yet."""
        return list(compress(*self._tensors_and_pending()))

    def pending_entries(self) -> tuple[list[TensorEntry], list[TensorEntry]]:
        """The entries whose new value is not computed yet, and the others."""
        entries = self.entries()
        pending = self._runtime.tracing.are_pending([entry.tensor for entry in entries])
        return list(compress(entries, pending)), list(compress(entries, map(not_, pending)))

    def _tensors_and_pending(self) -> tuple[list[torch.Tensor], list[bool]]:
        tensors = [entry.tensor for entry in self.entries()]
        return tensors, self._runtime.tracing.are_pending(tensors)

    def _is_pending(self, entry: TensorEntry) -> bool:
        return self._runtime.tracing.is_pending(entry.tensor)

    def apply_writes(self) -> None:
        """Applies writes that were made through views to the tensors themselves, while their inputs still exist."""
        for entry in self.entries():
            self._runtime.values.bring_up_to_date(entry.tensor)

    def restate_dtypes(self, stated: Container[int]) -> None:
        """Gives updated parameters the same dtype node as uploaded ones, so that later steps are the same graph.

        Args:
            stated: `id` of the parameters that have it already.
        """
        if not self._runtime.has_lazy_tensors:
            return
        with torch.no_grad():
            for entry in self._optimizers.values():
                for group in entry.optimizer.param_groups:
                    for value in group["params"]:
                        if id(value) in stated:
                            continue
                        if self._runtime.device.owns(value) and self._runtime.tracing.is_pending(value):
                            self._runtime.lazy.restate_dtype(value)

    def detach_new_grads(self) -> None:
        """Replaces new gradients by clones.

        Gradients of biases and of transposed weights are views. Their base, which no code can reach, would be an
        output of the graph in addition to the view. Cloning adds no operation to the executable.
        """
        with torch.no_grad():
            for leaf, before in self.leaves():
                grad = leaf.grad
                if grad is None or grad is before or not self._runtime.device.owns(grad):
                    continue
                if self._runtime.tracing.is_pending(grad):
                    leaf.grad = grad.clone()

    def free_later(self) -> None:
        """Clears the log of a step that was executed.

        The old values are freed after the next step was handed to the device. To free a buffer that the running step
        still uses would wait for that step, and the next one could not be traced meanwhile.
        """
        global _to_free
        _to_free = [value for entry in self._tensors.values() for value in (entry.value, entry.second_copy)]
        self.clear()

    def clear(self) -> None:
        """Removes all entries; the changes so far cannot be undone any more."""
        self._tensors.clear()
        self._leaves.clear()
        self._optimizers.clear()
        self._modules.clear()

    def free_grads(self) -> None:
        """Sets the gradients of all recorded parameters to None."""
        for leaf, _ in self.leaves():
            leaf.grad = None

    def merge_into(self, outer: UndoLog) -> None:
        """Adds the entries to the undo log of the enclosing step, except for what is recorded there already."""
        for key, entry in self._tensors.items():
            outer._tensors.setdefault(key, entry)
        for key, leaf in self._leaves.items():
            known = outer._leaves.get(key)
            if known is None or known.leaf() is None:
                outer._leaves[key] = leaf
        for key, optimizer in self._optimizers.items():
            outer._optimizers.setdefault(key, optimizer)
        for key, module in self._modules.items():
            outer._modules.setdefault(key, module)
        # Values that were pending when recorded belong to the enclosing step. References to them would make them
        # outputs of its graph.
        for key, entry in self._tensors.items():
            if entry.was_pending and outer._tensors.get(key) is entry:
                del outer._tensors[key]

    def undo(self, *, discard: bool) -> None:
        """Restores all recorded values.

        Args:
            discard: whether to discard the pending graph. False for a step inside a step: what the enclosing step has
                traced so far stays.
        """
        runtime = self._runtime
        with torch.no_grad():
            for item in self._tensors.values():
                if item.second_copy is not None:
                    runtime.values.rewrite(item.value, item.second_copy)
        changed = [
            item
            for item in self._tensors.values()
            # What has changed sides holds the value of a parameter from before a module was moved.
            if item.on_device == runtime.device.owns(item.tensor)
            and not (item.on_device and runtime.values.holds(item.tensor, item.value))
        ]
        sharing: list[torch.Tensor] = []
        if discard and runtime.tracing.pending_count():
            sharing = mark_discarded(
                runtime, [entry.tensor for entry in self._tensors.values() if runtime.device.owns(entry.tensor)]
            )
        if discard:
            runtime.tracing.discard_pending()
        for entry in self._optimizers.values():
            _restore_optimizer(entry)
        for module in self._modules.values():
            module.module._buffers.clear()
            module.module._buffers.update(module.buffers)
        for leaf, grad in self.leaves():
            leaf.grad = grad
        with torch.no_grad():
            restored = []
            for item in changed:
                if item.on_device:
                    runtime.values.restore(item.tensor, item.value)
                    restored.append(item.tensor)
                else:
                    item.tensor.copy_(item.value)
            for tensor in sharing:
                runtime.values.snapshot(tensor)
        # A value restored through a view (a bias's gradient is one) is a pending update of the view's base. All of
        # them are applied here: later, in eager mode, each would be an execution.
        if sum(runtime.tracing.is_pending(tensor) for tensor in restored) and discard:
            runtime.tracing.flush()


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


def own_buffers_for_update(undo_log: UndoLog, runtime: Runtime) -> list[torch.Tensor]:
    """Copies the tensors that share a buffer with those that the traced step updates. Called before it is executed.

    Args:
        undo_log: the step's.
        runtime: the runtime.

    Returns:
        The tensors that the step updates.
    """
    written, others = undo_log.pending_entries()
    copied = [
        entry.tensor for entry in others if not runtime.values.holds(entry.tensor, entry.value, entry.second_copy)
    ]
    buffers = runtime.shared_buffers if runtime.has_shared_buffers else None
    if buffers is not None and copied:
        # They became copies in this step, and share the buffer of the tensor they were copied from.
        buffers.give_own_buffers([entry.before_step for entry in written], copied)
    if buffers is not None and buffers.copies_made():
        unknown = [entry for entry in written if buffers.is_unknown(entry.tensor, entry.value)]
        if unknown and buffers.give_own_buffers([entry.before_step for entry in unknown]):
            buffers.free_for_results([entry.before_step for entry in unknown], [entry.tensor for entry in unknown])
    grads = [leaf.grad for leaf, before in undo_log.leaves() if leaf.grad is not None and leaf.grad is not before]
    return [*(entry.tensor for entry in written), *(grad for grad in grads if runtime.tracing.is_pending(grad))]


def note_updated(written: Sequence[torch.Tensor], runtime: Runtime) -> None:
    """The step is executed: what it wrote has buffers of its own.

    Args:
        written: as `own_buffers_for_update` returned it.
        runtime: the runtime.
    """
    if runtime.has_shared_buffers:
        runtime.shared_buffers.note_own_buffers(written)
        runtime.shared_buffers.note_separated()


# ---- what a discarded step has made -------------------------------------------------------------


class DiscardedTensor(torch.Tensor):
    """A tensor whose value was never computed, because its step was discarded. Any use raises.

    torch_xla itself would end the process when the value of such a tensor is read.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        raise DiscardedTensorError(
            f"{name}: this tensor was made in a step that was discarded (an exception, or Ctrl-C, ended it early), "
            "so it has no value. Use what the step made only after the step has ended normally."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return "<tensor of a discarded step>"


def mark_discarded(runtime: Runtime, kept: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Makes every use of a tensor without a value an error; called before the pending graph is discarded.

    Args:
        runtime: the runtime.
        kept: tensors whose values will be restored, and with them those of the tensors that share their memory.

    Returns:
        The tensors that share memory with `kept`. To be updated once those have their values.
    """
    tensors = [tensor for tensor in runtime.tracing.live_tensors() if not isinstance(tensor, DiscardedTensor)]
    lazy = runtime.lazy if runtime.has_lazy_tensors else None
    with torch._C.DisableTorchFunction():
        storages = {_storage(tensor) for tensor in kept}
        sharing = [tensor for tensor in tensors if torch._is_functional_tensor(tensor) and _storage(tensor) in storages]
        # Their inner tensors may be among the live ones; they are replaced when the outer ones are updated.
        inner = [] if lazy is None else list(map(lazy.inner, sharing))
        left = set(map(id, inner))
        without_value = [
            tensor
            for tensor in tensors
            if id(tensor) not in left and runtime.tracing.is_pending(tensor) and _storage(tensor) not in storages
        ]
        # After all were asked: a kernel in Python has seen a tensor's inner one, and with that the outer gets a value.
        for tensor in without_value:
            if lazy is not None:
                lazy.give_any_value(tensor)
            tensor.__class__ = DiscardedTensor
    return sharing


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
