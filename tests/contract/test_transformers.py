"""What `hf_trainer` relies on in transformers and accelerate: private hooks, and how they save, log and generate."""

from __future__ import annotations

import dataclasses
import dis
import inspect
from types import CodeType
from typing import Any

import accelerate.accelerator
import accelerate.data_loader
import accelerate.optimizer
import accelerate.state
import accelerate.utils.operations
import lightning.pytorch.loops.fit_loop
import peft.peft_model
import pytest
import safetensors.torch
import torch
import transformers
import transformers.integrations.tpu
import transformers.modeling_utils
import transformers.trainer
import transformers.trainer_pt_utils
import transformers.vision_utils
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.utilities.exceptions import SIGTERMException
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.models.detr.modeling_detr import DetrEncoderLayer
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_jit_checkpoint import JITCheckpointCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints
from transformers.utils.output_capturing import install_output_capuring_hook

from hf_trainer.checkpoints import SETTINGS
from xla_adapters.replay.guards.snapshot import _OF_LIBRARIES
from xla_adapters.tracing.library_reads import _computes_of_batch

_TRAINER_HOOKS = {
    "_inner_training_loop": ["self", "batch_size", "args", "resume_from_checkpoint", "trial", "ignore_keys_for_eval"],
    "_prepare_for_training": ["self", "max_steps", "train_dataloader", "resume_from_checkpoint"],
    "_init_training_state": [
        "self",
        "max_steps",
        "num_update_steps_per_epoch",
        "num_train_epochs",
        "resume_from_checkpoint",
        "trial",
    ],
    "_load_rng_state": ["self", "checkpoint"],
    "set_initial_training_values": ["self", "args", "dataloader"],
    "_build_accelerator_args": ["self", "kwargs"],
    "_get_num_items_in_batch": ["self", "batch_samples", "device"],
    "_prepare_input": ["self", "data"],
    "_clip_grad_norm": ["self", "model"],
    "_get_grad_norm": ["self", "model", "grad_norm"],
    "_track_num_input_tokens": ["self", "inputs"],
    "_load_from_checkpoint": ["self", "resume_from_checkpoint", "model"],
    "_load_best_model": ["self"],
    "_issue_warnings_after_load": ["self", "load_result"],
    "get_batch_samples": ["self", "epoch_iterator", "num_batches", "device"],
    "training_step": ["self", "model", "inputs", "num_items_in_batch"],
    "prediction_step": ["self", "model", "inputs", "prediction_loss_only", "ignore_keys"],
    "evaluation_loop": [
        "self",
        "dataloader",
        "description",
        "prediction_loss_only",
        "ignore_keys",
        "metric_key_prefix",
    ],
    "compute_loss_context_manager": ["self"],
    "get_optimizer_cls_and_kwargs": ["args", "model"],
}


@pytest.mark.parametrize("name", _TRAINER_HOOKS)
def test_trainer_hook(name: str) -> None:
    assert list(inspect.signature(getattr(Trainer, name)).parameters) == _TRAINER_HOOKS[name]


def test_log_save_evaluate_takes_the_loss_and_the_norm_first() -> None:
    parameters = list(inspect.signature(Trainer._maybe_log_save_evaluate).parameters)
    assert parameters[:3] == ["self", "tr_loss", "grad_norm"]


def test_the_loop_announces_the_optimizer_step_right_after_it() -> None:
    """The step is closed in `on_optimizer_step`: between it and the update nothing may happen."""
    lines = [line.strip() for line in inspect.getsource(Trainer._run_epoch).splitlines()]
    update = lines.index("self.optimizer.step()")
    assert lines[update + 1].startswith("self.control = self.callback_handler.on_optimizer_step(")


def test_seq2seq_prediction_step() -> None:
    parameters = list(inspect.signature(transformers.Seq2SeqTrainer.prediction_step).parameters)
    assert parameters == ["self", "model", "inputs", "prediction_loss_only", "ignore_keys", "gen_kwargs"]
    source = inspect.getsource(transformers.Seq2SeqTrainer.prediction_step)
    assert "self.model.generate(" in source
    assert "model(**inputs)" in source


