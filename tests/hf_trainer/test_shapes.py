"""`shapes=` of the trainer: few graphs, and the numbers of stock transformers on batches that are not extended."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, SequentialSampler

import hf_trainer
from tests.hf_trainer.scenarios import (
    Classifier,
    Run,
    arguments,
    assert_close,
    gpt2,
    on_cpu,
    ours,
    reference,
    steps_of,
    vector_samples,
)
from tests.tiny_models import VOCABULARY, tiny
from xla_adapters.data.shapes import ShapePolicy, lengths_of
from xla_adapters.errors import CheckpointError, ConfigError

pytestmark = pytest.mark.isolated(timeout=400)
_BERT = {"num_labels": 3}
# The family, the head, options of the model, and what its samples have as labels.
_MODELS: dict[str, tuple[str, Any, dict[str, Any], str]] = {
    "gpt2": ("gpt2", None, {"n_positions": 64}, "tokens"),
    "gpt-neo": ("gpt-neo", None, {}, "tokens"),
    "llama": ("llama", None, {}, "tokens"),
    "mixtral": ("mixtral", None, {"num_key_value_heads": 2}, "tokens"),
    "bert, classes": ("bert", None, _BERT, "class"),
    "bert, tokens": ("bert", transformers.BertForTokenClassification, _BERT, "classes"),
    "bert, masked": ("bert", transformers.BertForMaskedLM, {}, "tokens"),
    "gpt2, classes": (
        *("gpt2", transformers.GPT2ForSequenceClassification),
        *({"n_positions": 64, "num_labels": 3, "pad_token_id": 0}, "class"),
    ),
    "t5": ("t5", None, {}, "summary"),
    "bart": ("bart", None, {}, "summary"),
}
_EPOCHS, _ROWS, _COUNT = 2, 4, 22


def text_samples(count: int, labels: str, *, seed: int = 0) -> list[dict[str, Any]]:
    """Samples of 3 to 24 tokens."""
    numbers = random.Random(seed)
    samples = []
    for _ in range(count):
        length = min(24, max(3, int(numbers.lognormvariate(2, 0.6))))
        ids = [numbers.randrange(3, VOCABULARY) for _ in range(length)]
        sample: dict[str, Any] = {"input_ids": ids}
        if labels == "positions":
            sample |= {name: numbers.randrange(length) for name in ("start_positions", "end_positions")}
        else:
            sample["labels"] = {
                "tokens": list(ids),
                "class": numbers.randrange(3),
                "classes": [token % 3 for token in ids],
                "summary": ids[: length // 2 + 1],
            }[labels]
        samples.append(sample)
    return samples


def padded(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A collator as users write it: to the longest of the batch."""
    longest = max(len(sample["input_ids"]) for sample in samples)
    rows = {name: [sample[name] for sample in samples] for name in samples[0]}
    rows["attention_mask"] = [[1] * len(ids) for ids in rows["input_ids"]]
    for name, fill in (("input_ids", 0), ("attention_mask", 0), ("labels", -100)):
        if name in rows and isinstance(rows[name][0], list):
            size = longest if name != "labels" else max(map(len, rows[name]))
            rows[name] = [row + [fill] * (size - len(row)) for row in rows[name]]
    return {name: torch.tensor(values) for name, values in rows.items()}


def both(make: Any, data: Any, *, shapes: Any, args: dict[str, Any], **options: Any) -> tuple[Run, Run]:
    """The run of stock transformers on the CPU, on the batches in the order of ours; and ours."""
    found = lengths_of(data, "input_ids")
    assert found is not None
    policy = ShapePolicy.resolve(shapes)
    assert policy is not None

    class InBuckets(transformers.Trainer):
        def get_train_dataloader(self) -> Any:
            if policy.tokens_per_batch is None:
                return super().get_train_dataloader()
            batches = policy.fit(*found).batch_sampler(found[0], seed=42)
            loader = DataLoader(self.train_dataset, batch_sampler=batches, collate_fn=self.data_collator)  # type: ignore[arg-type,var-annotated]
            return self.accelerator.prepare(loader)

        def _get_train_sampler(self, *_: Any) -> Any:
            return policy.fit(*found, rows=_ROWS).sampler(
                found[0], _ROWS, seed=42, drop_last=policy.last_batch == "drop"
            )

    expected = reference(make(), data, args=args, trainer_class=InBuckets, **options)
    return expected, ours(make(), data, args=arguments(**args), shapes=shapes, **options)


