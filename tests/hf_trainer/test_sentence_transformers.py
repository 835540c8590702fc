"""sentence-transformers under `XLATrainerMixin`: training, and `encode` afterwards."""

from __future__ import annotations

import functools
import tempfile
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast, TrainerCallback

import xla_adapters
from hf_trainer import XLATrainerMixin
from hf_trainer.libraries import reads_allowed
from tests.hf_trainer.scenarios import assert_close, steps_of, train, without_xla
from xla_adapters import GraphBreakWarning, get_runtime

pytestmark = pytest.mark.isolated

datasets = pytest.importorskip("datasets")
sentence_transformers = pytest.importorskip("sentence_transformers")
losses = pytest.importorskip("sentence_transformers.losses")
models = pytest.importorskip("sentence_transformers.models")
_Stock = sentence_transformers.SentenceTransformerTrainer
_TEXTS = ["a first one", "b", "some other text, longer"]


class _Trainer(XLATrainerMixin, _Stock):  # type: ignore[misc, valid-type]
    pass


def _model(device: str) -> Any:
    folder = tempfile.mkdtemp()
    torch.manual_seed(0)
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    without = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    BertModel(BertConfig(vocab_size=128, max_position_embeddings=64, **small, **without)).save_pretrained(folder)
    characters = ["<pad>", "<unk>", *map(chr, range(32, 127))]
    tokens = Tokenizer(WordLevel({one: index for index, one in enumerate(characters)}, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="<pad>", unk_token="<unk>").save_pretrained(folder)
    transformer = models.Transformer(folder, max_seq_length=16)
    pooling = models.Pooling(16)
    return sentence_transformers.SentenceTransformer(modules=[transformer, pooling], device=device)


def _arguments(**options: Any) -> Any:
    return sentence_transformers.SentenceTransformerTrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=4,
        max_steps=4,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        learning_rate=1e-2,
        **options,
    )


def _trainer(kind: Any, device: str, loss_of: Any = None, label: bool = False, **options: Any) -> Any:
    model = _model(device)
    rows: list[dict[str, Any]] = [
        {"anchor": f"q{index:02d}", "positive": f"answer {index:02d}"} | ({"label": index % 2} if label else {})
        for index in range(16)
    ]
    loss = (loss_of or losses.MultipleNegativesRankingLoss)(model)
    return kind(model=model, args=_arguments(**options), train_dataset=datasets.Dataset.from_list(rows), loss=loss)


def test_encode_after_a_training() -> None:
    get_runtime().device.initialize()
    with without_xla():
        stock = _trainer(_Stock, "cpu", use_cpu=True)
        stock.train()
        expected = stock.model.encode(_TEXTS)
    run = train(_trainer(_Trainer, "xla"))
    theirs = [entry["loss"] for entry in stock.state.log_history if "loss" in entry]
    assert_close(run.losses, theirs, tolerance=1e-4)
    assert [step.executions for step in run.steps] == [1] * len(run.steps), run.explain()
    model = run.trainer.model
    assert model.device.type == "xla"
    np.testing.assert_allclose(model.encode(_TEXTS), expected, atol=1e-4)
    np.testing.assert_allclose(model.encode(_TEXTS, convert_to_tensor=True).cpu().numpy(), expected, atol=1e-4)


def test_a_loss_that_computes_embeddings_twice() -> None:
    """It looks which columns of the batch are used: the host knows that."""

    def loss_of(model: Any) -> Any:
        return losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=2)

    get_runtime().device.initialize()
    with without_xla():
        stock = _trainer(_Stock, "cpu", loss_of, use_cpu=True)
        stock.train()
    run = train(_trainer(_Trainer, "xla", loss_of))
    assert_close(run.losses, [entry["loss"] for entry in stock.state.log_history if "loss" in entry], tolerance=1e-4)
    assert [step.executions for step in run.steps] == [1] * len(run.steps), run.explain()


@pytest.mark.slow
def test_a_loss_that_selects_pairs_by_their_distance() -> None:
    """The step is executed in parts, and that is told once per line."""
    get_runtime().device.initialize()
    with without_xla():
        stock = _trainer(_Stock, "cpu", losses.OnlineContrastiveLoss, label=True, use_cpu=True)
        stock.train()
    with pytest.warns(GraphBreakWarning, match="in compute_loss_from_embeddings"):
        run = train(_trainer(_Trainer, "xla", losses.OnlineContrastiveLoss, label=True))
    assert_close(run.losses, [entry["loss"] for entry in stock.state.log_history if "loss" in entry], tolerance=1e-4)


def test_the_second_computation_draws_the_same_numbers() -> None:
    gradcache = pytest.importorskip("sentence_transformers.base.losses.gradcache")
    theirs = gradcache.RandContext
    trainer = _trainer(_Trainer, "xla")
    drawn = []
    ones = torch.ones(64, device="xla")
    with reads_allowed(trainer):
        for _ in range(2):
            with xla_adapters.step():
                context = gradcache.RandContext(ones)
                first, second = torch.nn.functional.dropout(ones), torch.nn.functional.dropout(ones)
                with context:
                    again = torch.nn.functional.dropout(ones)
                third = torch.nn.functional.dropout(ones)
            drawn.append([value.cpu() for value in (first, second, third, again)])
    assert gradcache.RandContext is theirs
    for first, second, third, again in drawn:
        assert torch.equal(first, again)
        assert not torch.equal(first, second)
        assert not torch.equal(second, third)
    assert not torch.equal(drawn[0][0], drawn[1][0])


class _Counting(_Trainer):
    calls = 0

    def collect_features(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return super().collect_features(*args, **kwargs)


class _OtherLoss(TrainerCallback):
    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 5:
            self.trainer.loss = losses.MultipleNegativesRankingLoss(self.trainer.model, scale=3.0)


def _ten_steps(kind: Any, *callbacks: Any, **options: Any) -> Any:
    trainer = _trainer(functools.partial(kind, **options), "cpu")
    trainer.args.max_steps = 10
    for callback in callbacks:
        trainer.add_callback(callback(trainer))
    trainer.train()
    return trainer


def test_another_loss_takes_effect_in_replays() -> None:
    traced, replayed = (_ten_steps(_Trainer, _OtherLoss, step_replay=replay) for replay in (False, "auto"))
    assert steps_of(replayed).train.replays >= 4, steps_of(replayed).train.replay_reasons
    found = [[entry["loss"] for entry in one.state.log_history if "loss" in entry] for one in (traced, replayed)]
    assert found[0] == found[1]


def test_a_method_of_ones_own_that_the_loss_is_computed_by_is_called_in_each_step() -> None:
    trainer = _ten_steps(_Counting)
    assert trainer.calls == 10
    assert steps_of(trainer).train.replays == 0
