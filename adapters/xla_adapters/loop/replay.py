"""What the trainers' replay rules have in common: the user's code in a step, its batch, and its optimizers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._pytree import tree_flatten, tree_map_only

from xla_adapters.replay.call_spec import CallSpec
from xla_adapters.replay.safety import Analysis, FrameworkModel
from xla_adapters.replay.step_program import StepProgram
from xla_adapters.replay.tracked_code import TrackedCode
from xla_adapters.utils.nested_values import as_dicts


class StepCode:
    """The user's code in one kind of step, and whether a replay may leave it out.

    The user may replace its functions at any time. Then everything is analysed again, and what was recorded before is
    not used any more.

    Args:
        framework: describes the framework around the code.
        functions: returns the functions that the step calls now, by name, from the result of `parts`.
        examine: passes these functions to an analysis.
        promised: returns the functions that the user promises to be safe, None if there is no promise.
        parts: finds the modules with functions that may be replaced. Called again when the code has changed.
    """

    def __init__(
        self,
        framework: FrameworkModel,
        functions: Callable[[Any], Mapping[str, Any]],
        examine: Callable[[Mapping[str, Any], Analysis], None],
        *,
        promised: Callable[[], Sequence[Any] | None],
        parts: Callable[[], Any],
    ) -> None:
        self._framework = framework
        self._find_functions = functions
        self._examine = examine
        self._find_promised = promised
        self._find_parts = parts
        self._parts: Any = None
        # References, so that no new function can get the id of one of these.
        self._functions: Mapping[str, Any] = {}
        self._code: TrackedCode | None = None

    def present(self) -> TrackedCode:
        """The analysis of the code as it is now."""
        if self._code is not None and _are_the_same(self._find_functions(self._parts), self._functions):
            generation = self._code.generation
            self._code.follow()
            if self._code.generation != generation:
                self._remember_functions()
            return self._code
        self._remember_functions()
        examine = functools.partial(self._examine, self._functions)
        self._code = TrackedCode(self._framework, examine, promised=self._find_promised())
        return self._code

    def _remember_functions(self) -> None:
        self._parts = self._find_parts()
        self._functions = self._find_functions(self._parts)


def key_of(code: TrackedCode) -> tuple[Hashable, ...]:
    """A key that differs for different code, and for the same code after a change. Holds a reference to the code."""
    return code, code.generation


def _are_the_same(present: Mapping[str, Any], noted: Mapping[str, Any]) -> bool:
    return present.keys() == noted.keys() and all(_is_same(value, noted[name]) for name, value in present.items())


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, list):
        return bool(one == other)
    # Each access to a method returns a new object.
    function = getattr(one, "__func__", None)
    return function is not None and function is getattr(other, "__func__", None) and one.__self__ is other.__self__


def batch_of(batch: Any) -> tuple[list[torch.Tensor], tuple[Hashable, ...]]:
    """The tensors of a batch, and a key of its structure, of their shapes, and of its other values."""
    leaves, spec = tree_flatten(as_dicts(batch))
    shapes = tuple((leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)], (str(spec), shapes)


def copies(results: Any, *, of_others_than: Iterable[torch.Tensor] = ()) -> Any:
    """The results of a step, with a tensor of its own for each.

    A linear layer returns a view (of a matrix product with fewer dimensions), whose base would be one more value of the
    graph, a hidden one. A step with hidden values is never replayed.

    Args:
        results: of the step, while it is open.
        of_others_than: tensors that stay themselves.
    """
    made = {id(tensor): tensor for tensor in of_others_than}

    def own(tensor: torch.Tensor) -> torch.Tensor:
        # A tensor that is there twice stays one.
        return made[id(tensor)] if id(tensor) in made else made.setdefault(id(tensor), tensor.clone())

    return tree_map_only(torch.Tensor, own, results)


def optimizer_reason(optimizer: Any) -> str | None:
    """Python code in an update besides the `step` of the optimizer's class, which a replay would leave out."""
    for hook in (*_global_optimizer_pre_hooks.values(), *_global_optimizer_post_hooks.values()):
        # While a step is open, the core has hooks of its own there.
        if not getattr(hook, "__module__", "").startswith("xla_adapters."):
            return "all optimizers have a hook, whose Python a replay would leave out"
    for wrapped in _each_wrapped(optimizer):
        kind, step = type(wrapped), vars(wrapped).get("step")
        if getattr(step, "_wrapped_by_lr_sched", False):
            step = step.__wrapped__ if step.__wrapped__ is not kind.step else None
        if step is not None:
            return f"the method step of {kind.__name__} was replaced"
        if any(getattr(wrapped, hooks, None) for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")):
            return f"{kind.__name__} has a hook, whose Python a replay would leave out"
    return None


def _each_wrapped(optimizer: Any) -> Iterator[Any]:
    """An optimizer and, as accelerate wraps them, those inside it."""
    while optimizer is not None:
        yield optimizer
        optimizer = getattr(optimizer, "optimizer", None)


def allowed(program: StepProgram, description: CallSpec | str) -> CallSpec | None:
    """The description of a step; None, with the reason noted in the program, if it must not be replayed."""
    if isinstance(description, CallSpec):
        return description
    program.refuse_replay(description)
    return None