def _summed(prediction: Any) -> dict[str, float]:
    """Numbers that depend on all results: their shapes, and sums that tell places apart."""
    found = {}
    for name, values in (("predictions", prediction.predictions), ("labels", prediction.label_ids)):
        for number, value in enumerate(values if isinstance(values, tuple) else (values,)):
            value = numpy.asarray(value, dtype=numpy.float64)
            weights = numpy.arange(1, value.size + 1).reshape(value.shape) % 7 + 1
            found |= {f"{name}_{number}_size{axis}": float(size) for axis, size in enumerate(value.shape)}
            found[f"{name}_{number}_sum"] = float((value * weights).sum() / value.size)
    return found


def assert_same(actual: Run, expected: Run, tolerance: float = 1e-5) -> None:
    """Losses, metrics of evaluations and weights."""
    assert_close(actual.losses, expected.losses, tolerance)
    names = [
        name
        for entry in expected.trainer.state.log_history
        for name in entry
        if name.startswith("eval_") and "runtime" not in name and "per_second" not in name
    ]
    for name in dict.fromkeys(names):
        assert_close(actual.logged(name), expected.logged(name), 10 * tolerance)
    weights = expected.parameters()
    for name, value in actual.parameters().items():
        torch.testing.assert_close(value, weights[name], atol=10 * tolerance, rtol=1e-3)


@pytest.mark.parametrize("model", _MODELS)
def test_as_on_the_cpu_without_padding(model: str) -> None:
    family, kind, options, labels = _MODELS[model]
    args = {"max_steps": -1, "num_train_epochs": _EPOCHS, "eval_strategy": "epoch", "learning_rate": 1e-3}
    args |= {"optim": "sgd", "learning_rate": 0.05} if family == "t5" else {}
    expected, actual = both(
        lambda: tiny(family, kind=kind, **options),
        text_samples(_COUNT, labels),
        shapes={"buckets": 2},
        args={**args, "include_num_input_tokens_seen": "all"},
        data_collator=padded,
        eval_dataset=text_samples(10, labels, seed=1),
        compute_metrics=_summed,
    )
    assert_same(actual, expected)
    # 6 steps in each epoch, the last of 2 rows; evaluations have 3 batches.
    steps = steps_of(actual.trainer)
    assert len(actual.losses) == 6 * _EPOCHS
    assert steps.train.graphs == 2, steps.train.events
    assert steps.evaluation["eval_step"].graphs == 2, steps.evaluation["eval_step"].events
    assert [step.executions for step in actual.steps] == [1] * 6 * _EPOCHS
    assert actual.trainer.state.num_input_tokens_seen == expected.trainer.state.num_input_tokens_seen


