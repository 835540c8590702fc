"""The private hooks of transformers and accelerate that hf_trainer overrides or replaces, by signature."""

from __future__ import annotations

import inspect
from typing import Any

import accelerate.accelerator
import accelerate.data_loader
import accelerate.optimizer
import accelerate.utils.operations
import pytest
import torch
import transformers
import transformers.trainer_pt_utils
from transformers import Trainer

_TRAINER_HOOKS = {
    "_inner_training_loop": ["self", "batch_size", "args", "resume_from_checkpoint", "trial", "ignore_keys_for_eval"],
    "_prepare_for_training": ["self", "max_steps", "train_dataloader", "resume_from_checkpoint"],
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