def test_replaced_names_of_accelerate_and_transformers() -> None:
    wrapper: Any = accelerate.data_loader.MpDeviceLoaderWrapper
    assert list(inspect.signature(wrapper.__init__).parameters) == ["self", "dataloader", "device"]
    assert inspect.getsource(accelerate.optimizer.AcceleratedOptimizer.step).count("is_lomo_available()") == 2
    assert list(inspect.signature(accelerate.utils.operations._tpu_gather).parameters) == ["tensor"]
    assert accelerate.accelerator.reduce is accelerate.utils.operations.reduce
    assert list(inspect.signature(accelerate.utils.operations.reduce).parameters) == ["tensor", "reduction", "scale"]
    assert "gather_object" in vars(accelerate.utils.operations)
    reduce = transformers.trainer_pt_utils.nested_xla_mesh_reduce
    assert list(inspect.signature(reduce).parameters) == ["tensors", "name"]


def test_the_loop_drops_gradients_by_the_models_own_method() -> None:
    """`no_search_for_gradients` stands on both."""
    assert "model.zero_grad()" in inspect.getsource(transformers.Trainer)
    assert list(inspect.signature(torch.nn.Module.zero_grad).parameters) == ["self", "set_to_none"]


def test_transformers_adafactor_names_its_parts() -> None:
    options = transformers.optimization.Adafactor._get_options
    assert list(inspect.signature(options).parameters) == ["param_group", "param_shape"]


def test_models_ask_torch_whether_they_are_compiled() -> None:
    assert torch.compiler._is_compiling_flag is False
    torch.compiler._is_compiling_flag = True
    try:
        assert transformers.utils.import_utils.is_tracing()
    finally:
        torch.compiler._is_compiling_flag = False
    assert not transformers.utils.import_utils.is_tracing()


def test_an_accelerator_prepares_loaders_by_one_function() -> None:
    source = inspect.getsource(accelerate.Accelerator.prepare_data_loader)
    assert "prepared_data_loader = prepare_data_loader(" in source
    names = list(inspect.signature(accelerate.accelerator.prepare_data_loader).parameters)
    assert names[:2] == ["dataloader", "device"]
    assert "put_on_device" in names


def test_the_loop_looks_for_nan_only_if_the_arguments_say_so() -> None:
    assert "self.args.logging_nan_inf_filter\n" in inspect.getsource(Trainer._run_epoch)


# ---- as on the CPU ----------------------------------------------------------------------------------


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


def test_hooks_that_replays_leave_out_only_compute() -> None:
    allowed = {"make_inputs_require_grads": {"requires_grad_"}}
    # The list that it adds to is of the forward that is under way.
    allowed["output_capturing_hook"] = {"_active_collector", "get", "keys", "len", "isinstance", "tuple", "append"}
    found = {}
    for function in (PreTrainedModel.enable_input_require_grads, install_output_capuring_hook):
        codes = [code for code in function.__code__.co_consts if isinstance(code, CodeType)]
        found.update({(function.__module__, code.co_qualname): code for code in codes})
    for module, name in _OF_LIBRARIES:
        code = found[module, name]
        assert set(code.co_names) == allowed[code.co_name]
        assert set(code.co_freevars) <= {"append_hidden_state", "capture_initial_hidden_state", "index", "key"}


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


# ---- saving -----------------------------------------------------------------------------------------


_HOOKS = {
    "_get_output_dir": ["self", "trial"],
    "_save_checkpoint": ["self", "model", "trial"],
    "_push_from_checkpoint": ["self", "checkpoint_folder"],
    "_finalize_training": ["self", "trial", "num_train_samples", "start_time"],
    "train": ["self", "resume_from_checkpoint", "trial", "ignore_keys_for_eval"],
}


@pytest.mark.parametrize("name", _HOOKS)
def test_hook(name: str) -> None:
    assert list(inspect.signature(getattr(Trainer, name)).parameters) == _HOOKS[name]


