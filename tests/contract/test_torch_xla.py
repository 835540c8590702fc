"""The private calls of torch_xla the runtime interface stands on: they exist, and behave as the runtime expects."""

from __future__ import annotations

import gzip
import inspect
import os
import re
from pathlib import Path

import pytest
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.debug.profiler as xp
import torch_xla.experimental
import torch_xla.runtime as xr
from torch_xla.utils.buffer_donor_context import alias_with_buffer_donor_config

from tests.isolation import isolated
from xla_adapters import get_runtime

pytestmark = pytest.mark.isolated


_C = torch_xla._XLAC


def _start() -> str:
    xr.global_runtime_device_count()
    return str(torch_xla.device())


def test_pending_discard_and_restore() -> None:
    device = _start()
    tensor = torch.ones(3).to(device)
    assert _C._check_tensor_need_materialization([tensor]) == [False]
    inner = torch._from_functional_tensor(tensor)
    tensor.add_(1)
    assert _C._check_tensor_need_materialization([tensor]) == [True]
    assert sum(_C._check_device_tensor_need_materialization(device)) == 1
    torch._functionalize_replace(tensor, inner)
    torch._functionalize_commit_update(tensor)
    _C._clear_pending_irs(device)
    assert sum(_C._check_device_tensor_need_materialization(device)) == 0
    assert tensor.cpu().tolist() == [1, 1, 1]


def test_restored_value_shows_through_views_and_aliases() -> None:
    device = _start()
    tensor = torch.ones(4).to(device)
    view, alias = tensor[:2], tensor.detach()
    inner = torch._from_functional_tensor(tensor)
    tensor.mul_(3)
    _C._clear_pending_irs(device)
    torch._functionalize_replace(tensor, inner)
    torch._functionalize_commit_update(tensor)
    assert view.cpu().tolist() == [1, 1]
    assert alias.cpu().tolist() == [1, 1, 1, 1]


def test_writes_to_views_are_applied_by_a_sync() -> None:
    device = _start()
    tensor = torch.ones(4).to(device)
    before = torch._from_functional_tensor(tensor)
    tensor[:2].mul_(3)
    assert torch._from_functional_tensor(tensor) is before
    torch._functionalize_sync(tensor)
    assert torch._from_functional_tensor(tensor) is not before
    assert tensor.cpu().tolist() == [3, 3, 1, 1]


def test_a_storage_counts_what_is_written_to_it() -> None:
    device = _start()
    tensor = torch.ones(4).to(device)
    inner = torch._from_functional_tensor(torch.zeros(4).to(device))
    writes = [
        lambda: torch._functionalize_replace(tensor, inner),
        lambda: tensor[:2].add_(1),
        lambda: tensor.detach().fill_(2),
        lambda: tensor.data.copy_(torch.ones(4)),
        lambda: tensor.normal_(),
        lambda: torch.add(tensor, 1, out=tensor),
        lambda: torch._foreach_zero_([tensor]),
    ]
    for count, write in enumerate(writes, 1):
        write()
        assert torch._functionalize_mutation_counter(tensor) == count
    names = torch._C._storage_id(tensor), torch._C._storage_id(tensor[1:])
    tensor.data = torch.ones(4).to(device)
    assert names[0] == names[1] != torch._C._storage_id(tensor)


def test_what_replaces_the_device_tensor_is_seen_by_who_holds_it() -> None:
    device = _start()
    tensor = torch.ones(4).to(device)
    held = torch._from_functional_tensor(torch.zeros(4).to(device))
    torch._functionalize_replace(tensor, held)
    torch._functionalize_commit_update(tensor)
    other = torch._from_functional_tensor(torch.full((4,), 7.0).to(device))
    _C._replace_xla_tensor(torch._from_functional_tensor(tensor), other)
    assert torch._to_functional_tensor(held).cpu().tolist() == [7, 7, 7, 7]


