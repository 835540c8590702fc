"""The functions that a step's code may call: functions without side effects.

A step that calls anything else is traced, unless the source of the function can be followed.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import math
import operator
import types
from typing import Any

import torch
from torch import nn
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop

from xla_adapters.replay.safety.trusted import is_trusted, is_users_class

# They return the objects that they are given, or containers of them.
HOLDING_BUILTINS = (enumerate, zip, reversed, list, tuple, set, dict, frozenset)
_BUILTINS = (
    *(abs, all, any, bool, divmod, float, int, len, max, min, pow, range, round, slice, sorted, str, sum),
    *(isinstance, issubclass, complex),
)
CALLABLE_BUILTINS = frozenset({*HOLDING_BUILTINS, *_BUILTINS, super, getattr})
_CREATION = (
    "arange as_tensor empty eye finfo full iinfo is_grad_enabled is_tensor linspace logspace ones rand randint randn "
    "randperm scalar_tensor tensor zeros Size device is_floating_point is_complex multinomial normal"
)
# Modules whose functions compute with tensors.
_NAMESPACES_TEXT = (
    "torch.nn.functional torch.functional torch.special torch.linalg torch.fft torch._tensor torch._VF "
    "torch.nn.init torch.nn.utils.clip_grad torch._C._nn torch._C._fft torch._C._linalg torch._C._special"
)
_NAMESPACES = frozenset(_NAMESPACES_TEXT.split())
# Contexts that only switch modes, until the end of the block.
CONTEXTS = (
    *(torch.no_grad, torch.enable_grad, torch.set_grad_enabled, torch.inference_mode),
    *(torch.autocast, torch.amp.autocast_mode.autocast, torch.cuda.amp.autocast, contextlib.nullcontext),
)
# Containers of what they are given.
RECORDS = (types.SimpleNamespace, collections.OrderedDict, torch.Size)
# Optimizers that store nothing on the host but their groups and state.
OPTIMIZERS = (ASGD, NAdam, RAdam, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, RMSprop, Rprop)

# Methods of modules that no step calls, or whose calls have no effect on the graph.
_OUTSIDE_STEPS_TEXT = (
    "__init__ __repr__ __str__ __setstate__ __getstate__ __deepcopy__ __reduce__ __reduce_ex__ __del__ __dir__ "
    "__init_subclass__ __class_getitem__ __len__ __iter__ __getitem__ extra_repr _get_name state_dict "
    "load_state_dict _load_from_state_dict _save_to_state_dict get_extra_state set_extra_state reset_parameters "
    "_reset_parameters _init_weights init_weights initialize_weights post_init from_pretrained _from_config "
    "save_pretrained push_to_hub can_generate generate prepare_inputs_for_generation resize_token_embeddings "
    "_resize_token_embeddings resize_position_embeddings set_input_embeddings set_output_embeddings "
    "get_input_embeddings get_output_embeddings tie_weights gradient_checkpointing_enable "
    "gradient_checkpointing_disable num_parameters floating_point_ops enable_input_require_grads "
    "print_trainable_parameters to cpu cuda half float double bfloat16 type _apply share_memory forward"
)
OUTSIDE_STEPS = frozenset(_OUTSIDE_STEPS_TEXT.split())

# Methods of tensors, strings and containers, which call none of their arguments.
_NOT_OF_TENSORS = (
    "register_hook register_post_accumulate_grad_hook apply_ map_ map2_ share_memory_ set_ resize_ resize_as_ storage "
    "untyped_storage data_ptr numpy tolist item as_subclass module_load register_multi_grad_hook retain_grad"
)
_READING_METHODS_TEXT = "get items keys values index count copy union intersection difference"
READING_METHODS = frozenset(_READING_METHODS_TEXT.split())
_CHANGING_METHODS_TEXT = "append extend insert remove pop popitem clear update setdefault sort reverse add discard"
CHANGING_METHODS = frozenset(_CHANGING_METHODS_TEXT.split())
_OF_STRINGS = "format join split strip lower upper startswith endswith replace removeprefix removesuffix"
_OF_TENSORS = {name for name in dir(torch.Tensor) if callable(getattr(torch.Tensor, name)) and name[0] != "_"}
METHODS = (_OF_TENSORS - set(_NOT_OF_TENSORS.split())) | READING_METHODS | CHANGING_METHODS | set(_OF_STRINGS.split())


def _functions_of_torch() -> list[Any]:
    of_tensors = set(map(id, vars(torch.Tensor).values())) | set(map(id, vars(torch._C.TensorBase).values()))
    overridable = torch.overrides.get_overridable_functions().values()
    return [function for group in overridable for function in group if id(function) not in of_tensors]


# Listed on import: torch cannot list its functions while a test has replaced one of them by a mock.
_FUNCTIONS_OF_TORCH = _functions_of_torch()


@functools.cache
def _pure() -> frozenset[int]:
    found: list[Any] = [*_FUNCTIONS_OF_TORCH, *_BUILTINS]
    found += [getattr(torch, name) for name in _CREATION.split()]
    found += [value for value in vars(math).values() if callable(value)]
    found += [
        value
        for name, value in vars(operator).items()
        if name in ("add", "sub", "mul", "matmul", "truediv", "neg", "pow")
    ]
    found += [value for name, value in vars(torch).items() if name.startswith("_foreach_")]
    # torch_xla may have replaced these.
    found += [nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_, torch.autograd.grad]
    found += [nn.Transformer.generate_square_subsequent_mask, *RECORDS]
    return frozenset(map(id, (*found, *CONTEXTS)))


def is_allowed(function: Any) -> bool:
    """Whether a function or class is known to have no side effect, and to call none of its arguments."""
    if isinstance(function, types.FunctionType) and not is_trusted(function):
        # It may have replaced a function of a library.
        return False
    if isinstance(function, type):
        is_record = issubclass(function, dict) and hasattr(function, "__dataclass_fields__")
        return (
            id(function) in _pure()
            or (issubclass(function, BaseException) and not is_users_class(function))
            or (is_record and is_trusted(function))
        )
    kinds = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType)
    is_of_namespace = isinstance(function, kinds) and getattr(function, "__module__", None) in _NAMESPACES
    return id(function) in _pure() or is_of_namespace


def is_torch_module(cls: Any) -> bool:
    """Whether it is a class of torch's own modules (a loss, say), which a step may make and call."""
    return isinstance(cls, type) and issubclass(cls, nn.Module) and cls.__module__.startswith("torch.nn.modules.")
