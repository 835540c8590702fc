"""The private names of torch the core stands on."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.library import Library, get_kernel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from tests.isolation import isolated

_OPTIMIZERS = [
    "ASGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Muon",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
]


@pytest.mark.parametrize("name", _OPTIMIZERS)
def test_optimizers_initialise_a_group_apart_from_stepping(name: str) -> None:
    parameters = list(inspect.signature(getattr(torch.optim, name)._init_group).parameters)
    assert parameters[:2] == ["self", "group"]
    assert len(parameters) > 2


def test_function_modes_can_be_left_out_of_order() -> None:
    assert callable(torch.overrides._push_mode)
    assert callable(torch.overrides._pop_mode)

    class Mode(TorchFunctionMode):
        pass

    depth = torch.overrides._len_torch_function_stack()
    mode = Mode()
    mode.__enter__()
    assert torch.overrides._len_torch_function_stack() == depth + 1
    assert torch.overrides._pop_mode() is mode
    assert torch.overrides._len_torch_function_stack() == depth


def test_functionalization_calls_exist() -> None:
    for name in (
        "_from_functional_tensor",
        "_functionalize_replace",
        "_functionalize_commit_update",
        "_functionalize_mutation_counter",
    ):
        assert callable(getattr(torch, name))
    tensor = torch.ones(3)
    assert torch._C._storage_id(tensor) == torch._C._storage_id(tensor[1:]) != torch._C._storage_id(tensor.clone())


def test_optimizer_hooks_are_removable() -> None:
    for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook):
        register(lambda optimizer, args, kwargs: None).remove()


@isolated
def test_attention_hands_out_its_weights() -> None:
    schema = torch.ops.aten._scaled_dot_product_attention_math.default._schema
    assert [argument.name for argument in schema.arguments] == [
        "query",
        "key",
        "value",
        "attn_mask",
        "dropout_p",
        "is_causal",
        "dropout_mask",
        "scale",
        "enable_gqa",
    ]
    query, key, value = torch.randn(3, 2, 4, 5).unbind()
    attended, weights = torch.ops.aten._scaled_dot_product_attention_math(query, key, value)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4))
    torch.testing.assert_close(weights @ value, attended)


@isolated
def test_a_kernel_can_be_replaced_for_a_while() -> None:
    """Autograd calls it, too, and what was there before can be called meanwhile, and afterwards again."""
    stock = get_kernel("aten::sum.dim_IntList", "CPU")
    calls = []

    def kernel(keys: torch.DispatchKeySet, *args: object, **kwargs: object) -> torch.Tensor:
        calls.append(args)
        return stock.call_boxed(keys, *args, **kwargs)

    library = Library("aten", "IMPL")
    library.impl("sum.dim_IntList", kernel, "CPU", with_keyset=True)
    bias = torch.zeros(3, requires_grad=True)
    (torch.ones(4, 3) + bias).backward(torch.ones(4, 3))
    assert [tuple(args[0].shape) for args in calls] == [(4, 3)]
    assert bias.grad is not None
    assert bias.grad.tolist() == [4, 4, 4]
    assert "aten/sum.dim_IntList/CPU" in torch.library._impls
    library._destroy()
    assert "aten/sum.dim_IntList/CPU" not in torch.library._impls
    torch.ones(4, 3).sum(0)
    assert len(calls) == 1