def test_flush_executes_without_moving_the_random_stream() -> None:
    device = _start()
    xm.set_rng_state(7)
    tensor = torch.ones(3).to(device) + 1
    _C._xla_sync_live_tensors(device, [], False)
    assert _C._check_tensor_need_materialization([tensor]) == [False]
    assert xm.get_rng_state() == 7
    torch_xla.sync()
    assert xm.get_rng_state() != 7


def test_execution_can_be_forbidden() -> None:
    device = _start()
    tensor = torch.ones(3).to(device) + 1
    assert _C._get_allow_execution()
    _C._set_allow_execution(False)
    with pytest.raises(RuntimeError, match="Unexpected execution happens inside"):
        tensor.sum().item()
    _C._set_allow_execution(True)
    assert tensor.sum().item() == 6


def test_eager_flag_and_graph_name() -> None:
    _start()
    assert not _C._get_use_eager_mode()
    _C._set_use_eager_mode(True)
    assert _C._get_use_eager_mode()
    _C._set_current_graph_name("a_name")
    assert _C._get_current_graph_name() == "a_name"


def test_several_tensors_come_in_one_transfer() -> None:
    import torch_xla.debug.metrics as metrics

    device = _start()
    tensors = [torch.ones(3).to(device), torch.zeros(2, 2).to(device)]
    copies = _C._xla_get_cpu_tensors(tensors)
    assert [copy.device.type for copy in copies] == ["cpu", "cpu"]
    assert torch.equal(copies[0], torch.ones(3))
    assert metrics.metric_data("TransferFromDeviceTime")[0] == 1


def test_scalars_can_be_inputs_of_the_graph() -> None:
    import torch_xla.debug.metrics as metrics

    device = _start()
    tensor = torch.ones(3).to(device)

    def compiles(factor: float) -> int:
        before = metrics.metric_data("CompileTime")
        result = tensor * factor
        torch_xla.sync()
        assert result.cpu()[0].item() == factor
        return int(metrics.metric_data("CompileTime")[0]) - (int(before[0]) if before else 0)

    previous = _C._get_xla_handle_special_scalars()
    _C._set_xla_handle_special_scalars(False)
    assert [compiles(factor) for factor in (0.5, 0.0, 1.0, 0.25)] == [1, 0, 0, 0]
    _C._set_xla_handle_special_scalars(previous)
    assert compiles(0.0) == 1


def test_graph_hash_names_the_graph_and_not_its_inputs() -> None:
    device = _start()

    def name(size: int, factor: float) -> str:
        tensor = torch.full((size,), factor).to(device) * 2.5
        graph = str(_C._get_graph_hash([tensor]))
        assert tensor.cpu()[0].item() == 2.5 * factor
        return graph

    assert name(2, 3.0) == name(2, 4.0)
    assert name(2, 3.0) != name(3, 3.0)


def test_uploaded_scalars_are_shared_and_vectors_are_not() -> None:
    """Why the trainer's running loss has shape (1,): a shared buffer is never donated."""
    import torch_xla.debug.metrics as metrics

    device = _start()

    def graphs(shape: tuple[int, ...]) -> int:
        total = torch.full(shape, 0.5).to(device)
        before = metrics.metric_data("CompileTime")
        for _ in range(3):
            total += 2.5
            torch_xla.sync()
        return int(metrics.metric_data("CompileTime")[0]) - (int(before[0]) if before else 0)

    assert graphs(()) == 2
    assert graphs((1,)) == 1


def test_spmd_lock_and_profiler_hooks_exist() -> None:
    assert callable(_C._xla_get_spmd_config_is_locked)
    for name in ("_xla_step_marker", "_xla_sync_multi", "_xla_sync_live_tensors", "_xla_wait_device_ops"):
        assert callable(getattr(_C, name))
    assert "__enter__" in vars(xp.Trace)
    assert "__exit__" in vars(xp.Trace)


def test_uploads_with_a_buffer_of_their_own() -> None:
    """Unlike `.to("xla")`, which makes a constant of a scalar 0 or 1 and shares other scalars."""
    device = _start()
    assert sum(_C._check_device_tensor_need_materialization(device)) == 0
    plain = torch.zeros(()).to(device)
    assert _C._check_tensor_need_materialization([plain]) == [True]
    own = _C._xla_tensors_from_aten([torch.zeros(())], [device], None)[0]
    assert _C._check_tensor_need_materialization([own]) == [False]
    assert own.item() == 0


