"""`computes_only`: whether a hook only computes with the tensors it is given, so that a replay may leave it out."""

from __future__ import annotations

import sys
import types

# Hooks of libraries that were read: a trace has all that they do. By module and by the name of their code.
_OF_LIBRARIES = {
    # Has the embeddings require gradients, for activation checkpointing and for adapters.
    ("transformers.modeling_utils", "PreTrainedModel.enable_input_require_grads.<locals>.make_inputs_require_grads"),
    # Adds an output to a list that the model's forward makes and returns.
    ("transformers.utils.output_capturing", "install_output_capuring_hook.<locals>.output_capturing_hook"),
}


def computes_only(hook: object) -> bool:
    """Whether a hook is marked as such by this project, or one of a library that is known to be such."""
    if getattr(hook, "only_tensors", False):
        return True
    if not isinstance(hook, types.FunctionType):
        return False
    module = sys.modules.get(hook.__module__)
    # The name of the code: decorators copy that of the function.
    known = (hook.__module__, hook.__code__.co_qualname) in _OF_LIBRARIES
    return known and module is not None and hook.__globals__ is vars(module)