def test_a_checkpoint_is_written_below_the_output_dir_and_nowhere_else() -> None:
    source = inspect.getsource(Trainer._save_checkpoint)
    assert PREFIX_CHECKPOINT_DIR == "checkpoint"
    assert 'checkpoint_folder = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"' in source
    assert source.count("_get_output_dir(") == 1
    assert "output_dir = os.path.join(run_dir, checkpoint_folder)" in source
    # The best one is looked for there too, and its path is noted in the state; both are mended.
    assert "self.state.best_model_checkpoint = best_checkpoint_dir" in source
    assert "self.state.save_to_json(os.path.join(output_dir, TRAINER_STATE_NAME))" in source
    assert "in [SaveStrategy.STEPS, SaveStrategy.EPOCH, SaveStrategy.BEST]" in source


def test_rotation_looks_only_into_the_folder_it_is_given() -> None:
    """In a draft it finds one checkpoint, and leaves it."""
    assert "output_dir=run_dir" in inspect.getsource(Trainer._save_checkpoint)
    assert "if len(checkpoints) <= save_total_limit:" in inspect.getsource(rotate_checkpoints)


def test_the_end_of_a_run_deletes_under_this_condition_only() -> None:
    source = inspect.getsource(Trainer._finalize_training)
    assert source.count("shutil.rmtree(") == 1
    condition = (
        "self.args.should_save and self.state.best_model_checkpoint is not None and self.args.save_total_limit == 1"
    )
    assert condition in source


def test_names_that_begin_so_are_not_uploaded() -> None:
    """Drafts and the store's lock lie beside what is pushed to the hub."""
    assert 'ignore_patterns=["_*", f"{PREFIX_CHECKPOINT_DIR}-*"]' in inspect.getsource(Trainer._push_from_checkpoint)


def test_the_settings_are_arguments() -> None:
    assert set(SETTINGS) <= {field.name for field in dataclasses.fields(TrainingArguments)}


# ---- checkpoints of both adapters -------------------------------------------------------------------


def test_what_writes_the_tensors_of_a_checkpoint() -> None:
    """Each of them is looked up where `deferred_writes` replaces it."""
    source = inspect.getsource(transformers.integrations.tpu.save_tpu_checkpoint)
    assert "xm._maybe_convert_to_cpu(" in source
    xm = vars(transformers.trainer)["xm"]
    assert "_maybe_convert_to_cpu(" in inspect.getsource(xm.save)
    assert "torch.save(" in inspect.getsource(xm.save)
    assert "safe_save_file(" in inspect.getsource(transformers.modeling_utils.PreTrainedModel.save_pretrained)
    assert "safe_save_file" in vars(peft.peft_model)


def test_what_skips_the_batches_that_are_done() -> None:
    assert "skip_first_batches(" in inspect.getsource(transformers.trainer.Trainer._run_epoch)
    assert "skip_first_batches" in vars(transformers.trainer)


def test_where_a_resumed_training_begins() -> None:
    source = inspect.getsource(transformers.trainer.Trainer._inner_training_loop)
    assert "= self.set_initial_training_values(args, train_dataloader)" in source
    assert "epochs_trained, steps_trained_in_current_epoch = self._init_training_state(" in source
    source = inspect.getsource(transformers.trainer.Trainer._run_epoch)
    assert "num_update_steps_trained = steps_trained_in_current_epoch // self.args" in source
    assert "do_sync_step = (step + 1) % self.args.gradient_accumulation_steps == 0" in source


def test_what_lightning_counts_in_batches() -> None:
    progress = _TrainingEpochLoop(lightning.pytorch.Trainer(barebones=True)).batch_progress.current
    assert set(vars(progress)) == {"ready", "started", "processed", "completed"}


def test_where_lightning_makes_its_fetcher() -> None:
    source = inspect.getsource(lightning.pytorch.loops.fit_loop._FitLoop.setup_data)
    assert "_select_data_fetcher(trainer, RunningStage.TRAINING)" in source
    assert {"fetched", "done"} <= vars(_PrefetchDataFetcher()).keys()


def test_what_the_user_gave_to_fit_is_on_the_stack() -> None:
    assert "ckpt_path" in inspect.signature(lightning.pytorch.Trainer.fit).parameters
    assert "ckpt_path =" not in inspect.getsource(lightning.pytorch.Trainer.fit)