def test_tensor_ids_name_values() -> None:
    device = _start()
    first, second = torch.ones(2).to(device), torch.ones(2).to(device)
    assert _C._xla_get_tensor_id(first) != _C._xla_get_tensor_id(second)
    assert _C._xla_get_tensor_id(first) == _C._xla_get_tensor_id(first)


def test_a_second_copy_takes_over_a_value_in_place() -> None:
    device = _start()
    tensor = torch.ones(3).to(device)
    torch._sync(tensor)
    inner = torch._from_functional_tensor(tensor)
    trained = torch._from_functional_tensor(inner.clone())
    inner.add_(1)
    inner.copy_(trained)
    assert tensor.cpu().tolist() == [1, 1, 1]


@isolated(env={"CPU_NUM_DEVICES": "4"})
def test_cut_tensors_and_their_parts_on_the_host() -> None:
    xr.use_spmd()
    xr.global_runtime_device_count()
    values = torch.arange(8.0).reshape(4, 2)
    arguments = ([[[0, 1]], [[2, 3]]], [[0], [1]], [[0, 1], [2, 3]], 5)
    spec = _C.XlaShardingSpec(values, *arguments, False)
    cut = _C._xla_tensors_from_aten([values], [str(torch_xla.device())], [spec])[0]
    text = "{devices=[2,1,2]0,1,2,3 last_tile_dim_replicate}"
    assert _C._get_xla_sharding_spec(cut) == text
    ((*shards,),) = _C._get_local_shards([cut])
    assert [shard.tolist() for shard, _ in shards] == [values[:2].tolist()] * 2 + [values[2:].tolist()] * 2
    ((*places,),) = _C._get_local_shard_replica_and_indices([cut])
    assert [replica for replica, _ in places] == [0, 1, 0, 1]
    assert [indices[0].start for _, indices in places] == [0, 0, 2, 2]
    marked = values.to(torch_xla.device())
    _C._xla_mark_sharding(marked, _C.OpSharding(*arguments))
    assert _C._get_xla_sharding_spec(marked) == text


def test_dtype_of_a_tensor_that_lost_it_is_named_again_without_an_operation() -> None:
    _start()

    def hashes(tensor: torch.Tensor) -> bool:
        return bool(_C._get_graph_hash([tensor.sum(1)]) == _C._get_graph_hash([tensor.sum(1, dtype=torch.float32)]))

    tensor = torch.ones(2, 3).to("xla")
    lost = tensor.addcdiv(tensor, tensor, value=0.5)
    torch_xla.sync()
    assert hashes(tensor)
    # Where this fails torch_xla has mended it, and `restate_dtype` can go.
    assert not hashes(lost)
    again = torch.ops.aten._to_copy(lost, dtype=lost.dtype)
    assert hashes(again)
    assert _C._get_xla_tensors_text([again]).count("=") <= _C._get_xla_tensors_text([lost]).count("=")


def test_an_updated_tensor_still_knows_whose_buffer_it_may_take() -> None:
    """Without `_propagate_xla_data` the update of every parameter needs a second buffer."""
    _start()

    def alias(tensor: torch.Tensor) -> str:
        (line,) = re.findall(r"^AliasID: (\d+)$", _C._get_xla_tensor_debug_info(tensor), re.MULTILINE)
        return str(line)

    tensor, other = torch.ones(4).to("xla"), torch.ones(4).to("xla")
    before = alias(tensor)
    tensor.addcdiv_(other, other)
    assert alias(tensor) == before != alias(other)
    get_runtime().lazy.restate_dtype(tensor)
    assert alias(tensor) == before
    inner = torch._from_functional_tensor(tensor)
    assert alias(torch._from_functional_tensor(torch.ops.aten._to_copy(inner, dtype=inner.dtype))) != before


