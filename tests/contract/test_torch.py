"""The private names of torch the core stands on."""

from __future__ import annotations

import gc
import inspect
import io
import pickle
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import thread as pools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch._decomp
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.utils.checkpoint
import torchmetrics.functional
import transformers.modeling_utils
from safetensors.torch import save_file
from torch import nn
from torch._C import _functorch
from torch._functorch import eager_transforms, vmap
from torch.distributed import _functional_collectives
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.library import Library, get_kernel
from torch.nn.utils import parametrize
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from tests.isolation import isolated
from xla_adapters.utils.patching import replaced
from xla_adapters.utils.torch_modes import (
    _OF_HOOKS,
    function_called,
    in_transform,
    is_of_torch,
    results_of_transforms,
    unused_in_steps,
    unwrapped,
)

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


def test_inference_mode_enters_a_context_that_its_exit_leaves() -> None:
    assert "self._inference_mode_context = " in inspect.getsource(torch.inference_mode.__enter__)
    assert "self._inference_mode_context.__exit__(" in inspect.getsource(torch.inference_mode.__exit__)
    assert torch.inference_mode(False).mode is False


def test_modes_of_a_thread_can_be_read_and_set() -> None:
    assert torch.compiler._is_compiling_flag is False
    with torch.autograd.set_multithreading_enabled(False):
        assert torch._C._is_multithreading_enabled() is False
    state = torch._C._get_torch_function_state()
    with torch._C.DisableTorchFunction():
        assert torch._C._get_torch_function_state() != state
        torch._C._set_torch_function_state(state)
        assert torch._C._is_torch_function_enabled()
    assert torch._C._get_torch_function_state() == state


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


