"""What transformers does otherwise on XLA devices, and what a subclass of its Trainer overrides: as on the CPU."""

from __future__ import annotations

import gc
import warnings
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback, TrainingArguments

import hf_trainer
import xla_adapters
from hf_trainer import XLATrainerMixin
from tests.device import DEVICE
from tests.hf_trainer.scenarios import (
    Classifier,
    arguments,
    assert_close,
    assert_parity,
    gpt2,
    on_cpu,
    ours,
    reference,
    token_samples,
    vector_samples,
)

pytestmark = pytest.mark.isolated


class Collator:
    """A collator with a tokenizer, which is saved with the model."""

    def __init__(self) -> None:
        words = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")

    def __call__(self, samples: list[Any]) -> dict[str, Any]:
        return transformers.default_data_collator(samples)  # type: ignore[no-any-return]


class Overriding(transformers.Trainer):
    """Overrides methods as libraries do (sentence-transformers): without the arguments that stock does not pass."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.called: list[str] = []
        super().__init__(*args, **kwargs)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        self.called.append("_save")
        super()._save(output_dir, state_dict)

    def _load_from_checkpoint(self, checkpoint_path: str) -> None:  # type: ignore[override]
        self.called.append("_load_from_checkpoint")
        super()._load_from_checkpoint(checkpoint_path)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        self.called.append("_track_num_input_tokens")
        super()._track_num_input_tokens(inputs)  # type: ignore[no-untyped-call]

    def get_optimizer_cls_and_kwargs(  # type: ignore[override]
        self, args: TrainingArguments, model: Any = None
    ) -> tuple[Any, dict[str, Any]]:
        assert self.is_in_train
        return torch.optim.SGD, {"lr": 0.5, "optimizer_dict": [{"params": list(self.model.parameters())}]}  # type: ignore[union-attr]


class OverridingOnXLA(XLATrainerMixin, Overriding):  # type: ignore[misc]
    """The same with the mixin before it."""


def _saving(folder: Path, **options: Any) -> dict[str, Any]:
    return {"output_dir": str(folder), "save_strategy": "steps", "save_steps": 2, "max_steps": 2, **options}


def test_files_of_a_plain_module(tmp_path: Path) -> None:
    ours(Classifier(), vector_samples(8), args=arguments(**_saving(tmp_path / "xla")), data_collator=Collator())
    reference(Classifier(), vector_samples(8), args=_saving(tmp_path / "cpu"), data_collator=Collator())
    files = {path.name for path in (tmp_path / "cpu" / "checkpoint-2").iterdir()}
    assert {"model.safetensors", "tokenizer.json"} <= files
    assert files <= {path.name for path in (tmp_path / "xla" / "checkpoint-2").iterdir()}
    one, other = (
        safetensors.torch.load_file(tmp_path / name / "checkpoint-2" / "model.safetensors") for name in ("xla", "cpu")
    )
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=1e-5)


def test_overrides_of_a_subclass_are_called_as_on_the_cpu(tmp_path: Path) -> None:
    calls, losses = [], []
    options: dict[str, Any] = {"include_num_input_tokens_seen": "all"}
    for name in ("cpu", DEVICE):
        for steps, resume in ((2, None), (4, True)):
            args = _saving(tmp_path / name, max_steps=steps, **options)
            if name == DEVICE:
                trainer: Any = OverridingOnXLA(Classifier(), arguments(**args), train_dataset=vector_samples(32))
                trainer.train(resume_from_checkpoint=resume)
            else:
                with on_cpu(Classifier(), vector_samples(32), args=args, trainer_class=Overriding) as trainer:
                    trainer.train(resume_from_checkpoint=resume)
            calls.append(trainer.called)
            losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert calls[:2] == calls[2:]
    assert {"_save", "_load_from_checkpoint", "_track_num_input_tokens"} <= {*calls[2], *calls[3]}
    assert_close(losses[3], losses[1])


def test_a_live_model_is_saved_by_its_library_in_one_transfer(tmp_path: Path) -> None:
    """`gpt2` has tied weights."""
    model = ours(gpt2(), token_samples(16)).trainer.model
    with xla_adapters.count() as counts:
        model.save_pretrained(tmp_path)
        safetensors.torch.save_model(model, str(tmp_path / "other.safetensors"))
    assert (counts.transfers_to_host, counts.eager_ops) == (2, 0)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    here, there = model.state_dict(), loaded.state_dict()
    assert here.keys() == there.keys()
    assert all(torch.equal(value.cpu(), there[name]) for name, value in here.items())
    fresh = gpt2(seed=1)
    safetensors.torch.load_model(fresh, str(tmp_path / "other.safetensors"))
    assert all(torch.equal(value, there[name]) for name, value in fresh.state_dict().items())
    with pytest.raises(RuntimeError, match="share memory"):
        safetensors.torch.save_file(dict(here), str(tmp_path / "shared.safetensors"))


def test_the_only_process_is_the_first_of_its_host(tmp_path: Path) -> None:
    run = ours(Classifier(), vector_samples(8), args=arguments(**_saving(tmp_path, save_on_each_node=True)))
    args = run.trainer.args
    assert (args.local_process_index, args.should_log, args.should_save) == (0, True, True)
    assert run.trainer.state.is_local_process_zero
    assert (tmp_path / "checkpoint-2" / "trainer_state.json").is_file()


def test_internal_callbacks_are_not_listed() -> None:
    run = ours(Classifier(), vector_samples(8), args=arguments(max_steps=1))
    with on_cpu(Classifier(), vector_samples(8)) as stock:
        expected = [type(callback).__name__ for callback in stock.callback_handler.callbacks]
    listed = [type(callback).__name__ for callback in run.trainer.callback_handler.callbacks]
    assert listed == [*expected, "CountEachStep"]


def test_objects_are_gathered_in_one_process() -> None:
    args = {"eval_use_gather_object": True}
    losses = []
    trainer: Any = hf_trainer.Trainer(Classifier(), arguments(**args), eval_dataset=vector_samples(6))
    losses.append(trainer.evaluate()["eval_loss"])
    with on_cpu(Classifier(), None, args=args, eval_dataset=vector_samples(6)) as stock:
        losses.append(stock.evaluate()["eval_loss"])
    assert_close(losses[:1], losses[1:])


def test_a_training_step_outside_of_a_training() -> None:
    batch = transformers.default_data_collator(vector_samples(4))
    trainer: Any = hf_trainer.Trainer(Classifier(), arguments())
    # A training sets it.
    trainer.current_gradient_accumulation_steps = 1
    loss = trainer.training_step(trainer.model, dict(batch))
    with on_cpu(Classifier(), None) as stock:
        stock.current_gradient_accumulation_steps = 1
        expected = stock.training_step(stock.model, dict(batch))  # type: ignore[arg-type]
    assert_close([loss.item()], [expected.item()])
    for ours_, theirs in zip(trainer.model.parameters(), stock.model.parameters(), strict=True):  # type: ignore[union-attr]
        torch.testing.assert_close(ours_.grad.cpu(), theirs.grad, rtol=0, atol=1e-5)


@pytest.mark.parametrize("has_state", [False, True])
def test_an_optimizer_that_was_made_before_the_model_is_moved(has_state: bool) -> None:
    def made(model: torch.nn.Module) -> tuple[Any, Any]:
        optimizer = torch.optim.AdamW(
            [{"params": [parameter], "lr": 0.01 * (1 + index)} for index, parameter in enumerate(model.parameters())]
        )
        if has_state:
            model(torch.ones(2, 4))["logits"].sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4)

    xla_adapters.initialize()
    here, there = Classifier(), Classifier()
    run = ours(here, vector_samples(32), optimizers=made(here))
    expected = reference(there, vector_samples(32), optimizers=made(there))
    assert_close(run.losses, expected.losses)
    run.assert_one_graph(4)


@pytest.mark.parametrize("moves_back", [False, True])
def test_training_again_after_the_model_was_moved_to_the_host(moves_back: bool) -> None:
    with on_cpu(gpt2(), token_samples(16)) as stock:
        for _ in range(3):
            stock.train()
    trainer = hf_trainer.Trainer(gpt2(), arguments(), train_dataset=token_samples(16), eval_dataset=token_samples(4))
    model: Any = trainer.model
    trainer.train()
    model.cpu()
    trainer.evaluate()
    assert model.device.type == DEVICE
    trainer.train()
    model.cpu()
    if moves_back:
        model.to(DEVICE)
        model.tie_weights()
    trainer.train()
    assert model.device.type == DEVICE
    assert {id(value) for value in model.parameters()} == {
        id(value) for group in trainer.optimizer.param_groups for value in group["params"]
    }
    losses = [[entry["loss"] for entry in each.state.log_history if "loss" in entry] for each in (trainer, stock)]
    assert_close(*losses)


def test_the_filter_of_losses_says_why_it_does_nothing() -> None:
    class Nan(Classifier):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
            results = super().forward(x, labels)
            return {**results, "loss": results["loss"] * float("nan")}

    with pytest.warns(UserWarning, match="logging_nan_inf_filter"):
        ours(Nan(), vector_samples(8))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*logging_nan_inf_filter")
        ours(Nan(), vector_samples(8), args=arguments(logging_nan_inf_filter=False))


class Inference(TrainerCallback):
    """Computes under `inference_mode` after each step, as evaluators of sentence-transformers do."""

    def __init__(self) -> None:
        self.sums: list[float] = []

    @torch.inference_mode()
    def on_step_end(self, *args: Any, model: Any, **kwargs: Any) -> None:
        logits = model(torch.ones(2, 4, device=next(model.parameters()).device))["logits"]
        assert not logits.requires_grad
        self.sums.append(logits.view(-1)[1:].sum().item())


def test_inference_mode_between_steps() -> None:
    ours_, theirs = Inference(), Inference()
    ours(Classifier(), vector_samples(16), callbacks=[ours_])
    reference(Classifier(), vector_samples(16), callbacks=[theirs])
    assert_close(ours_.sums, theirs.sums)
    # The model is still on the device, also for code that runs after the training.
    model = ours(Classifier(), vector_samples(8)).trainer.model
    with torch.inference_mode():
        logits = model(torch.ones(2, 4, device=DEVICE))["logits"]
        assert not torch.is_inference_mode_enabled()
    assert not logits.requires_grad
    torch.testing.assert_close(logits.cpu(), model.cpu()(torch.ones(2, 4))["logits"].detach())
    ours_.sums.clear()
    gc.collect()
    with torch.inference_mode():
        assert torch.is_inference_mode_enabled()


class Tied(torch.nn.Module):
    """A plain module whose weights are tied by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(8, 4)
        self.head = torch.nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": torch.nn.functional.cross_entropy(self.head(self.embedding(x)), labels)}


