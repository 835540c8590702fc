"""Kinds of data, of models and of loss functions, and the other modes: as on the plain CPU."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import peft
import pytest
import torch
import transformers
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, batched_mm_experts_forward
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

import hf_trainer
import xla_adapters
from hf_trainer.patches import as_if_compiling, dense_experts_forward, experts_of_fixed_shape
from tests.hf_trainer.scenarios import (
    VOCABULARY,
    Classifier,
    Run,
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
from tests.support import Stream
from tests.tiny_models import tiny
from xla_adapters import GraphLimitError
from xla_adapters.errors import DenseGradientWarning
from xla_adapters.runtime.transfers import upload_of
from xla_adapters.sharding import Mesh, template
from xla_adapters.sharding.planner import Planner, Topology

pytestmark = pytest.mark.isolated


def test_iterable_dataset() -> None:
    run = assert_parity(Classifier, Stream(vector_samples(20)), args={"max_steps": 7})
    run.assert_one_graph(7)


@pytest.mark.parametrize("workers", [0, 1])
def test_streaming_datasets(workers: int) -> None:
    def rows() -> Iterator[dict[str, Any]]:
        for sample in vector_samples(20):
            yield {"x": sample["x"].tolist(), "labels": sample["labels"]}

    stream = datasets.IterableDataset.from_generator(rows).shuffle(seed=0, buffer_size=8)
    run = assert_parity(Classifier, stream, args={"max_steps": 5, "dataloader_num_workers": workers})
    run.assert_one_graph(5)


def test_map_style_datasets_with_columns_the_model_does_not_take() -> None:
    table = datasets.Dataset.from_list(
        [{"x": s["x"].tolist(), "labels": s["labels"], "name": "unused"} for s in vector_samples(16)]
    )
    run = assert_parity(Classifier, table)
    run.assert_one_graph(4)


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


def test_masks_are_not_looked_into() -> None:
    """Stock transformers reads the mask on the host in every forward. The losses agree with it."""
    data = [sample for pair in zip(token_samples(8), token_samples(8, length=5), strict=True) for sample in pair]
    args = {"train_sampling_strategy": "sequential"}
    run = assert_parity(gpt2, data, args=args, data_collator=_pad)
    run.assert_one_graph(4)


class _Unnamed(Classifier):
    main_input_name = "y"


@pytest.mark.parametrize(("make", "samples"), [(gpt2, token_samples), (_Unnamed, vector_samples)])
def test_tokens_that_cannot_be_counted_are_told(make: Any, samples: Any) -> None:
    said: list[str] = []

    def note(record: logging.LogRecord) -> bool:
        said.append(record.getMessage())
        return True

    def warnings_of(run: Callable[..., Any], args: Any) -> list[str]:
        said.clear()
        run(make(), samples(16), args=args)
        return list(said)

    logger = logging.getLogger("transformers.trainer")
    logger.addFilter(note)
    logger.setLevel(logging.WARNING)  # The tests run with fewer words.
    args = {"include_num_input_tokens_seen": "non_padding"}
    expected = warnings_of(reference, args)
    assert len(expected) == 4
    assert warnings_of(ours, arguments(**args)) == expected


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


@pytest.mark.parametrize("mode", ["eager+compile", "eager+dynamo"])
def test_a_model_that_is_made_by_each_training(mode: Any) -> None:
    """A search for hyperparameters drops the model after each trial."""
    trainer = hf_trainer.Trainer(
        model_init=lambda: Classifier(seed=1), args=arguments(), train_dataset=vector_samples(16), xla_mode=mode
    )
    first = train(trainer).losses
    trainer.model = trainer.model_wrapped = None
    trainer.accelerator.clear()
    again = train(trainer)
    assert again.losses == first
    assert trainer.xla_report().about["model"] == "Classifier"
    assert trainer.xla_report().about["parameters"] == "67"
    assert trainer.evaluate(vector_samples(4))["eval_loss"] > 0


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


def test_compute_loss_func() -> None:
    def loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        total = torch.nn.functional.cross_entropy(outputs["logits"], labels, reduction="sum", label_smoothing=0.1)
        return total / (num_items_in_batch if num_items_in_batch is not None else labels.numel())

    args = {"gradient_accumulation_steps": 2, "max_steps": 3}
    run = assert_parity(
        Classifier, vector_samples(24), args=args, compute_loss_func=loss, xla={"accumulation": "unrolled"}
    )
    run.assert_one_graph(3)


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


def test_sparse_embeddings_and_a_spectral_norm() -> None:
    args = {"optim": "sgd", "max_steps": 6, "max_grad_norm": 0.0}
    with pytest.warns(DenseGradientWarning):
        run = assert_parity(_NormedTokens, token_samples(24), args=args)
    run.assert_one_graph(6)
    assert steps_of(run.trainer).train.replays > 0


# ---- experts ----------------------------------------------------------------------------------------


_SIZES = {"hidden_size": 8, "intermediate_size": 6, "num_local_experts": 4, "num_experts_per_tok": 2}
_EXPERTS = {
    "gated": lambda: MixtralExperts(transformers.MixtralConfig(**_SIZES)),
    "transposed, with bias": lambda: GptOssExperts(transformers.GptOssConfig(**_SIZES)),
}


@pytest.mark.parametrize("name", _EXPERTS)
def test_values_and_gradients(name: str) -> None:
    torch.manual_seed(0)
    experts = _EXPERTS[name]()
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    tokens = torch.randn(5, 8)
    # Expert 3 gets no token; expert 0 gets some twice.
    index = torch.tensor([[0, 1], [1, 0], [2, 0], [0, 2], [1, 2]])
    weights = torch.rand(5, 2)
    outcomes = []
    for forward in (batched_mm_experts_forward, dense_experts_forward):
        inputs = [tokens.clone().requires_grad_(), weights.clone().requires_grad_()]
        experts.zero_grad()
        output = forward(experts, inputs[0], index, inputs[1])
        output.square().sum().backward()
        outcomes.append([output.detach(), *(x.grad for x in inputs), *(p.grad.clone() for p in experts.parameters())])
    for expected, actual in zip(*outcomes, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_an_id_beyond_the_last_expert_chooses_none() -> None:
    torch.manual_seed(0)
    experts = _EXPERTS["gated"]()
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    tokens, weights = torch.randn(2, 8), torch.ones(2, 2)
    both = dense_experts_forward(experts, tokens, torch.tensor([[1, 4], [2, 9]]), weights)
    first = dense_experts_forward(experts, tokens, torch.tensor([[1], [2]]), weights[:, :1])
    torch.testing.assert_close(both, first)


def test_the_registry_is_as_before_afterwards() -> None:
    before = dict(ALL_EXPERTS_FUNCTIONS)
    with experts_of_fixed_shape():
        assert ALL_EXPERTS_FUNCTIONS["grouped_mm"] is dense_experts_forward
        with experts_of_fixed_shape():
            assert ALL_EXPERTS_FUNCTIONS["grouped_mm"] is dense_experts_forward
        assert ALL_EXPERTS_FUNCTIONS["grouped_mm"] is dense_experts_forward
    assert dict(ALL_EXPERTS_FUNCTIONS) == before
    assert not ALL_EXPERTS_FUNCTIONS._local_mapping


def test_the_planner_plans_for_the_experts_that_are_computed() -> None:
    config = transformers.MixtralConfig(
        **_SIZES, vocab_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2
    )
    model, tokens = transformers.MixtralForCausalLM(config), torch.zeros(8, 16, dtype=torch.long)
    plan = template("dp", model, Mesh.data_and_model(8, 1))
    batch = {"input_ids": tokens, "labels": tokens}
    (cost,) = Planner.begin(model, batch, topology=Topology.preset("cpu"), around=as_if_compiling).costs([plan])
    numbers = sum(parameter.numel() for parameter in model.parameters())
    # Gradients and the loss, summed over a ring of 8; tokens are not sent to their experts.
    assert cost.wire_bytes == pytest.approx(2 * 4 * (numbers + 1) * 7 / 8, rel=1e-3)


# ---- dynamo -----------------------------------------------------------------------------------------


_STEPS = 12


def _run(mode: str, *, args: dict[str, Any] | None = None, **options: Any) -> Run:
    made = arguments(max_steps=_STEPS, logging_steps=6, **(args or {}))
    return ours(gpt2(dropout=0.2), token_samples(64), args=made, xla_mode=mode, **options)


@pytest.mark.parametrize(
    ("options", "args"),
    [
        ({}, {}),
        ({"step_replay": True}, {}),
        ({"max_graphs": 1, "on_recompile": "error"}, {}),
        ({"accumulation": "unrolled"}, {"gradient_accumulation_steps": 2}),
    ],
    ids=lambda options: ",".join(options) if isinstance(options, dict) else None,
)
def test_the_same_run_with_each_option(options: dict[str, Any], args: dict[str, Any]) -> None:
    runs = compiled, dynamo = [_run(mode, args=args, **options) for mode in ("eager+compile", "eager+dynamo")]
    for name in ("loss", "grad_norm"):
        assert compiled.logged(name) == dynamo.logged(name), name
    before, after = compiled.parameters(), dynamo.parameters()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    replays = [steps_of(run.trainer).train.replays for run in runs]
    assert replays[0] == replays[1]
    assert (replays[0] > 0) == (options.get("accumulation") is None)
    for run in runs:
        assert [step.executions for step in run.steps] == [1] * _STEPS, run.explain()
    # It is the same graph, which the first run has compiled.
    assert [run.counts.compiles for run in runs] == [1, 0]


def test_losses_of_the_plain_cpu() -> None:
    args = {"max_steps": 6}
    run = ours(gpt2(), token_samples(24), args=arguments(**args), xla_mode="eager+dynamo", step_replay=True)
    run.assert_one_graph(6)
    assert_close(run.losses, reference(gpt2(), token_samples(24), args=args).losses)


@pytest.mark.parametrize("option", [{"max_graphs": 1}, {"on_recompile": "error"}], ids=["max_graphs", "on_recompile"])
def test_a_second_graph_is_refused(option: dict[str, Any]) -> None:
    # The last batch has two rows.
    args = arguments(max_steps=-1, num_train_epochs=1)
    with pytest.raises(GraphLimitError, match=next(iter(option))):
        ours(gpt2(), token_samples(10), args=args, xla_mode="eager+dynamo", **option)


def test_a_model_that_is_called_outside_of_steps() -> None:
    # Dynamo keeps fake tensors of the device; the steps behind the first evaluation are recorded and replayed.
    args: dict[str, Any] = {"max_steps": 6, "eval_strategy": "steps", "eval_steps": 1}
    mode: dict[str, Any] = {"xla_mode": "eager+dynamo", "compile_eval": False}
    held_out = token_samples(8, seed=1)
    for _ in range(2):
        run = ours(gpt2(), token_samples(24), args=arguments(**args), **mode, eval_dataset=held_out)
        # A number of the step may be one that a graph of dynamo holds, too: then another call is traced.
        assert steps_of(run.trainer).train.replays >= 2, steps_of(run.trainer).train.replay_reasons
        assert [step.executions for step in run.steps] == [1] * 6
        # Operation by operation an evaluation alone takes more.
        assert run.counts.executions < 100
        expected = reference(gpt2(), token_samples(24), args=args, eval_dataset=held_out)
        for name in ("loss", "eval_loss"):
            assert_close(run.logged(name), expected.logged(name))


def test_moving_a_model_notes_no_buffers_as_batches() -> None:
    """In eager mode, too, a move compiles nothing, and what is moved is state."""
    xla_adapters.initialize()
    assert xla_adapters.get_runtime().replay_works
    model = tiny("bert")
    with xla_adapters.count() as counts:
        trainer = hf_trainer.Trainer(model, arguments(), train_dataset=vector_samples(4))
    buffers = [buffer for buffer in trainer.model.buffers() if not buffer.is_floating_point() and buffer.ndim]
    assert buffers
    assert all(upload_of(buffer) is None for buffer in buffers)
    assert counts.eager_compiles == 0