@pytest.mark.parametrize("accumulated", [1, 2])
def test_batches_of_as_many_tokens(accumulated: int) -> None:
    args = {"max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": accumulated, "learning_rate": 1e-3}
    data = text_samples(40, "tokens")
    expected, actual = both(
        lambda: tiny("llama"),
        data,
        shapes={"buckets": 3, "tokens_per_batch": 80},
        args=args,
        data_collator=padded,
    )
    assert_same(actual, expected)
    found = lengths_of(data, "input_ids")
    assert found is not None
    shapes = ShapePolicy(buckets=3, tokens_per_batch=80).fit(*found)
    assert shapes.rows_of == tuple(80 // bound for bound in shapes.bounds)
    # The first batch of an update, the last, and one that is both at the end of an epoch.
    kinds = 1 if accumulated == 1 else 3
    assert steps_of(actual.trainer).train.graphs <= 3 * kinds
    assert len(actual.losses) == 2 * -(-len(shapes.batch_sampler(found[0])) // accumulated)


def test_as_many_tokens_need_lengths(caplog: pytest.LogCaptureFixture) -> None:
    args = arguments(max_steps=2)
    ours(Classifier(), vector_samples(16), args=args, shapes={"tokens_per_batch": 80})
    assert "tokens_per_batch=80 has no effect: it needs a dataset with a length" in caplog.text


class _InOrder(hf_trainer.Trainer):
    def _get_train_sampler(self, *args: Any, **options: Any) -> Any:
        super()._get_train_sampler(*args, **options)
        return SequentialSampler(self.train_dataset)  # type: ignore[arg-type]


def test_a_sampler_of_the_users_own_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    args = arguments(str(tmp_path), per_device_train_batch_size=5)
    options = {"train_dataset": text_samples(20, "tokens"), "data_collator": padded}
    trainer = _InOrder(tiny("llama"), args, **options, shapes={"buckets": 2, "tokens_per_batch": 80})  # type: ignore[arg-type]
    assert [len(batch["input_ids"]) for batch in trainer.get_train_dataloader()] == [5] * 4
    assert "tokens_per_batch=80 has no effect" in caplog.text


def test_accumulation() -> None:
    args = {"max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": 2}
    expected, actual = both(
        lambda: gpt2(n_positions=64),
        text_samples(_COUNT, "tokens"),
        shapes={"buckets": 2},
        args=args,
        data_collator=padded,
    )
    assert_same(actual, expected)


def test_images_have_a_last_batch_only() -> None:
    images = torch.rand(10, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    data = [{"pixel_values": image, "labels": number % 2} for number, image in enumerate(images)]
    args = {"max_steps": -1, "num_train_epochs": 2}
    expected = reference(tiny("vit"), data, args=args)
    actual = ours(tiny("vit"), data, args=arguments(**args), shapes="auto")
    # The order is stock's.
    assert_same(actual, expected)
    assert steps_of(actual.trainer).train.graphs == 1


def test_transcripts() -> None:
    """Spectrograms have one length, their transcripts have many."""
    numbers = random.Random(0)
    features = torch.rand(12, 8, 16, generator=torch.Generator().manual_seed(0))
    data = [
        {"input_features": row, "labels": [numbers.randrange(3, VOCABULARY) for _ in range(numbers.randrange(2, 9))]}
        for row in features
    ]

    def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        longest = max(len(sample["labels"]) for sample in samples)
        labels = [sample["labels"] + [-100] * (longest - len(sample["labels"])) for sample in samples]
        return {
            "input_features": torch.stack([sample["input_features"] for sample in samples]),
            "labels": torch.tensor(labels),
        }

    policy = ShapePolicy(buckets=2, length_of="labels")
    lengths = [len(sample["labels"]) for sample in data]

    class InBuckets(transformers.Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return policy.fit(lengths, rows=_ROWS).sampler(lengths, _ROWS, seed=42)

    args = {"max_steps": -1, "num_train_epochs": 2}
    make = lambda: tiny("whisper")  # noqa: E731
    expected = reference(make(), data, args=args, data_collator=collate, trainer_class=InBuckets)
    actual = ours(make(), data, args=arguments(**args), data_collator=collate, shapes=policy)
    assert_same(actual, expected)
    assert steps_of(actual.trainer).train.graphs == 2


# ---- the last batch -------------------------------------------------------------------------------


class Normalized(Classifier):
    """Sees all rows of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.insert(2, nn.BatchNorm1d(8))


@pytest.mark.parametrize("make", [Classifier, Normalized])
def test_a_loss_that_is_not_known_keeps_the_last_batch(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    data, args = vector_samples(10), {"max_steps": -1, "num_train_epochs": 2}
    expected = reference(make(), data, args=args)
    with caplog.at_level(logging.WARNING):
        actual = ours(make(), data, args=arguments(**args), shapes="auto")
    assert_same(actual, expected)
    assert steps_of(actual.trainer).train.graphs == 2
    told = [message for message in caplog.messages if "a batch of 2 rows keeps them" in message]
    assert len(told) == 1
    assert "labels are -100" in told[0]


def test_dropping_the_last_batch() -> None:
    args = {"max_steps": -1, "num_train_epochs": 2}
    actual = ours(Classifier(), vector_samples(10), args=arguments(**args), shapes={"last_batch": "drop"})
    assert len(actual.losses) == 4
    assert steps_of(actual.trainer).train.graphs == 1


def test_losses_on_several_classes_keep_the_last_batch() -> None:
    images = torch.rand(10, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    data = [{"pixel_values": image, "labels": [float(number % 2), 1.0]} for number, image in enumerate(images)]
    options = {"num_labels": 2, "problem_type": "multi_label_classification"}
    args = {"max_steps": -1, "num_train_epochs": 2, "optim": "sgd"}
    expected = reference(tiny("vit", **options), data, args=args)
    actual = ours(tiny("vit", **options), data, args=arguments(**args), shapes="auto")
    assert_same(actual, expected)
    assert steps_of(actual.trainer).train.graphs == 2


def test_own_loss_functions_keep_it() -> None:
    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        return (outputs["logits"] ** 2).mean()

    args = {"max_steps": -1, "num_train_epochs": 2}
    options: dict[str, Any] = {"data_collator": padded, "compute_loss_func": loss}
    make = lambda: tiny("bert", **_BERT)  # noqa: E731
    shapes = {"buckets": 2, "fill": {"labels": -100}}
    expected, actual = both(make, text_samples(_COUNT, "class"), shapes=shapes, args=args, **options)
    assert_same(actual, expected)
    assert steps_of(actual.trainer).train.graphs == 3


# ---- recompiles, resume, and what cannot work --------------------------------------------------------


def test_announced_lengths_are_no_recompiles(capsys: pytest.CaptureFixture[str], caplog: Any) -> None:
    args = {"max_steps": -1, "num_train_epochs": 2}
    options: dict[str, Any] = {"data_collator": padded, "on_recompile": "error", "shapes": {"buckets": 3}}
    with caplog.at_level(logging.WARNING, "xla_adapters"):
        actual = ours(gpt2(n_positions=64), text_samples(_COUNT, "tokens"), args=arguments(**args), **options)
    assert steps_of(actual.trainer).train.graphs == 3
    assert caplog.messages == []
    assert "shapes of the training: 3 lengths of input_ids (" in capsys.readouterr().err


def _resumable(folder: Path, **options: Any) -> Any:
    args = {"max_steps": -1, "num_train_epochs": 2, "save_strategy": "steps", "save_steps": 4}
    return {
        "data": text_samples(_COUNT, "tokens"),
        "args": arguments(str(folder), **args),
        "data_collator": padded,
        "shapes": {"buckets": 3},
        **options,
    }


@pytest.mark.parametrize("shapes", [{"buckets": 3}, {"buckets": 3, "tokens_per_batch": 60}], ids=["rows", "tokens"])
def test_resume_in_the_middle_of_an_epoch(shapes: dict[str, Any], tmp_path: Path) -> None:
    whole = ours(gpt2(n_positions=64), **_resumable(tmp_path, shapes=shapes))
    resumed = ours(
        gpt2(n_positions=64),
        **_resumable(tmp_path, shapes=shapes),
        train_options={"resume_from_checkpoint": str(tmp_path / "checkpoint-4")},
    )
    assert resumed.losses == whole.losses
    before, after = whole.parameters(), resumed.parameters()
    assert all(torch.equal(before[name], after[name]) for name in before)
    with pytest.raises(CheckpointError, match="arranged by another batch size, seed or other lengths"):
        ours(
            gpt2(n_positions=64),
            **_resumable(tmp_path, shapes={**shapes, "buckets": 2}),
            train_options={"resume_from_checkpoint": str(tmp_path / "checkpoint-4")},
        )


class Stream(IterableDataset[Any]):
    """Can be read again, and has no length."""

    def __iter__(self) -> Any:
        return iter(text_samples(_COUNT, "tokens"))


def test_streams() -> None:
    args = {"max_steps": 8}
    with pytest.raises(ConfigError, match=r"Give them: ShapePolicy\(buckets="):
        ours(gpt2(n_positions=64), Stream(), args=arguments(**args), data_collator=padded, shapes="auto")
    expected = reference(gpt2(n_positions=64), Stream(), args=args, data_collator=padded)
    actual = ours(
        gpt2(n_positions=64), Stream(), args=arguments(**args), data_collator=padded, shapes={"buckets": [12, 24]}
    )
    assert_same(actual, expected)
    assert steps_of(actual.trainer).train.graphs == 2


def test_a_batch_without_a_mask_keeps_its_length(caplog: pytest.LogCaptureFixture) -> None:
    def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = padded(samples)
        del batch["attention_mask"]
        return batch

    args = {"max_steps": 3, "optim": "sgd"}
    with caplog.at_level(logging.WARNING):
        expected, actual = both(
            lambda: gpt2(n_positions=64),
            text_samples(_COUNT, "tokens"),
            shapes={"buckets": 2},
            args=args,
            data_collator=collate,
        )
    assert_same(actual, expected)
    assert len([message for message in caplog.messages if "it has no 'attention_mask'" in message]) == 1


def test_answers_are_chosen_among_all_positions(caplog: pytest.LogCaptureFixture) -> None:
    """So padding would change the loss, as it does with stock: lengths stay, and rows are filled up."""
    args = {"max_steps": -1, "num_train_epochs": 2}
    options: dict[str, Any] = {"data_collator": padded, "eval_dataset": text_samples(10, "positions", seed=1)}
    # The loss does not depend on the last bias, whose gradient is rounding error only: AdamW would scale it up.
    args |= {"eval_strategy": "epoch", "optim": "sgd"}
    make = lambda: tiny("bert", kind=transformers.BertForQuestionAnswering)  # noqa: E731
    data = [sample for sample in text_samples(_COUNT, "positions") if len(sample["input_ids"]) > 5]
    data = [{**sample, "input_ids": (4 * sample["input_ids"])[:24]} for sample in data]
    options["compute_metrics"] = _summed
    expected = reference(make(), data, args=args, **options)
    with caplog.at_level(logging.WARNING):
        actual = ours(make(), data, args=arguments(**args), shapes={"buckets": 2}, **options)
    assert_same(actual, expected)
    # All of one length, and a last batch that is filled up.
    assert steps_of(actual.trainer).train.graphs == 1
    assert len([message for message in caplog.messages if "chooses among all positions" in message]) == 1


def test_predictions_have_the_order_and_the_shape_of_the_data() -> None:
    data = text_samples(10, "classes")
    make = lambda: tiny("bert", kind=transformers.BertForTokenClassification, **_BERT)  # noqa: E731
    with on_cpu(make(), data, data_collator=padded) as trainer:
        expected = trainer.predict(data)
    actual = ours(make(), data, args=arguments(max_steps=1), data_collator=padded, shapes="auto").trainer
    actual.model.load_state_dict(make().state_dict())
    found = actual.predict(data)
    assert found.predictions.shape == expected.predictions.shape
    numpy.testing.assert_allclose(found.predictions, expected.predictions, atol=1e-5)
    numpy.testing.assert_array_equal(found.label_ids, expected.label_ids)
    for name in ("test_loss",):
        assert found.metrics[name] == pytest.approx(expected.metrics[name], abs=1e-5)


def test_labels_as_long_as_a_bucket_are_not_cut() -> None:
    numbers = random.Random(0)
    data = [
        {
            name: [numbers.randrange(3, VOCABULARY) for _ in range(size)]
            for name, size in (("input_ids", 16), ("labels", 20))
        }
        for _ in range(8)
    ]
    with on_cpu(tiny("t5"), data, data_collator=padded) as trainer:
        expected = trainer.predict(data)
    shapes = {"buckets": 1, "pad_to_multiple_of": 20}
    args = arguments(max_steps=1, learning_rate=0.0)
    found = ours(tiny("t5"), data, args=args, data_collator=padded, shapes=shapes).trainer.predict(data)
    assert found.predictions[0].shape == expected.predictions[0].shape
    numpy.testing.assert_allclose(found.predictions[0], expected.predictions[0], atol=1e-5)
    numpy.testing.assert_array_equal(found.label_ids, expected.label_ids)


@pytest.mark.parametrize("how", ["loss function", "compute_loss", "own model", "preprocessing", "family"])
def test_what_sees_padding_keeps_shapes(how: str, caplog: pytest.LogCaptureFixture) -> None:
    def mean_of_all(labels: Any = None, logits: Any = None, **_: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(logits.transpose(1, 2), labels.clamp(min=0), reduction="none").mean()

    class Own(transformers.Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
            loss = mean_of_all(inputs["labels"], outputs.logits)
            return (loss, outputs) if return_outputs else loss

    class Tagger(transformers.BertForTokenClassification):
        def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None) -> Any:
            logits = super().forward(input_ids=input_ids, attention_mask=attention_mask).logits
            return {"logits": logits} if labels is None else {"loss": mean_of_all(labels, logits), "logits": logits}

    def make() -> Any:
        if how == "own model":
            return tiny("bert", kind=Tagger, **_BERT)
        if how == "family":
            sizes = {
                "vocab_size": VOCABULARY,
                "block_sizes": [1],
                "d_model": 16,
                "n_head": 2,
                "d_head": 8,
                "d_inner": 32,
            }
            drops = dict.fromkeys(("hidden_dropout", "attention_dropout", "activation_dropout"), 0.0)
            torch.manual_seed(0)
            config = transformers.FunnelConfig(**sizes, **drops, num_labels=3)
            return transformers.FunnelForTokenClassification(config)
        model = tiny("bert", kind=transformers.BertForTokenClassification, **_BERT)
        if how == "loss function":
            model.loss_function = mean_of_all
        return model

    # Of one length, which is no multiple of 20, and with a last batch of 2 rows.
    data = [{name: value[:3] for name, value in sample.items()} for sample in text_samples(10, "classes")]
    options: dict[str, Any] = {"data_collator": padded, "eval_dataset": data, "compute_metrics": _summed}
    if how == "preprocessing":
        options["preprocess_logits_for_metrics"] = lambda logits, labels: logits.mean(0, keepdim=True)
    args = {"max_steps": -1, "num_train_epochs": 1, "eval_strategy": "epoch", "optim": "sgd"}
    kinds = (Own, type("OwnOnXla", (hf_trainer.XLATrainerMixin, Own), {})) if how == "compute_loss" else (None, None)
    stock, own = ({} if kind is None else {"trainer_class": kind} for kind in kinds)
    expected = reference(make(), data, args=args, **stock, **options)
    shapes = {"buckets": 1, "pad_to_multiple_of": 20}
    with caplog.at_level(logging.WARNING):
        actual = ours(make(), data, args=arguments(**args), shapes=shapes, **own, **options)
    assert_same(actual, expected)
    assert any("keep" in message and message.startswith("shapes: ") for message in caplog.messages)


class Tokenizing(Dataset[Any]):
    """Draws random numbers as it makes samples."""

    def __init__(self) -> None:
        self.data = text_samples(_COUNT, "tokens")

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        ids = [token if random.random() < 0.8 else 3 for token in self.data[index]["input_ids"]]
        return {"input_ids": ids, "labels": ids}


def test_looking_at_lengths_draws_nothing() -> None:
    args = {"max_steps": 5, "data_seed": 42}
    expected, actual = both(
        lambda: gpt2(n_positions=64), Tokenizing(), shapes={"buckets": 2}, args=args, data_collator=padded
    )
    assert_same(actual, expected)
