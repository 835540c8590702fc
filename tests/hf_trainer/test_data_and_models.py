"""Kinds of data, models and extensions around the step: streams, LoRA, token counts, losses, loggers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import peft
import pytest
import torch
import transformers
from torch import nn

import hf_trainer
from tests.hf_trainer.scenarios import (
    VOCABULARY,
    Classifier,
    Sample,
    arguments,
    assert_close,
    assert_parity,
    gpt2,
    ours,
    reference,
    steps_of,
    token_samples,
    train,
    vector_samples,
    without_xla,
)
from tests.isolation import isolated
from xla_adapters.errors import DenseGradientWarning


@isolated
def test_iterable_dataset() -> None:
    class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[Sample]:
            return iter(vector_samples(20))

    run = assert_parity(Classifier, Stream(), args={"max_steps": 7})
    run.assert_one_graph(7)


@isolated
@pytest.mark.parametrize("workers", [0, 1])
def test_streaming_datasets(workers: int) -> None:
    def rows() -> Iterator[dict[str, Any]]:
        for sample in vector_samples(20):
            yield {"x": sample["x"].tolist(), "labels": sample["labels"]}

    stream = datasets.IterableDataset.from_generator(rows).shuffle(seed=0, buffer_size=8)
    run = assert_parity(Classifier, stream, args={"max_steps": 5, "dataloader_num_workers": workers})
    run.assert_one_graph(5)


@isolated
def test_map_style_datasets_with_columns_the_model_does_not_take() -> None:
    table = datasets.Dataset.from_list(
        [{"x": s["x"].tolist(), "labels": s["labels"], "name": "unused"} for s in vector_samples(16)]
    )
    run = assert_parity(Classifier, table)
    run.assert_one_graph(4)


@isolated
def test_group_by_length() -> None:
    """Two lengths are two graphs, in any order."""
    data = token_samples(8, length=6) + token_samples(8, length=10, seed=1)
    args = {"train_sampling_strategy": "group_by_length", "max_steps": 8}
    run = assert_parity(gpt2, data, args=args, data_collator=_pad)
    assert run.counts.compiles <= 3
    assert [step.executions for step in run.steps] == [1] * 8


def _pad(samples: list[Sample]) -> dict[str, torch.Tensor]:
    def stack(name: str, fill: int) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence([s[name] for s in samples], batch_first=True, padding_value=fill)

    ids = stack("input_ids", 0)
    lengths = torch.tensor([len(s["input_ids"]) for s in samples])
    mask = (torch.arange(ids.shape[1])[None] < lengths[:, None]).long()
    return {"input_ids": ids, "labels": stack("labels", -100), "attention_mask": mask}


@isolated
def test_masks_are_not_looked_into() -> None:
    """Stock transformers reads the mask on the host in every forward. The losses agree with it."""
    data = [sample for pair in zip(token_samples(8), token_samples(8, length=5), strict=True) for sample in pair]
    args = {"train_sampling_strategy": "sequential"}
    run = assert_parity(gpt2, data, args=args, data_collator=_pad)
    run.assert_one_graph(4)


@isolated
@pytest.mark.parametrize("kind", ["all", "non_padding"])
def test_counting_input_tokens(kind: str) -> None:
    data = token_samples(8) + token_samples(8, length=5, seed=1)
    args = {"include_num_input_tokens_seen": kind, "train_sampling_strategy": "sequential"}
    expected = reference(gpt2(), data, args=args, data_collator=_pad)
    run = ours(gpt2(), data, args=arguments(**args), data_collator=_pad)
    assert_close(run.losses, expected.losses)
    seen = run.trainer.state.num_input_tokens_seen
    assert seen == expected.trainer.state.num_input_tokens_seen == (8 * 8 + 8 * 5)
    assert run.logged("num_input_tokens_seen") == expected.logged("num_input_tokens_seen")
    # Counting costs no transfer: there is one per logged step, and one at the end.
    assert run.counts.transfers_to_host <= 4 + 1
    assert all(step.transfers_to_host == 0 for step in run.steps)


@isolated
def test_lora() -> None:
    def make() -> Any:
        config = peft.LoraConfig(
            r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False
        )
        model = gpt2()
        torch.manual_seed(1)
        return peft.get_peft_model(model, config)

    frozen = {name: value.clone() for name, value in make().state_dict().items() if "lora" not in name}
    run = assert_parity(make, token_samples(16), args={"learning_rate": 0.1})
    run.assert_one_graph(4)
    after = run.parameters()
    assert all(torch.equal(after[name], value) for name, value in frozen.items())
    assert len(run.trainer.optimizer.state) == 2


@isolated
def test_lora_with_checkpointing_saves_adapters(tmp_path: Path) -> None:
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.1)
    args = {"gradient_checkpointing": True, "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    whole = ours(peft.get_peft_model(gpt2(), config), token_samples(16), args=arguments(str(tmp_path), **args))
    whole.assert_one_graph(4)
    assert (tmp_path / "checkpoint-2" / "adapter_model.safetensors").is_file()
    resumed = ours(
        peft.get_peft_model(gpt2(), config),
        token_samples(16),
        args=arguments(str(tmp_path), **args),
        train_options={"resume_from_checkpoint": str(tmp_path / "checkpoint-2")},
    )
    assert resumed.losses == whole.losses


@isolated
def test_compute_loss_func() -> None:
    def loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        total = torch.nn.functional.cross_entropy(outputs["logits"], labels, reduction="sum", label_smoothing=0.1)
        return total / (num_items_in_batch if num_items_in_batch is not None else labels.numel())

    args = {"gradient_accumulation_steps": 2, "max_steps": 3}
    run = assert_parity(
        Classifier, vector_samples(24), args=args, compute_loss_func=loss, xla={"accumulation": "unrolled"}
    )
    run.assert_one_graph(3)


@isolated
def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    args = arguments(str(tmp_path / "out"), report_to=["tensorboard"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
        run = ours(Classifier(), vector_samples(16), args=args)
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    written = [event.value for event in events.Scalars("train/loss")]
    assert_close(written, run.losses, 1e-6)
    run.assert_one_graph(4)
    assert run.counts.transfers_to_host <= 4 + 1


@isolated
def test_logging_now_and_then_reads_now_and_then() -> None:
    data, args = vector_samples(32), {"max_steps": 8, "logging_steps": 4}
    run = assert_parity(Classifier, data, args=args)
    run.assert_one_graph(8)
    assert len(run.losses) == 2
    assert run.counts.transfers_to_host <= 2 + 1


class Weighted(transformers.Trainer):
    """A user's trainer that overrides the loss, the step and the optimizer."""

    calls: list[str]

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        weight = torch.tensor([1.0, 2.0, 0.5], device=labels.device)
        loss = torch.nn.functional.cross_entropy(outputs["logits"], labels, weight=weight)
        return (loss, outputs) if return_outputs else loss

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        inputs = {**inputs, "x": inputs["x"] * 0.5}
        return super().training_step(model, inputs, num_items_in_batch) * 2

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.args.learning_rate, momentum=0.9)
        return self.optimizer