def test_who_ends_the_process_for_a_signal() -> None:
    assert issubclass(SIGTERMException, SystemExit)
    assert "execute_jit_checkpoint()" in inspect.getsource(JITCheckpointCallback.on_pre_optimizer_step)


def test_the_states_of_accelerate_are_shared() -> None:
    """`_shared_state` of `PartialState` and `AcceleratorState` hold what each instance shows, by these names."""
    names = {"num_processes", "process_index", "local_process_index", "distributed_type", "backend"}
    assert names <= set(accelerate.PartialState._known_attrs)
    for kind in (accelerate.PartialState, accelerate.state.AcceleratorState):
        source = inspect.getsource(kind.__init__)
        assert "self.__dict__ = self._shared_state" in source
        assert not kind._shared_state


def test_what_is_replaced_for_ranks() -> None:
    """The loss that is logged, the operations that are counted, and the factor of a loss that is a common mean."""
    logs = inspect.getsource(Trainer._maybe_log_save_evaluate)
    assert "nested_gather(tr_loss, self.args.parallel_mode).mean().item()" in logs
    assert "distributed_broadcast_scalars([self.current_flos], device=" in inspect.getsource(Trainer.store_flos)
    assert callable(transformers.trainer.distributed_broadcast_scalars)
    loss = inspect.getsource(Trainer.compute_loss)
    assert loss.count("loss *= ") == 1
    assert "self.accelerator.num_processes // self.get_tp_size()" in loss
    assert "self.accelerator.gather(num_items_in_batch.to(device)).sum()" in inspect.getsource(
        Trainer._get_num_items_in_batch
    )


def test_what_is_computed_of_a_batch_on_the_host() -> None:
    """Functions of sizes of pictures, what may be given to them, and the text of a clamp that changes no number."""
    names = {value.__name__ for value in vars(transformers.vision_utils).values() if _computes_of_batch(value)}
    assert {"get_vision_cu_seqlens", "get_vision_position_ids", "get_vision_window_index"} <= names
    assert "get_vision_interpolation_indices_and_weights" in names
    assert 'kwargs.pop("position_ids", None)' in inspect.getsource(transformers.vision_utils.get_vision_position_ids)
    assert "STORE_ATTR" not in {code.opname for code in dis.get_instructions(Qwen2VLModel.get_rope_index)}
    source = inspect.getsource(DetrEncoderLayer.forward)
    assert "if not torch.isfinite(hidden_states).all():\n" in source
    assert "clamp_value = torch.finfo(hidden_states.dtype).max - 1000\n" in source
    # In one process it is what it is given: a sum, divided by the number of processes.
    assert "cloned_tensor /= state.num_processes" in inspect.getsource(accelerate.utils.operations.reduce)


def test_a_static_layer_keeps_tensors_only() -> None:
    """A call with a static cache that holds tokens changes these three tensors, in place, and nothing else."""
    layer = transformers.cache_utils.StaticLayer(max_cache_len=4)
    layer.update(torch.ones(1, 1, 2, 3), torch.ones(1, 1, 2, 3))
    state = {name: getattr(layer, name) for name in ("keys", "values", "cumulative_length")}
    assert {name for name, value in vars(layer).items() if isinstance(value, torch.Tensor)} == set(state)
    others = {name: value for name, value in vars(layer).items() if name not in state}
    layer.update(torch.ones(1, 1, 1, 3), torch.ones(1, 1, 1, 3))
    assert {name: value for name, value in vars(layer).items() if name not in state} == others
    assert all(getattr(layer, name) is value for name, value in state.items())
    assert (layer.is_initialized, layer.cumulative_length.item()) == (True, 3)
    cache = transformers.StaticCache(transformers.GPT2Config(n_layer=2), max_cache_len=4)
    assert (cache.offloading, cache.is_initialized, len(cache.layers)) == (False, False, 2)
    assert transformers.EncoderDecoderCache(cache, cache).is_updated == {0: False, 1: False}
