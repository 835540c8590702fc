"""`shapes={"packing": ...}` of the trainer: the numbers of stock transformers on the same documents, one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import hf_trainer
from tests.hf_trainer.scenarios import arguments, assert_close, gpt2, on_cpu, ours, reference, steps_of
from tests.hf_trainer.test_shapes import Stream, assert_same, padded, text_samples
from tests.tiny_models import tiny
from xla_adapters.data.packing import PackedDataset
from xla_adapters.errors import CheckpointError, ConfigError

pytestmark = pytest.mark.isolated(timeout=400)
_LENGTH = 40
_SHAPES = {"packing": _LENGTH}


class Rows:
    """The documents of packed rows, one list for each row."""

    def __init__(self, documents: list[Any]) -> None:
        self.documents, self.rows = documents, PackedDataset(documents, _LENGTH).rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> list[Any]:
        return [self.documents[number] for number in self.rows[index]]


def apart(rows: list[list[Any]]) -> dict[str, torch.Tensor]:
    """A batch of the documents of some rows, a row for each document.

    Stock transformers counts the labels of first tokens, which nothing predicts, for GPT-2 and not for Llama.
    """
    batch = padded([document for row in rows for document in row])
    batch["labels"][:, 0] = -100
    return batch


def documents(count: int = 60) -> list[dict[str, Any]]:
    return text_samples(count, "tokens")


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("gpt2", {"n_positions": 32}),
        ("llama", {"num_key_value_heads": 2}),
        ("mixtral", {"num_key_value_heads": 2}),
        ("gpt-neo", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_as_on_the_cpu_one_by_one(model: str, options: dict[str, Any], accumulation: int) -> None:
    """A row is longer than the positions that the GPT-2 has; the last batch has fewer rows."""
    args = {
        **{"max_steps": -1, "num_train_epochs": 2, "per_device_train_batch_size": 2},
        **{"gradient_accumulation_steps": accumulation, "eval_strategy": "epoch"},
    }
    assert len(PackedDataset(documents(), _LENGTH)) % 2 == 1
    held_out = text_samples(10, "tokens", seed=1)
    expected = reference(
        tiny(model, **options),
        Rows(documents()),
        args={**args, "eval_strategy": "no", "remove_unused_columns": False},
        data_collator=apart,
    )
    actual = ours(
        tiny(model, **options),
        documents(),
        args=arguments(**args),
        data_collator=padded,
        eval_dataset=held_out,
        shapes=_SHAPES,
    )
    assert_same(actual, expected)
    assert steps_of(actual.trainer).train.graphs == (1 if accumulation == 1 else 2)
    # An evaluation is not packed.
    with on_cpu(actual.trainer.model.cpu(), documents(), data_collator=padded, eval_dataset=held_out) as stock:
        assert_close(actual.logged("eval_loss")[-1:], [stock.evaluate()["eval_loss"]], 1e-5)


def _resumable(folder: Path, **options: Any) -> Any:
    args = {
        **{"max_steps": -1, "num_train_epochs": 2, "save_strategy": "steps", "save_steps": 3},
        **{"per_device_train_batch_size": 2},
    }
    return {
        "data": documents(),
        "args": arguments(str(folder), **args),
        "data_collator": padded,
        "shapes": _SHAPES,
        **options,
    }


def test_resume_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    whole = ours(gpt2(n_positions=64), **_resumable(tmp_path))
    again = {"resume_from_checkpoint": str(tmp_path / "checkpoint-3")}
    resumed = ours(gpt2(n_positions=64), **_resumable(tmp_path), train_options=again)
    assert resumed.losses == whole.losses
    before, after = whole.parameters(), resumed.parameters()
    assert all(torch.equal(before[name], after[name]) for name in before)
    with pytest.raises(CheckpointError, match="arranged by another batch size, seed or other lengths"):
        ours(gpt2(n_positions=64), **_resumable(tmp_path, shapes={"packing": 48}), train_options=again)


def test_lora() -> None:
    peft = pytest.importorskip("peft")

    def make() -> Any:
        torch.manual_seed(0)
        return peft.get_peft_model(gpt2(n_positions=64), peft.LoraConfig(r=4, target_modules=["c_attn"]))

    args = {"per_device_train_batch_size": 2}
    expected = reference(make(), Rows(documents()), args={**args, "remove_unused_columns": False}, data_collator=apart)
    actual = ours(make(), documents(), args=arguments(**args), data_collator=padded, shapes=_SHAPES)
    assert_close(actual.losses, expected.losses, 1e-5)


class OwnLoader(hf_trainer.Trainer):
    def get_train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(self.train_dataset, batch_size=4, collate_fn=padded)


class OwnLoss(hf_trainer.Trainer):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        return super().compute_loss(model, inputs, *args, **options) * 2


def opt() -> Any:
    sizes = {"hidden_size": 16, "ffn_dim": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}
    return transformers.OPTForCausalLM(transformers.OPTConfig(**sizes, max_position_embeddings=64))


class AddsMask(hf_trainer.Trainer):
    def _prepare_inputs(self, inputs: Any) -> Any:
        inputs = super()._prepare_inputs(inputs)
        return {**inputs, "attention_mask": torch.ones_like(inputs["input_ids"])}


class SamplesDocuments(hf_trainer.Trainer):
    def _get_train_sampler(self, *args: Any, **options: Any) -> Any:
        return torch.utils.data.SubsetRandomSampler(range(10))


class DropsPositions(hf_trainer.Trainer):
    def get_batch_samples(self, *args: Any, **options: Any) -> Any:
        batches, items = super().get_batch_samples(*args, **options)
        for batch in batches:
            del batch["position_ids"]
        return batches, items


def llama(**options: Any) -> Any:
    model = tiny("llama", num_key_value_heads=2)
    for name, value in options.items():
        setattr(model.config, name, value)
    return model


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("is no causal language model", {"model": lambda: tiny("bert", kind=transformers.BertForMaskedLM)}),
        ("the family 'opt'", {"model": opt}),
        ("its loss is your own code", {"trainer_class": OwnLoss}),
        ("OwnLoader.get_train_dataloader makes the loader alone", {"trainer_class": OwnLoader}),
        ("a stream has no lengths", {"data": Stream()}),
        ("the noise of neftune_noise_alpha", {"args": {"neftune_noise_alpha": 5.0}}),
        ("train_sampling_strategy='group_by_length'", {"args": {"train_sampling_strategy": "group_by_length"}}),
        ("AddsMask._prepare_inputs of your own may change a batch", {"trainer_class": AddsMask}),
        ("SubsetRandomSampler chooses 10 samples", {"trainer_class": SamplesDocuments}),
        ("and has input_ids, labels", {"trainer_class": DropsPositions}),
        ("attention other than causal", {"model": lambda: llama(is_causal=False)}),
        ("attn_implementation='mine'", {"model": lambda: llama(_attn_implementation="mine")}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_might_be_wrong_is_refused(message: str, options: dict[str, Any]) -> None:
    make = options.get("model", lambda: gpt2(n_positions=64))
    with pytest.raises(ConfigError, match=message):
        ours(
            make(),
            options.get("data", documents()),
            args=arguments(**options.get("args", {})),
            trainer_class=options.get("trainer_class", hf_trainer.Trainer),
            data_collator=padded,
            shapes=_SHAPES,
        )


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_a_preflight_has_enough_documents(rows: int) -> None:
    """Of as many rows as a batch has, whatever happens with smaller ones."""
    data = documents(20)
    trainer = hf_trainer.Trainer(gpt2(n_positions=64), arguments(), train_dataset=data, shapes=_SHAPES)
    count = trainer._xla.shapes.samples_for(rows)
    taken = [data[index % len(data)] for index in range(count)]
    assert rows <= len(PackedDataset(taken, _LENGTH)) <= rows * 1.4 + 1


class SwitchesCacheOn(transformers.TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **options: Any) -> None:
        model.config.use_cache = True


def test_a_cache_does_not_mix_documents() -> None:
    """Configs have `use_cache=True` by default; transformers' trainer changes it, but not that of `model_init`."""

    def fresh() -> Any:
        # The order of the data is drawn afterwards.
        with torch.random.fork_rng():
            return llama()

    args: dict[str, Any] = {"per_device_train_batch_size": 2}
    expected = reference(llama(), Rows(documents()), args={**args, "remove_unused_columns": False}, data_collator=apart)
    for model, options in (
        (None, {"model_init": fresh}),
        (llama(), {"callbacks": [SwitchesCacheOn()]}),
        (llama(), {"args": arguments(**args, use_cache=True)}),
    ):
        given = {"args": arguments(**args), "data_collator": padded, "shapes": _SHAPES, **options}
        assert_close(ours(model, documents(), **given).losses, expected.losses, 1e-5)


def test_a_promise_lets_own_losses_be_packed() -> None:
    shapes = {**_SHAPES, "fill": {"labels": -100}}
    args = arguments(per_device_train_batch_size=2)
    data = documents()
    twice = ours(gpt2(n_positions=64), data, args=args, trainer_class=OwnLoss, data_collator=padded, shapes=shapes)
    once = ours(gpt2(n_positions=64), data, args=args, data_collator=padded, shapes=shapes)
    assert twice.losses[0] == pytest.approx(2 * once.losses[0], abs=1e-5)


@pytest.mark.parametrize(("shapes", "graphs"), [({"buckets": 2}, 6), ({"buckets": [12, 24]}, 2)])
def test_own_loaders_keep_lengths_unless_listed(
    shapes: dict[str, Any], graphs: int, caplog: pytest.LogCaptureFixture
) -> None:
    args = arguments(max_steps=6)
    run = ours(gpt2(n_positions=64), documents(24), args=args, trainer_class=OwnLoader, shapes=shapes)
    assert steps_of(run.trainer).train.graphs == graphs
    assert ("OwnLoader.get_train_dataloader makes the loader alone" in caplog.text) == (graphs == 6)
