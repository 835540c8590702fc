"""What `hf_trainer` relies on to save, log and generate on the device as transformers does on the CPU."""

from __future__ import annotations

import inspect

import accelerate.accelerator
import accelerate.state
import accelerate.utils.operations
import pytest
import safetensors.torch
import torch
import transformers.modeling_utils
import transformers.trainer
from transformers import PreTrainedModel, Trainer
from transformers.trainer_callback import CallbackHandler


def test_what_saves_a_model_on_xla_instead_of_its_own_method() -> None:
    source = inspect.getsource(Trainer.save_model)
    assert "save_tpu_checkpoint(" in source
    assert "self._save(output_dir)" in source
    assert "save_tpu_checkpoint" in vars(transformers.trainer)


def test_where_weights_in_one_memory_are_looked_for() -> None:
    source = inspect.getsource(PreTrainedModel.save_pretrained)
    assert source.count("remove_tied_weights_from_state_dict(state_dict, model_to_save)") == 1
    assert "_find_shared_tensors(" in inspect.getsource(safetensors.torch._remove_duplicate_names)
    assert "_is_complete(" in inspect.getsource(safetensors.torch._remove_duplicate_names)
    assert "_find_shared_tensors(" in inspect.getsource(safetensors.torch._evaluate_tensors_for_save)
    for function in (safetensors.torch.save, safetensors.torch.save_file):
        assert "_flatten_as_ptr(" in inspect.getsource(function)
    assert "_evaluate_tensors_for_save(" in inspect.getsource(safetensors.torch._flatten_as_ptr)


def test_inference_mode_leaves_what_it_entered() -> None:
    assert "self._inference_mode_context.__exit__(" in inspect.getsource(torch.inference_mode.__exit__)


def test_the_model_is_moved_before_the_optimizer_is_checked() -> None:
    source = inspect.getsource(Trainer.__init__)
    assert source.index("self._move_model_to_device(") < source.index("self._validate_args()")
    assert source.index("self.optimizer, self.lr_scheduler = optimizers") < source.index("self._validate_args()")


def test_each_event_reaches_the_callbacks_by_one_method() -> None:
    events = [name for name in vars(CallbackHandler) if name.startswith("on_")]
    assert len(events) > 10
    assert all("self.call_event(" in inspect.getsource(getattr(CallbackHandler, name)) for name in events)


def test_the_device_of_a_model_is_a_property() -> None:
    assert isinstance(PreTrainedModel.device, property)


def test_what_accelerate_does_otherwise_on_xla() -> None:
    assert "NotImplementedError" in inspect.getsource(accelerate.utils.operations.gather_object)
    assert vars(accelerate.accelerator)["gather_object"] is accelerate.utils.operations.gather_object
    assert 'os.environ.get("LOCAL_RANK", -1)' in inspect.getsource(accelerate.state)


def test_padding_to_other_processes() -> None:
    """`pad_across_processes` is replaced where the accelerator looks it up: one process has no other shapes."""
    assert vars(accelerate.accelerator)["pad_across_processes"] is accelerate.utils.operations.pad_across_processes
    assert "return pad_across_processes(" in inspect.getsource(accelerate.Accelerator.pad_across_processes)


def test_the_loops_that_read_batches_on_the_host() -> None:
    """`DeviceLoader` knows them by their module."""
    assert "iter(train_dataloader)" in inspect.getsource(transformers.trainer)
    assert "in enumerate(dataloader)" in inspect.getsource(transformers.trainer)


def test_losses_that_put_back_random_numbers() -> None:
    """`RandContext` of sentence-transformers is replaced by a class derived from it."""
    gradcache = pytest.importorskip("sentence_transformers.base.losses.gradcache")
    context = gradcache.RandContext()
    assert isinstance(context.fwd_gpu_devices, list)
    assert {"__enter__", "__exit__"} <= vars(gradcache.RandContext).keys()
