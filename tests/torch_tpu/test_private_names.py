"""The private names of torch_tpu that `runtime/torch_tpu` uses do what it relies on."""

from __future__ import annotations

import inspect
import os

import pytest
import torch
from torch_tpu import _loader
from torch_tpu._internal.compile import tpu_torch_compile
from torch_tpu._internal.device import _device_ops_backend
from torch_tpu._internal.distributed.distributed import set_tpu_launch_env
from torch_tpu._internal.execution_mode import execution_mode_impl
from torch_tpu._internal.sync import sync
from torch_tpu._internal.utils import hardware

from tests.torch_tpu import stand_in

pytestmark = pytest.mark.isolated

_RECORD = execution_mode_impl._EagerMode.INTERNAL_COMPILE_FX_GRAPH


def test_a_trace_of_placeholders_becomes_an_executable() -> None:
    """`_push_eager_mode`, `placeholder_like`, `build_mlir`, `serialize_mlir_text`, `traverse_and_compile`, and
    `make_compiled_runner`."""
    value, other = torch.ones(3, device="tpu"), torch.ones(2, device="tpu")
    stand_in = tpu_torch_compile.placeholder_like(torch.empty(3, device="meta"))
    unchanged = tpu_torch_compile.placeholder_like(other)
    assert stand_in.device.type == "tpu"
    execution_mode_impl._push_eager_mode(_RECORD)
    try:
        tensor, same = stand_in.clone(), unchanged.clone()
        address = tensor.untyped_storage()._cdata
        tensor.mul_(2)
        assert tensor.untyped_storage()._cdata == address
        module = tpu_torch_compile.build_mlir([tensor, same], [stand_in, unchanged])
        text = tpu_torch_compile.serialize_mlir_text(module)
        with pytest.raises(RuntimeError, match="was not provided"):
            tpu_torch_compile.build_mlir([tensor], [unchanged])
        with pytest.raises(RuntimeError, match="during an FX trace"):
            tensor.sum().item()
        compiled = tpu_torch_compile.traverse_and_compile(
            result_tensors=[tensor], argument_tensors=[stand_in, unchanged], donated_inputs=[0], module_name="step"
        )
    finally:
        execution_mode_impl._pop_eager_mode()
    # What a trace does not change is returned as the argument itself.
    assert "%arg1 : tensor<3xf32>, tensor<2xf32>" in text
    (found,) = tpu_torch_compile.make_compiled_runner(compiled.executable)([value, other])
    assert found.tolist() == [2.0] * 3
    assert other.tolist() == [1.0] * 2


def test_waiting_for_a_launch_that_failed_raises() -> None:
    """`synchronize` of `sync`."""
    value = torch.ones(3, device="tpu")
    sync.synchronize([value], wait=True)
    stand_in.fail_launch()
    made = value + 1
    with pytest.raises(RuntimeError, match=r"(?i)resource_exhausted"):
        sync.synchronize([made], wait=True)
    assert value.tolist() == [1.0] * 3


def test_a_program_is_made_without_values_and_says_its_lines() -> None:
    """`placeholder`, and `push_enable_tracebacks` for `serialize_mlir_text`."""
    tpu_torch_compile.push_enable_tracebacks(True)
    argument = tpu_torch_compile.placeholder([1 << 20, 1 << 20], torch.float32)
    assert (argument.device.type, argument.shape, argument.dtype) == ("tpu", (1 << 20, 1 << 20), torch.float32)
    assert argument.detach().untyped_storage()._cdata == argument.untyped_storage()._cdata
    execution_mode_impl._push_eager_mode(_RECORD)
    try:
        module = tpu_torch_compile.build_mlir([argument.sin()], [argument])
    finally:
        execution_mode_impl._pop_eager_mode()
    text = tpu_torch_compile.serialize_mlir_text(module, enable_debug_info=True)
    assert "test_private_names.py" in text


