"""Each private name has a test; those of which nothing is relied upon but that they are there are listed here."""

from __future__ import annotations

import importlib
import operator

import pytest

from tests import private_apis

# Of these the packages rely on what the name says.
_THERE = (
    "lightning.fabric.connector._Connector.__init__.__code__",
    "lightning.fabric.strategies.registry._StrategyRegistry",
    "lightning.fabric.utilities.data._set_sampler_epoch",
    "lightning.fabric.utilities.data._update_dataloader",
    "lightning.fabric.utilities.types._Stateful",
    "lightning.pytorch.loops.fetchers._DataLoaderIterDataFetcher",
    "lightning.pytorch.plugins.io.wrapper._WrappingCheckpointIO",
    "lightning.pytorch.trainer.connectors.accelerator_connector._AcceleratorConnector.__init__.__code__",
    "torch.Tensor._make_wrapper_subclass",
    "torch._C.DisableTorchFunction",
    "torch._C.DisableTorchFunctionSubclass",
    "torch._C.TensorBase",
    "torch._C._autograd._saved_tensors_hooks_get_disabled_error_message",
    "torch._C._autograd._top_saved_tensors_default_hooks",
    "torch._C._functorch.peek_interpreter_stack",
    "torch._C._get_dispatch_stack_at",
    "torch._C._get_privateuse1_backend_name",
    "torch._C._len_torch_dispatch_stack",
    "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack",
    "torch._foreach_add",
    "torch._foreach_add_",
    "torch._foreach_copy_",
    "torch._foreach_div",
    "torch._foreach_maximum",
    "torch._foreach_mul",
    "torch._foreach_neg",
    "torch._foreach_norm",
    "torch._foreach_sqrt",
    "torch._foreach_sub",
    "torch._neg_view",
    "torch._ops.OpOverload",
    "torch._subclasses.fake_tensor.FakeTensor",
    "torch._subclasses.functional_tensor.FunctionalTensor",
    "torch._weight_norm",
    "torch.autograd.forward_ad._current_level",
    "torch.distributed._shard._utils.narrow_tensor_by_index",
    "torch.distributed.checkpoint._traverse.set_element",
    "torch.distributed.tensor.placement_types._StridedShard",
    "torch.nn.modules.batchnorm._BatchNorm",
    "torch.optim.optimizer._global_optimizer_post_hooks.values",
    "torch.optim.optimizer._global_optimizer_pre_hooks.values",
    "torch.optim.optimizer._global_optimizer_post_hooks",
    "torch.optim.optimizer._global_optimizer_pre_hooks",
    "torch.overrides._get_current_function_mode_stack",
    "torch.utils._device.DeviceContext",
    "torch.utils._python_dispatch._disable_current_modes",
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
    "torch.utils._pytree",
    "torch.utils._pytree.TreeSpec",
    "torch.utils._pytree.tree_flatten",
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch.utils._pytree.tree_leaves",
    "torch.utils._pytree.tree_map",
    "torch.utils._pytree.tree_map_only",
    "torch.utils._pytree.tree_unflatten",
    "transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS._local_mapping",
)


def _resolved(name: str) -> object:
    """What a name stands for; the longest part of it that is a module is imported."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        return operator.attrgetter(".".join(parts[length:]))(module) if length < len(parts) else module
    raise ModuleNotFoundError(name)


# Those of torch_tpu are looked for where it is installed: `tests/torch_tpu`.
@pytest.mark.parametrize("name", [name for name in private_apis.used() if not name.startswith("torch_tpu.")])
def test_it_is_there(name: str) -> None:
    assert _resolved(name) is not None or name == "torch.autograd.forward_ad._current_level"


def test_each_has_a_test() -> None:
    used = private_apis.used()
    assert [name for name in used if name not in _THERE and not private_apis.pinned(name)] == []
    assert [name for name in _THERE if name not in used] == []


def test_the_table_is_up_to_date() -> None:
    """Otherwise run `python -m tests.private_apis`."""
    assert private_apis.TABLE.read_text(encoding="utf-8") == private_apis.table()