def test_a_plain_module_with_tied_weights_is_saved(tmp_path: Path) -> None:
    """On the CPU safetensors refuses it."""
    samples = [{"x": torch.tensor(n % 8), "labels": torch.tensor((n + 1) % 8)} for n in range(16)]
    options: dict[str, Any] = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    trainer = hf_trainer.Trainer(Tied(), arguments(str(tmp_path), **options), train_dataset=samples)
    trainer.train()
    weights = safetensors.torch.load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    assert weights.keys() == {"embedding.weight", "head.weight"}
    assert torch.equal(weights["embedding.weight"], weights["head.weight"])
    again = hf_trainer.Trainer(Tied(), arguments(str(tmp_path), **options), train_dataset=samples)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert torch.equal(again.model.head.weight.cpu(), trainer.model.head.weight.cpu())
    assert again.model.head.weight is again.model.embedding.weight


class Probing(TrainerCallback):
    """Evaluates by a loop of its own, as many callbacks do."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.losses: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        with torch.no_grad():
            for batch in self.trainer.get_eval_dataloader():
                self.losses.append(float(model(**batch)["loss"]))


def test_a_loader_that_a_callback_reads_has_its_batches_on_the_device() -> None:
    data, options = vector_samples(16), {"eval_dataset": vector_samples(6, seed=1)}
    theirs, mine = Probing(), Probing()
    with on_cpu(Classifier(), data, callbacks=[theirs], **options) as trainer:
        theirs.trainer = trainer
        trainer.train()
    made = hf_trainer.Trainer(model=Classifier(), args=arguments(), train_dataset=data, callbacks=[mine], **options)
    mine.trainer = made
    made.train()
    assert len(theirs.losses) == 8
    assert_close(mine.losses, theirs.losses)
    # The trainer's own loops leave them on the host, from where the step takes them.
    with xla_adapters.count() as counts:
        made.evaluate()
    assert counts.eager_ops == 0


class Growing(TrainerCallback):
    """Gives the model more tokens after its second step; their embeddings are not left to chance."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 2:
            old = model.get_input_embeddings().weight.shape[0]
            model.resize_token_embeddings(old + 16)
            with torch.no_grad():
                model.get_input_embeddings().weight[old:] = 0.01


@pytest.mark.parametrize("step_replay", ["auto", False])
def test_embeddings_are_resized_during_a_training(step_replay: bool | str) -> None:
    run = assert_parity(
        gpt2,
        token_samples(32),
        args={"optim": "sgd", "max_steps": 8},
        xla={"step_replay": step_replay},
        callbacks=[Growing()],
    )
    assert run.trainer.model.config.vocab_size == gpt2().config.vocab_size + 16
