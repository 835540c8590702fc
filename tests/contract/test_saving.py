"""What `hf_trainer.checkpoints` assumes of the way transformers saves."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from hf_trainer.checkpoints import SETTINGS

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