@isolated(env={"CPU_NUM_DEVICES": "4"})
def test_a_value_copied_in_from_the_host_waits_there_under_an_annotation_that_is_not_its_own() -> None:
    xr.use_spmd()
    xr.global_runtime_device_count()
    torch_xla.experimental.eager_mode(True)
    halves, waits = _C.OpSharding([[0, 1, 2, 3]], [], [], 3), "Tensor on host: with size"
    tensor = torch.zeros(2, 8).to(torch_xla.device())
    _C._xla_mark_sharding(tensor, halves)
    text = _C._get_xla_sharding_spec(tensor)
    assert waits not in _C._get_xla_tensor_debug_info(tensor)
    values = torch.arange(16.0).reshape(2, 8)
    tensor.copy_(values)
    assert _C._get_xla_sharding_spec(tensor) == text
    assert waits in _C._get_xla_tensor_debug_info(tensor)
    assert _C._get_local_shards([tensor])[0][0][0].shape == values.shape
    with pytest.raises(RuntimeError, match="must be cleared before applying a new one"):
        _C._xla_mark_sharding(tensor, _C.OpSharding([[0, 1], [2, 3]], [], [], 3))
    _C._xla_clear_sharding(tensor)
    _C._xla_mark_sharding(tensor, halves)
    torch_xla.core.xla_model.wait_device_ops()
    parts = [shard for shard, _ in _C._get_local_shards([tensor])[0]]
    assert torch.equal(torch.cat(parts, 1), values)


@isolated(env={"CPU_NUM_DEVICES": "8"})
def test_tensors_are_made_of_parts_without_a_compile() -> None:
    xr.use_spmd()
    _start()
    rows = [[device] for device in range(8)]
    sharding = _C.OpSharding(rows, [], [], 3)
    parts = [torch.full((2, 4), float(device)) for device in range(8)]
    before = met.metric_data("CompileTime")
    tensor = _C._global_tensor_from_cpu_shards(parts, sharding, [16, 4])
    assert torch._is_functional_tensor(tensor)
    assert _C._get_xla_sharding_spec(tensor).startswith("{devices=[8,1]")
    places = _C._get_local_shard_replica_and_indices([tensor])[0]
    assert [(replica, slices[0].start, slices[0].stop) for replica, slices in places] == [
        (0, 2 * device, 2 * device + 2) for device in range(8)
    ]
    shards = _C._get_local_shards([tensor])[0]
    assert all(torch.equal(shard, part) for (shard, _), part in zip(shards, parts, strict=True))
    assert met.metric_data("CompileTime") == before


def test_each_draw_moves_the_stream_on_alike() -> None:
    device = _start()
    places = set()
    for draw in (lambda: torch.rand((), device=device), lambda: torch.randint(0, 1 << 32, (3,), device=device)):
        xm.set_rng_state(7)
        drawn = draw()
        places.add(xm.get_rng_state())
        del drawn
    assert len(places) == 1
    assert places != {7}


def test_a_scan_runs_by_one_function_that_is_looked_up() -> None:
    from torch_xla.experimental import scan

    assert list(inspect.signature(scan._scan_impl_flat).parameters) == ["fn", "init", "xs", "reverse"]
    assert "_scan_impl_flat(" in inspect.getsource(scan._scan_impl_pytree)


def test_tpus_are_counted_by_a_function_that_is_looked_up() -> None:
    from lightning.pytorch.accelerators import XLAAccelerator
    from torch_xla._internal import tpu

    assert "num_available_chips() * num_logical_cores_per_chip()" in inspect.getsource(tpu.num_available_devices)
    assert "tpu.num_available_devices()" in inspect.getsource(XLAAccelerator.auto_device_count)


def test_flags_of_a_host_with_tpus_are_set_by_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """On import there; elsewhere it can be called."""
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5litepod-8")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--mine=1")
    torch_xla._setup_libtpu_flags()
    flags = os.environ["LIBTPU_INIT_ARGS"].split()
    assert flags[0] == "--mine=1"
    assert "--xla_enable_async_all_gather=true" in flags
    assert "_setup_libtpu_flags()" in inspect.getsource(torch_xla._setup_default_env)


