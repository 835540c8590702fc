"""What code of libraries calls of the user's: forward passes, functions that modules hold, what a class overrides."""

from __future__ import annotations

import ast
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from xla_adapters.replay.lookups import Frame, Lookups
from xla_adapters.replay.outside import FRESH, Method, Value
from xla_adapters.replay.read_facts import ReadFact
from xla_adapters.replay.sources import is_own_code

# Methods of modules and models that no forward pass calls: what they do is done before a step, or behind it.
_OUTSIDE = (
    "__init__ __repr__ __str__ __setstate__ __getstate__ __deepcopy__ __reduce__ __reduce_ex__ __del__ __dir__ "
    "extra_repr _get_name state_dict load_state_dict _load_from_state_dict _save_to_state_dict get_extra_state "
    "set_extra_state reset_parameters _reset_parameters _init_weights init_weights initialize_weights post_init "
    "from_pretrained _from_config save_pretrained push_to_hub can_generate generate prepare_inputs_for_generation "
    "resize_token_embeddings _resize_token_embeddings resize_position_embeddings set_input_embeddings "
    "set_output_embeddings tie_weights gradient_checkpointing_enable gradient_checkpointing_disable "
    "num_parameters floating_point_ops enable_input_require_grads print_trainable_parameters "
    "to cpu cuda half float double bfloat16 type _apply share_memory requires_grad_"
)
_OUTSIDE_STEPS = frozenset(_OUTSIDE.split())


class LibraryCalls(Lookups):
    """Follows the user's code where a library calls it."""

    def examine(
        self, function: Callable[..., Any], arguments: Sequence[Value] = (), options: dict[str, Value] | None = None
    ) -> Value:
        """Follows a function or bound method."""
        raise NotImplementedError

    def examine_module(self, module: torch.nn.Module, arguments: Sequence[Value] = (), options: Any = None) -> Value:
        """Follows the forward passes of a module and of those below it that are not known."""
        if is_own_code(type(module).__call__):
            return self._function(type(module).__call__, module, [Value((module,)), *arguments], options or {})
        if not self._is_known_forward(module):
            # One set on the object itself, which the facts of modules may leave out.
            forward = self._attribute_of(module, "forward", ast.Name("forward"), _nowhere(module))
            (method,) = forward.outside
            if isinstance(method, Method):
                return self._function(method.function, module, [Value((module,)), *arguments], options or {})
            return self.examine(method, arguments, options)
        self._parts(module)
        return FRESH

    def _parts(self, module: torch.nn.Module) -> None:
        """Follows what a library's code calls of the user's: modules below, functions they hold, what they override."""
        for part in module.modules():
            if part is not module and not self._is_known_forward(part):
                self.examine_module(part)
                continue
            for name, value in vars(part).items():
                if (
                    name != "forward"
                    and isinstance(value, (types.FunctionType, types.MethodType))
                    and is_own_code(value)
                ):
                    self._read(part, name, value, name, ast.Name(name), _nowhere(part))
                    self.examine(value)
            for cls in type(part).__mro__:
                if not self._knowledge.covers(cls):
                    for name, member in vars(cls).items():
                        overrides = any(name in vars(base) for base in cls.__mro__[1:] if self._knowledge.covers(base))
                        if overrides and name not in _OUTSIDE_STEPS and isinstance(member, types.FunctionType):
                            self._function(member, part, [Value((part,))], {})

    def _is_known_forward(self, module: torch.nn.Module) -> bool:
        """Whether a library's code is what is called."""
        own = vars(module).get("forward")
        if own is not None and is_own_code(own):
            return False
        return not is_own_code(type(module).forward) and not is_own_code(type(module).__call__)

    def _differentiated(self, cls: Any, arguments: list[Value]) -> Value:
        """A function of autograd's: its passes are followed."""
        found = FRESH
        for name in ("forward", "setup_context", "backward"):
            for place, base in enumerate(cls.__mro__):
                member = vars(base).get(name)
                if member is not None:
                    for nearer in cls.__mro__[:place]:
                        self._note_absence(nearer, name)
                    if not self._knowledge.covers(base):
                        self.facts.append(ReadFact.of(base, name, member, f"{base.__name__}.{name}"))
                        # The context is the step's own.
                        given = [FRESH, *arguments] if name == "forward" else []
                        found = found.join(self._function(getattr(member, "__func__", member), None, given, {}))
                    break
        return found


def _nowhere(owner: Any) -> Frame:
    """Where no line of code is: what a library does."""
    return Frame(type(owner), owner, type(owner).__qualname__, 0, {})