def test_the_number_of_tpus_is_asked_by_its_name() -> None:
    """`torch_tpu._internal.utils.hardware.get_tpu_device_count`, which a process that only traces replaces."""
    assert "hardware.get_tpu_device_count()" in inspect.getsource(_loader)
    assert isinstance(hardware.get_tpu_device_count(), int)


def test_the_state_of_the_random_stream() -> None:
    """`get_device_state_tensor`, `set_device_state_tensor`, and the generator of a trace."""
    generator = torch.tpu.default_generators[0]  # type: ignore[attr-defined]
    torch.manual_seed(5)
    state = tpu_torch_compile.get_device_state_tensor(generator)
    assert state.cpu().tolist() == [5, 0]
    drawn = torch.rand(4, device="tpu").cpu()
    tpu_torch_compile.set_device_state_tensor(generator, state)
    assert torch.equal(torch.rand(4, device="tpu").cpu(), drawn)
    tpu_torch_compile.set_device_state_tensor(generator, state)
    stand_in = tpu_torch_compile.make_export_mode_device_generator(generator)
    tpu_torch_compile.set_export_mode_default_device_generator(stand_in)
    try:
        before = tpu_torch_compile.get_device_state_tensor(stand_in)
        assert before.data_ptr() == tpu_torch_compile.get_device_state_tensor(stand_in).data_ptr()
        execution_mode_impl._push_eager_mode(_RECORD)
        result = torch.rand(4, device="tpu")
        execution_mode_impl._pop_eager_mode()
        after = tpu_torch_compile.get_device_state_tensor(stand_in)
        assert before.data_ptr() != after.data_ptr()
    finally:
        tpu_torch_compile.clear_export_mode_default_device_generators()
    execution_mode_impl._push_eager_mode(_RECORD)
    compiled = tpu_torch_compile.traverse_and_compile(result_tensors=[result, after], argument_tensors=[before])
    execution_mode_impl._pop_eager_mode()
    found, moved = tpu_torch_compile.make_compiled_runner(compiled.executable)([state])
    assert torch.equal(found.cpu(), drawn)
    assert moved.cpu().tolist() != [5, 0]


def test_the_device_and_its_counts() -> None:
    """`_is_initialized`, `_synchronize_device`, `_get_cache_requests`, `_get_cache_misses`, `_get_cache_stats`."""
    torch.ones(2, device="tpu").sum().item()
    assert _device_ops_backend._is_initialized()
    _device_ops_backend._synchronize_device(0, True)
    assert torch.tpu.get_device_name(0) == "TPU"  # type: ignore[attr-defined]
    requests, misses = _device_ops_backend._get_cache_requests(), _device_ops_backend._get_cache_misses()
    (torch.ones(7, device="tpu") * 5).cpu()
    assert _device_ops_backend._get_cache_requests() > requests
    assert _device_ops_backend._get_cache_misses() > misses
    # Without a cache on disk each miss is a compile.
    assert _device_ops_backend._get_cache_stats().num_compilations == _device_ops_backend._get_cache_misses()
    assert torch._C._get_privateuse1_backend_name() == "tpu"
    assert callable(_loader.load)
    assert not inspect.signature(_loader.load).parameters


def test_the_present_mode_is_known() -> None:
    """`_get_eager_mode`, inside a recording and outside."""
    assert execution_mode_impl._get_eager_mode() != _RECORD
    execution_mode_impl._push_eager_mode(_RECORD)
    try:
        assert execution_mode_impl._get_eager_mode() == _RECORD
    finally:
        execution_mode_impl._pop_eager_mode()


def test_the_launch_environment_keeps_what_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """`set_tpu_launch_env`."""
    monkeypatch.setenv("TORCH_TPU_TOPOLOGY", "1,2,1")
    monkeypatch.delenv("TORCH_TPU_SLICEBUILDER_ADDRESSES", raising=False)
    set_tpu_launch_env(nproc_per_node=2)
    assert os.environ["TORCH_TPU_TOPOLOGY"] == "1,2,1"
    assert os.environ["TORCH_TPU_SLICEBUILDER_ADDRESSES"].count("localhost:") == 2