def test_the_kind_of_a_device() -> None:
    """The table of peak FLOPs is by these names; those of TPUs are as in JAX."""
    assert _C._xla_device_kind(str(torch_xla.device())) == "cpu"


def test_a_profile_is_written_and_a_second_one_is_refused(tmp_path: Path) -> None:
    device = get_runtime().device
    device.initialize()
    assert device.start_profile(str(tmp_path))
    assert not device.start_profile(str(tmp_path / "other"))
    assert issubclass(xp.Trace, _C.profiler.TraceMe)
    end_span = device.mark_profile("a span of ours")
    (torch.ones(3).to(device.torch_device()) + 1).cpu()
    end_span()
    device.stop_profile()
    (trace,) = tmp_path.rglob("*.trace.json.gz")
    assert b'"name":"a span of ours"' in gzip.decompress(trace.read_bytes()).replace(b": ", b":")
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(path.name.partition(".")[2] for path in files) == ["trace.json.gz", "xplane.pb"]
    assert all(path.stat().st_size for path in files)
    assert device.start_profile(str(tmp_path))
    device.stop_profile()


# ---- cached graphs ----------------------------------------------------------------------------------


def _inner(tensor: torch.Tensor) -> torch.Tensor:
    return torch._from_functional_tensor(tensor)


def test_a_handle_names_a_buffer() -> None:
    device = _start()
    first, second = torch.ones(3).to(device), torch.ones(3).to(device)
    alias = first.detach()
    torch_xla.sync(wait=True)
    one, other, again = _C._get_tensors_handle([first, second, alias])
    assert one == again != other


def test_a_pending_graph_tells_what_it_reads() -> None:
    device = _start()
    first, second = torch.ones(3).to(device), torch.full((3,), 2.0).to(device)
    result = _inner(first + second)
    numbers, values = _C._get_tensors_xla_device_data_node([result])
    assert len(numbers) == len(values) == 2
    assert sorted(_C._get_tensors_handle(values)) == sorted(_C._get_tensors_handle([first, second]))
    assert "f32[3]" in _C._get_xla_tensors_hlo([result])
    assert isinstance(_C._get_xla_tensors_hlo_proto([result]), bytes)


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


def test_the_seed_is_an_input_that_can_be_told() -> None:
    device = _start()
    # Made before something is drawn.
    seed = _C._get_base_seed_as_tensor(device)
    drawn = _inner(torch.rand(3, device=device))
    numbers, values = _C._get_tensors_xla_device_data_node([drawn])
    assert _C._get_seed_info_id() in numbers
    assert _C._get_tensors_handle([seed])[0] in _C._get_tensors_handle(values)


def test_the_random_stream_is_read_and_set() -> None:
    device = _start()
    _C._xla_set_rng_seed(7, device)
    assert _C._xla_get_rng_seed() == xm.get_rng_state() == 7


def test_an_alias_is_known_by_the_device_tensor_that_it_shares() -> None:
    device = _start()
    tensor = torch.ones(3).to(device)
    name = _C._unique_id_for_ir_and_data
    assert name(_inner(tensor)) == name(_inner(tensor.detach())) != name(_inner(torch.ones(3).to(device)))


def test_a_computation_of_ones_own_is_called_in_a_graph() -> None:
    device = _start()
    value = torch.ones(3).to(device)
    module = _C._get_xla_tensors_hlo_proto([_inner(value + value)])
    computation = _C._xla_op_computation_from_module_proto("twice", module)
    (called,) = _C._xla_user_computation("xla_adapters::twice", [value], computation)
    assert called.cpu().tolist() == [2, 2, 2]


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


def test_closures_of_a_step_are_run_once() -> None:
    _start()
    calls: list[int] = []
    xm.add_step_closure(calls.append, args=(1,))
    xm._run_step_closures()
    xm._run_step_closures()
    assert calls == [1]
