"""What the checkpoints of both adapters rely on inside transformers, accelerate, torch_xla and Lightning."""

from __future__ import annotations

import inspect

import lightning.pytorch.loops.fit_loop
import peft.peft_model
import transformers.integrations.tpu
import transformers.modeling_utils
import transformers.trainer
from lightning.pytorch import Trainer
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.utilities.exceptions import SIGTERMException
from transformers.trainer_jit_checkpoint import JITCheckpointCallback


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


def test_where_lightning_makes_its_fetcher() -> None:
    source = inspect.getsource(lightning.pytorch.loops.fit_loop._FitLoop.setup_data)
    assert "_select_data_fetcher(trainer, RunningStage.TRAINING)" in source
    assert {"fetched", "done"} <= vars(_PrefetchDataFetcher()).keys()


def test_what_the_user_gave_to_fit_is_on_the_stack() -> None:
    assert "ckpt_path" in inspect.signature(Trainer.fit).parameters
    assert "ckpt_path =" not in inspect.getsource(Trainer.fit)


def test_who_ends_the_process_for_a_signal() -> None:
    assert issubclass(SIGTERMException, SystemExit)
    assert "execute_jit_checkpoint()" in inspect.getsource(JITCheckpointCallback.on_pre_optimizer_step)
