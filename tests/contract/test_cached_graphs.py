"""The private calls of torch_xla that compile graphs, run them again, and name what they read."""

from __future__ import annotations

import pytest
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.runtime as xr
from torch_xla.utils.buffer_donor_context import alias_with_buffer_donor_config

from tests.isolation import isolated

_C = torch_xla._XLAC


def _start() -> str:
    xr.global_runtime_device_count()
    return str(torch_xla.device())


def _inner(tensor: torch.Tensor) -> torch.Tensor:
    return torch._from_functional_tensor(tensor)


@isolated
def test_a_handle_names_a_buffer() -> None:
    device = _start()
    first, second = torch.ones(3).to(device), torch.ones(3).to(device)
    alias = first.detach()
    torch_xla.sync(wait=True)
    one, other, again = _C._get_tensors_handle([first, second, alias])
    assert one == again != other


@isolated
def test_a_pending_graph_tells_what_it_reads() -> None:
    device = _start()
    first, second = torch.ones(3).to(device), torch.full((3,), 2.0).to(device)
    result = _inner(first + second)
    numbers, values = _C._get_tensors_xla_device_data_node([result])
    assert len(numbers) == len(values) == 2
    assert sorted(_C._get_tensors_handle(values)) == sorted(_C._get_tensors_handle([first, second]))
    assert "f32[3]" in _C._get_xla_tensors_hlo([result])
    assert isinstance(_C._get_xla_tensors_hlo_proto([result]), bytes)


@isolated
def test_a_graph_is_compiled_without_being_executed_and_runs_on_other_inputs() -> None:
    device = _start()
    state, batch = torch.ones(3).to(device), torch.full((3,), 2.0).to(device)
    result = _inner(state * 3 + batch)
    inputs = _C._get_tensors_xla_device_data_node([result])[1]
    executions = _C._xla_counter_value("ExecuteTime")
    _C._xla_warm_up_cache([result], [])
    assert _C._xla_counter_value("ExecuteTime") == executions
    assert met.metric_data("CompileTime")[0] == _C._xla_metric_data("CompileTime")[0] == 1
    name = _C._get_graph_hash([result])
    (found,) = _C._run_cached_graph(name, inputs)
    assert found.cpu().tolist() == [5, 5, 5]
    handles = _C._get_tensors_handle([batch])
    others = [
        torch.full((3,), 7.0).to(device) if handle in handles else value
        for value, handle in zip(inputs, _C._get_tensors_handle(inputs), strict=True)
    ]
    assert _C._run_cached_graph(name, others)[0].cpu().tolist() == [10, 10, 10]
    assert _C._xla_metric_data("CompileTime")[0] == 1


@isolated
def test_a_buffer_that_is_given_away_is_gone() -> None:
    device = _start()
    state = torch.ones(3).to(device)
    result = _inner(state + 1)
    before = _inner(state)
    assert _C._set_buffer_donation(before, True)
    with alias_with_buffer_donor_config(True):
        name = _C._get_graph_hash([result])
        _C._xla_warm_up_cache([result], [])
    inputs = _C._get_tensors_xla_device_data_node([result])[1]
    (found,) = _C._run_cached_graph(name, inputs)
    assert found.cpu().tolist() == [2, 2, 2]
    with pytest.raises(RuntimeError, match="is deleted"):
        _C._get_tensors_handle([state])


@isolated
def test_the_seed_is_an_input_that_can_be_told() -> None:
    device = _start()
    # Made before something is drawn.
    seed = _C._get_base_seed_as_tensor(device)
    drawn = _inner(torch.rand(3, device=device))
    numbers, values = _C._get_tensors_xla_device_data_node([drawn])
    assert _C._get_seed_info_id() in numbers
    assert _C._get_tensors_handle([seed])[0] in _C._get_tensors_handle(values)


@isolated
def test_the_random_stream_is_read_and_set() -> None:
    device = _start()
    _C._xla_set_rng_seed(7, device)
    assert _C._xla_get_rng_seed() == xm.get_rng_state() == 7


@isolated
def test_an_alias_is_known_by_the_device_tensor_that_it_shares() -> None:
    device = _start()
    tensor = torch.ones(3).to(device)
    name = _C._unique_id_for_ir_and_data
    assert name(_inner(tensor)) == name(_inner(tensor.detach())) != name(_inner(torch.ones(3).to(device)))


@isolated
def test_a_computation_of_ones_own_is_called_in_a_graph() -> None:
    device = _start()
    value = torch.ones(3).to(device)
    module = _C._get_xla_tensors_hlo_proto([_inner(value + value)])
    computation = _C._xla_op_computation_from_module_proto("twice", module)
    (called,) = _C._xla_user_computation("xla_adapters::twice", [value], computation)
    assert called.cpu().tolist() == [2, 2, 2]


@isolated
def test_a_barrier_stands_in_the_graph() -> None:
    device = _start()
    value = _inner(torch.ones(3).to(device) + 1)
    _C._xla_optimization_barrier_([value])
    assert "opt-barrier" in _C._get_xla_tensors_hlo([value])


@isolated(env={"CPU_NUM_DEVICES": "4"})
def test_layouts_and_constraints_inside_a_graph() -> None:
    xr.use_spmd()
    device = _start()
    tensor = torch.ones(4).to(device)
    assert _C._get_xla_sharding_specs([tensor]) == [""]
    # Tiles, their groups, groups of copies, and the kind "other".
    sharding = _C.OpSharding([0, 1, 2, 3], [[0], [1], [2], [3]], [], 3)
    held = tensor + 1
    _C._xla_annotate_custom_sharding(held, sharding)
    assert "sharding={devices=[4]0,1,2,3}" in _C._get_xla_tensors_hlo([_inner(held)])


def test_what_only_several_processes_on_tpus_call_exists() -> None:
    for name in ("_ensure_xla_coordinator_initialized", "_activate_preemption_sync_manager", "_sync_point_reached"):
        assert callable(getattr(_C, name))


@isolated
def test_closures_of_a_step_are_run_once() -> None:
    _start()
    calls: list[int] = []
    xm.add_step_closure(calls.append, args=(1,))
    xm._run_step_closures()
    xm._run_step_closures()
    assert calls == [1]