class WeightedOnXLA(hf_trainer.XLATrainerMixin, Weighted):
    pass


@isolated
def test_mixin_on_a_trainer_of_the_user() -> None:
    data, held_out = vector_samples(16), vector_samples(6, seed=1)
    with without_xla():
        cpu = Weighted(model=Classifier(), args=arguments(use_cpu=True), train_dataset=data, eval_dataset=held_out)
        cpu.train()
        expected = cpu.evaluate()["eval_loss"]
    trainer = WeightedOnXLA(model=Classifier(), args=arguments(), train_dataset=data, eval_dataset=held_out)
    run = train(trainer)
    run.assert_one_graph(4)
    assert_close(run.losses, [entry["loss"] for entry in cpu.state.log_history if "loss" in entry])
    assert_close([trainer.evaluate()["eval_loss"]], [expected])


@isolated
@pytest.mark.parametrize("mode", ["eager", "lazy", "eager+dynamo"])
def test_other_modes_give_the_same_losses(mode: str) -> None:
    args = {"gradient_accumulation_steps": 2, "max_steps": 3, "eval_strategy": "steps", "eval_steps": 3}
    run = assert_parity(
        Classifier, vector_samples(24), args=args, eval_dataset=vector_samples(6), xla={"xla_mode": mode}
    )
    if mode == "eager":
        assert steps_of(run.trainer).train.graphs == 0
        assert run.counts.compiles == 0
    elif mode == "lazy":
        assert run.counts.eager_ops == 0
    else:
        # As in the default mode: a graph for the first micro batch and one for the second, with the update.
        assert steps_of(run.trainer).train.graphs == 2
        assert run.counts.executions == 6 + 2


@isolated
@pytest.mark.parametrize("mode", ["eager", "lazy", "eager+dynamo"])
def test_other_modes_train_a_transformer(mode: str) -> None:
    assert_parity(gpt2, token_samples(12), args={"max_steps": 3}, xla={"xla_mode": mode})


class _NormedTokens(nn.Module):
    """Sparse embeddings of limited length, and a head whose weight is divided by its spectral norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, 8, max_norm=0.8, sparse=True)
        self.head = nn.utils.parametrizations.spectral_norm(nn.Linear(8, VOCABULARY))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.head(self.embedding(input_ids))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


@isolated
def test_sparse_embeddings_and_a_spectral_norm() -> None:
    args = {"optim": "sgd", "max_steps": 6, "max_grad_norm": 0.0}
    with pytest.warns(DenseGradientWarning):
        run = assert_parity(_NormedTokens, token_samples(24), args=args)
    run.assert_one_graph(6)
    assert steps_of(run.trainer).train.replays > 0