def test_functions_that_compute_updates_have_these_arguments() -> None:
    """`xla_adapters.tracing.list_updates` has functions of its own in their places."""
    adam = inspect.signature(sys.modules[torch.optim.Adam.__module__]._single_tensor_adam).parameters
    lists = ("params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "state_steps")
    assert tuple(adam)[:6] == lists
    named = (
        "grad_scale found_inf amsgrad has_complex beta1 beta2 lr weight_decay eps maximize capturable differentiable"
    )
    assert set(adam) == {*lists, *named.split(), "decoupled_weight_decay"}
    sgd = inspect.signature(sys.modules[torch.optim.SGD.__module__]._single_tensor_sgd).parameters
    assert tuple(sgd)[:3] == ("params", "grads", "momentum_buffer_list")
    named = "grad_scale found_inf weight_decay momentum lr dampening nesterov maximize has_sparse_grad"
    assert set(sgd) == {*tuple(sgd)[:3], *named.split()}


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


def test_only_transformers_of_torch_compare_masks() -> None:
    library: Any = nn.modules.transformer
    assert list(inspect.signature(library._detect_is_causal_mask).parameters) == ["mask", "is_causal", "size"]
    for user, masks in ((nn.TransformerEncoder, "mask, is_causal"), (nn.TransformerDecoder, "tgt_mask, tgt_is_causal")):
        assert f"_detect_is_causal_mask({masks}, seq_len)" in inspect.getsource(user.forward)


def test_parametrizations_give_parameters_another_memory_by_one_function() -> None:
    assert list(inspect.signature(parametrize._maybe_set).parameters) == ["dest", "src"]
    source = inspect.getsource(parametrize)
    assert source.count(".set_(") == 1
    assert source.count("    _maybe_set(") == 5


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


@isolated
def test_what_the_decorated_checkpoint_function_calls_can_be_replaced() -> None:
    module = torch.utils.checkpoint
    function = module.checkpoint.__wrapped__  # type: ignore[attr-defined]
    with replaced(function, "__dynamo_disable", lambda *args, **kwargs: (args, kwargs)):
        assert module.checkpoint(1, 2, three=3) == ((1, 2), {"three": 3})
    weight = torch.ones(2, requires_grad=True)
    module.checkpoint(torch.square, weight, use_reentrant=False).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [2, 2]


@isolated
def test_torch_has_these_decompositions() -> None:
    table = torch._decomp.decomposition_table
    values = torch.randn(2, 6, requires_grad=True)
    (expected,) = torch.autograd.grad(torch.nn.functional.glu(values).square().sum(), values)
    found = table[torch.ops.aten.glu_backward.default](2 * torch.nn.functional.glu(values), values, -1)
    torch.testing.assert_close(found, expected)
    image, grid = torch.randn(1, 2, 3, 4), torch.rand(1, 2, 2, 2)
    torch.testing.assert_close(
        table[torch.ops.aten.grid_sampler_2d.default](image, grid, 0, 0, False),
        torch.ops.aten.grid_sampler_2d(image, grid, 0, 0, False),
    )


def test_autocast_can_be_left_out_below_a_kernel() -> None:
    weight = torch.ones(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (weight @ weight).dtype is torch.bfloat16
        with torch._C._DisableAutocast():
            assert (weight @ weight).dtype is torch.float32
        assert (weight @ weight).dtype is torch.bfloat16


def test_activation_checkpointing_asks_these_for_a_device_module() -> None:
    module = torch.utils.checkpoint
    assert list(inspect.signature(module._checkpoint_without_reentrant_generator).parameters) == [
        "fn",
        "preserve_rng_state",
        "context_fn",
        "determinism_check",
        "debug",
        "early_stop",
        "args",
        "kwargs",
    ]
    assert list(inspect.signature(module.CheckpointFunction.forward).parameters) == [
        "ctx",
        "run_function",
        "preserve_rng_state",
        "args",
    ]
    for user in (module._checkpoint_without_reentrant_generator, module.CheckpointFunction.forward):
        assert "_infer_device_type(*args)" in inspect.getsource(user)
    # What torch asks of that of the CPU: nothing has been initialised.
    assert not getattr(torch.cpu, "_initialized", False)


@isolated
def test_the_node_that_failed_is_found_by_calling_nodes_again() -> None:
    """What the line of a refused backward stands on: numbers of nodes, and the frame that calls the engine."""
    x = torch.ones(3, requires_grad=True)
    before = torch._C._autograd._get_sequence_nr()
    product = x * 2
    middle = torch._C._autograd._get_sequence_nr()
    result = product.sin()
    assert (before, middle) == (product.grad_fn._sequence_nr(), result.grad_fn._sequence_nr())
    assert torch._C._autograd._get_sequence_nr() == middle + 1
    (form,) = result.grad_fn._input_metadata
    assert (tuple(form.shape), form.dtype, form.device) == ((3,), torch.float32, torch.device("cpu"))
    order: list[str] = []
    product.grad_fn.register_hook(lambda *_: order.append("product"))
    result.grad_fn.register_hook(lambda *_: order.append("result"))
    loss = result.sum()
    product.grad_fn.register_prehook(lambda gradients: 1 / 0)
    with pytest.raises(ZeroDivisionError) as raised:
        loss.backward()
    assert order == ["result"]
    frames = [entry.frame for entry in raised.traceback if entry.name == "_engine_run_backward"]
    assert [output is loss for output in frames[0].f_locals["t_outputs"]] == [True]
    # Of a node that ran, what it had saved is gone; one that did not run can be called, which does not change it.
    with pytest.raises(RuntimeError, match="second time"):
        result.grad_fn(torch.ones(3))
    assert torch.equal(product.grad_fn(torch.ones(3))[0], torch.full((3,), 2.0))
    assert x.grad is None
    assert x.expand(3).grad_fn.next_functions[0][0].name() == "torch::autograd::AccumulateGrad"


@isolated
def test_a_write_that_a_backward_does_not_see() -> None:
    """`torch.autograd._unsafe_preserve_version_counter`."""
    weight, factor = torch.ones(2, requires_grad=True), torch.ones(2)
    product = weight * factor
    with torch.autograd._unsafe_preserve_version_counter((factor,)):  # type: ignore[attr-defined]
        factor.mul_(2)
    product.sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [2.0, 2.0]


class _Doubled(nn.Module):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values * 2


@isolated
@pytest.mark.parametrize("module", [_Doubled(), nn.Sequential(_Doubled())], ids=["class", "container"])
def test_what_torch_compile_makes_of_a_module(module: nn.Module) -> None:
    made: Any = torch.compile(module, backend="eager")
    assert made._orig_mod is module
    unused = unused_in_steps(made)
    assert unused == {"dynamo_ctx", "get_compiler_config", "_torchdynamo_orig_callable", "forward"}
    assert unused <= vars(made).keys()
    assert unused_in_steps(module) == frozenset()
    handle = nn.modules.module.register_module_forward_hook(lambda *args: None)
    with pytest.warns(UserWarning, match=_OF_HOOKS):
        assert made(torch.ones(2)).tolist() == [2, 2]
    handle.remove()
    made.forward = module.forward
    assert unused_in_steps(made) == unused - {"forward"}


def test_grouped_products() -> None:
    """`torch._grouped_mm`, and the operator of transformers that stands for it."""
    assert "offs" in str(torch.ops.aten._grouped_mm.default._schema)
    assert callable(torch._grouped_mm)


def test_each_seed_is_passed_on_to_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(torch.random, "_seed_custom_device", seeds.append)
    torch.manual_seed(3)
    torch.random.manual_seed(-3)
    assert seeds == [3, -3]
    torch.seed()
    assert seeds[2] == torch.initial_seed()


def test_distributions_ask_whether_all_is_true(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(torch, "_is_all_true", lambda valid: asked.append(bool(valid.all())) or True)
    torch.distributions.Normal(torch.zeros(2), -torch.ones(2)).log_prob(torch.zeros(2))
    assert asked == [True, False, True]


def test_an_encoder_asks_whether_a_mask_is_left_aligned() -> None:
    padded = torch.zeros(2, 3, dtype=torch.bool)
    padded[1, 0] = True
    assert not torch._nested_tensor_from_mask_left_aligned(torch.ones(2, 3, 4), padded.logical_not())
    source = inspect.getsource(torch.nn.TransformerEncoder.forward)
    assert "not torch._nested_tensor_from_mask_left_aligned(" in source


# ---- function transforms ----------------------------------------------------------------------------


@isolated
def test_a_wrapped_tensor_is_opened_and_a_result_is_told() -> None:
    """`torch._C._functorch.is_functorch_wrapped_tensor`, `torch._C._functorch.get_unwrapped`, and
    `torch._C._are_functorch_transforms_active`; `_remove_batch_dim` of `torch._functorch.vmap` and
    `_unwrap_for_grad` of `torch._functorch.eager_transforms` end a transform."""
    value = torch.arange(6.0).reshape(2, 3)
    seen: list[bool] = []

    def total(row: torch.Tensor) -> torch.Tensor:
        assert _functorch.is_functorch_wrapped_tensor(row)
        seen.append(in_transform())
        assert unwrapped(row).data_ptr() == _functorch.get_unwrapped(row).data_ptr() == value.data_ptr()
        return row.sum()

    told: list[torch.Tensor] = []
    ends = (vmap._remove_batch_dim, eager_transforms._unwrap_for_grad)  # type: ignore[attr-defined]
    with results_of_transforms(told.append):
        sums = torch.func.vmap(total)(value)
        slope = torch.func.grad(total)(value)
    assert (vmap._remove_batch_dim, eager_transforms._unwrap_for_grad) == ends  # type: ignore[attr-defined]
    assert all(any(tensor is result for tensor in told) for result in (sums, slope))
    assert seen == [True, True]
    assert not in_transform()
    assert unwrapped(value) is value


@isolated
def test_what_is_made_with_transforms_off_is_not_wrapped() -> None:
    """`torch._C._DisableFuncTorch`."""

    def wrapped(value: torch.Tensor) -> torch.Tensor:
        with torch._C._DisableFuncTorch():
            assert not _functorch.is_functorch_wrapped_tensor(torch.ones(2).clone())
        return value.sum()

    torch.func.grad(wrapped)(torch.ones(2))


# ---- linearization ----------------------------------------------------------------------------------


def test_it_calls_the_tracer_through_this_function(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def disallow(function: Callable[..., Any]) -> Any:
        asked.append(function)
        if function is not eager_transforms.make_fx:
            return function

        def trace(tangents_of: Callable[..., Any]) -> Callable[..., Any]:
            graph = torch.fx.Graph()
            graph.output(graph.call_function(lambda tangent: [tangents_of((tangent,))], (graph.placeholder("t"),)))
            return lambda tangents: torch.fx.GraphModule({}, graph)

        return trace

    monkeypatch.setattr(eager_transforms, "lazy_dynamo_disallow", disallow)
    value, tangent_of = torch.func.linearize(torch.square, torch.full((2,), 3.0))
    assert asked == [eager_transforms.make_fx, eager_transforms.const_fold.split_const_subgraphs]
    assert value.tolist() == [9.0, 9.0]
    assert tangent_of(torch.ones(2)).tolist() == [6.0, 6.0]


# ---- checkpoints ------------------------------------------------------------------------------------


def test_private_names_of_torch_are_there() -> None:
    assert list(inspect.signature(filesystem._write_item).parameters) == [
        "transforms",
        "stream",
        "data",
        "write_item",
        "storage_key",
        "serialization_format",
    ]
    assert hasattr(filesystem.FileSystemReader, "_slice_file")
    assert hasattr(DefaultSavePlanner, "lookup_object")
    assert transformers.modeling_utils.safe_save_file is save_file
    assert transformers.modeling_utils.remove_tied_weights_from_state_dict


@isolated
def test_nested_state_is_named_by_its_keys() -> None:
    flat, paths = flatten_state_dict({"model": {"layer.weight": torch.ones(1)}, "epoch": 3})
    assert list(flat) == ["model.layer.weight", "epoch"]
    assert paths["model.layer.weight"] == ("model", "layer.weight")


@isolated
def test_a_saved_tensor_stays_in_memory_and_a_loaded_one_does_not(tmp_path: Path) -> None:
    """Why copies are freed when they are written, and not when they are read."""
    gc.disable()
    tensor, buffer = torch.ones(1000), io.BytesIO()
    saved = weakref.ref(tensor.untyped_storage())
    torch.save(tensor, buffer)
    del tensor
    assert saved() is not None
    buffer.seek(0)
    tensor = torch.load(buffer, weights_only=True)
    loaded = weakref.ref(tensor.untyped_storage())
    assert loaded() is not None
    del tensor
    assert loaded() is None


def test_threads_can_be_waited_for_before_pools_end() -> None:
    """The pools of concurrent.futures end in a function registered so; of two the one registered later is first."""
    assert callable(threading._register_atexit)  # type: ignore[attr-defined]
    assert "threading._register_atexit(_python_exit)" in inspect.getsource(pools)
    assert "_threading_atexits" in inspect.getsource(threading._shutdown)  # type: ignore[attr-defined]


def test_a_failed_save_is_no_exception() -> None:
    """It must be named where it is caught."""
    assert not issubclass(CheckpointException, Exception)


class _Names(pickle.Unpickler):
    """Notes what a pickle names."""

    named: set[str]

    def find_class(self, module: str, name: str) -> Any:
        self.named.add(f"{module}.{name}")
        return super().find_class(module, name)


@isolated
def test_what_a_sharded_checkpoint_is_described_by(tmp_path: Path) -> None:
    state = {"a": torch.ones(2), "b": torch.ones(1, dtype=torch.float8_e4m3fn), "c": {"d": [1, "e"]}}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    with (tmp_path / ".metadata").open("rb") as file:
        reader = _Names(file)
        reader.named = set()
        reader.load()
    place = "torch.distributed.checkpoint"
    kinds = ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "MetadataIndex")
    own = (*kinds, "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING")
    torchs = ("Size", "float32", "float8_e4m3fn", "serialization._get_layout")
    assert reader.named == {
        *(f"{place}.metadata.{name}" for name in own),
        *(f"torch.{name}" for name in torchs),
        f"{place}.filesystem._StorageInfo",
        "pathlib.PosixPath",
    }


def test_torch_says_what_it_refuses() -> None:
    stream = io.BytesIO()
    torch.save({"a": gc.collect}, stream)
    stream.seek(0)
    with pytest.raises(pickle.UnpicklingError, match=r"WeightsUnpickler error: .*GLOBAL gc\.collect was not"):
        torch.load(stream, weights_only=True)
    # What the user sees of the refusal.
    with pytest.raises(pickle.UnpicklingError, match=r"WeightsUnpickler error:\s+Unsupported"):
        torch.load(io.BytesIO(pickle.dumps([1], protocol=5)), weights_only=True)


def test_python_has_a_reader_of_pickles_in_python() -> None:
    """Its method for an opcode can be replaced; that of the reader in C cannot."""
    assert pickle._Unpickler.dispatch[pickle.BUILD[0]] is pickle._Unpickler.load_build  # type: ignore[attr-defined]
    assert pickle._Unpickler is not pickle.Unpickler  # type: ignore[attr-defined]


# ---- moves of modules -------------------------------------------------------------------------------


def test_arguments() -> None:
    assert list(inspect.signature(nn.Module._apply).parameters) == ["self", "fn", "recurse"]


def test_children_are_moved_by_their_own() -> None:
    moved: list[nn.Module] = []

    class Child(nn.Linear):
        def _apply(self, fn: object, recurse: bool = True) -> Child:
            moved.append(self)
            return super()._apply(fn, recurse)  # type: ignore[no-any-return]

    nn.Sequential(Child(1, 1)).to(torch.float64)
    assert len(moved) == 1


@isolated
def test_what_is_queued_runs_once_when_a_backward_ends() -> None:
    """`Variable._execution_engine.queue_callback`, and `_current_graph_task_id`, which tells backwards apart."""
    seen: list[tuple[str, int]] = []
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]

    def accumulated(weight: torch.Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if ("accumulated", task) not in seen:
            torch.autograd.Variable._execution_engine.queue_callback(
                lambda: seen.append(("ended", len([weight for weight in weights if weight.grad is not None])))
            )
        seen.append(("accumulated", task))

    for weight in weights:
        weight.register_post_accumulate_grad_hook(accumulated)
    for _ in range(2):
        (weights[0] * weights[1]).sum().backward()
    names, numbers = zip(*seen, strict=True)
    assert names == ("accumulated", "accumulated", "ended") * 2
    assert numbers[2] == numbers[5] == 2
    assert numbers[0] == numbers[1] != numbers[3] == numbers[4]
    assert torch._C._current_graph_task_id() == -1


@isolated
def test_functional_collectives_return_new_tensors() -> None:
    """`all_reduce`, `all_gather_tensor`, `all_gather_tensor_autograd` and `reduce_scatter_tensor`."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    value = torch.ones(2, 3, requires_grad=True)
    reduced = _functional_collectives.all_reduce(value.detach(), "sum", group)
    assert torch.equal(reduced + 0, value)
    assert reduced is not value
    assert (_functional_collectives.all_gather_tensor(value.detach(), 0, group) + 0).shape == (2, 3)
    assert (_functional_collectives.reduce_scatter_tensor(value.detach(), "sum", 1, group) + 0).shape == (2, 3)
    (_functional_collectives.all_gather_tensor_autograd(value, 0, group) * 3).sum().backward()
    assert value.grad is not None
    assert value.grad.tolist() == [[3.0] * 3] * 2


def test_a_function_names_itself_to_modes_by_its_global() -> None:
    """Between it and the mode is the frame of `handle_torch_function`."""
    own = torch.nn.functional.silu
    seen: list[Any] = []

    class Looking(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append((func, function_called(func)))
            return function_called(func)(*args, **(kwargs or {}))

    def negated(x: torch.Tensor) -> torch.Tensor:
        return -own(x)

    with mock.patch.object(torch.nn.functional, "silu", negated), Looking():
        result = torch.nn.functional.silu(torch.ones(1))
    assert (negated, own) in seen
    assert torch.equal(result, -own(torch.ones(1)))
    assert is_of_torch(own)
    assert is_of_torch(torch.Tensor.add)
    # Its folder begins with the same letters.
    assert not is_of_torch(torchmetrics.functional.accuracy)
