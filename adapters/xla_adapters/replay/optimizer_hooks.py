"""Finds hooks on an optimizer's `step`, and the `step` without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer, lr_scheduler
from torch.optim import optimizer as torch_optimizer


def addition_to_step(optimizer: Optimizer) -> str | None:
    """A hook or wrapper on an optimizer's step, whose Python a replay would skip, in words; None if there is none."""
    name, own = type(optimizer).__name__, vars(optimizer)
    for hooks in (
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
        own.get("_optimizer_step_pre_hooks", {}),
        own.get("_optimizer_step_post_hooks", {}),
    ):
        for hook in hooks.values():
            if not (getattr(hook, "__module__", None) or "").startswith("xla_adapters"):
                return f"the step of {name} has a hook ({getattr(hook, '__qualname__', type(hook).__name__)})"
    step = own.get("step")
    if step is not None and not _is_of_scheduler(step, type(optimizer)):
        return f"the step of {name} was replaced by another one"
    return None


def _is_of_scheduler(step: Any, kind: type) -> bool:
    """Whether this is the wrapper by which learning rate schedulers count calls of `step`."""
    code = getattr(step, "__code__", None)
    return (
        code is not None
        and code.co_filename == lr_scheduler.__file__
        and getattr(step, "__wrapped__", None) is _defined(kind, "step")
    )


def _defined(kind: type, name: str) -> Any:
    """The member of this name in a class or its bases, as in their `__dict__`; None if there is none."""
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)


def step_of(optimizer: Optimizer) -> Callable[[Optimizer], object]:
    """The `step` of an optimizer's class, without the wrapper by which torch calls hooks."""
    step: Any = type(optimizer).step
    # A wrapper of another library copies torch's marks; only the file of its code tells whose it is.
    is_torchs = getattr(step, "hooked", False) and step.__code__.co_filename == torch_optimizer.__file__
    return step.__wrapped__ if is_torchs else step  # type: ignore[no-any-return]
