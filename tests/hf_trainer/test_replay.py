"""`step_replay` with code of transformers and of the user in the step: what is left out, and what is not."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    AttentionInterface,
    BatchEncoding,
    BatchFeature,
    DynamicCache,
    SegformerConfig,
    SegformerForSemanticSegmentation,
    TrainerCallback,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import hf_trainer
import xla_adapters
from tests.device import DEVICE
from tests.hf_trainer.scenarios import (
    Classifier,
    Run,
    arguments,
    assert_parity,
    gpt2,
    ours,
    steps_of,
    token_samples,
    traced_and_replayed,
    vector_samples,
)
from tests.tiny_models import tiny
from xla_adapters.loop.replay import batch_of
from xla_adapters.replay.call_spec import batch_reason
from xla_adapters.replay.guards.snapshot import computes_only

pytestmark = pytest.mark.isolated

_STEPS = 10
_CHOICES: Sequence[bool | str] = (False, "auto", True)
_calls: list[str] = []
_settings = SimpleNamespace(weight=1.0)


@pytest.fixture(autouse=True)
def _nothing_called() -> None:
    _calls.clear()
    _settings.weight = 1.0


class _At(TrainerCallback):
    def __init__(self, trainer: Any, step: int, change: Callable[[Any], object]) -> None:
        self.trainer = trainer
        self.step = step
        self.change = change

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.change(self.trainer)


def _changed(
    change: Callable[[Any], object], step: int = 5, base: Callable[..., Any] = hf_trainer.Trainer
) -> Callable[..., Any]:
    """Makes a trainer that is changed at the end of a step; for step 0 before the training begins."""

    def make(**options: Any) -> Any:
        trainer = base(**options)
        if step == 0:
            change(trainer)
        trainer.add_callback(_At(trainer, step, change))
        return trainer

    return make


def _same(replays: int, **options: Any) -> Run:
    """As `traced_and_replayed`, for a few steps. The user code must have been called equally often."""
    _calls.clear()
    _settings.weight = 1.0
    given = {"make": Classifier, "data": vector_samples(4 * _STEPS), **options}
    args = {"max_steps": _STEPS, **given.pop("args", {})}
    run = traced_and_replayed(replays, args=args, **given)
    assert len(_calls) % 2 == 0
    assert _calls[: len(_calls) // 2] == _calls[len(_calls) // 2 :]
    return run


def _reasons(run: Run) -> str:
    return "; ".join(steps_of(run.trainer).train.replay_reasons)


class _Doubling(hf_trainer.Trainer):
    prepared = 0

    def _prepare_inputs(self, inputs: Any) -> Any:
        self.prepared += 1
        inputs = super()._prepare_inputs(inputs)
        return {**inputs, "x": inputs["x"] * 2}


class _DoublingTensors(hf_trainer.Trainer):
    prepared = 0

    def _prepare_input(self, data: Any) -> Any:
        data = super()._prepare_input(data)
        if isinstance(data, torch.Tensor) and data.is_floating_point():
            self.prepared += 1
            data = data * 2
        return data


def _prepare_as_doubling(self: Any, inputs: Any) -> Any:
    self.prepared += 1
    inputs = hf_trainer.Trainer._prepare_inputs(self, inputs)
    return {**inputs, "x": inputs["x"] * 2}


def _patched(**options: Any) -> Any:
    trainer: Any = hf_trainer.Trainer(**options)
    trainer.prepared = 0
    trainer._prepare_inputs = MethodType(_prepare_as_doubling, trainer)
    return trainer


def test_a_batch_is_prepared_once() -> None:
    data = vector_samples(24)
    for make in (_Doubling, _DoublingTensors, _patched):
        runs = [
            ours(Classifier(), data, args=arguments(max_steps=6), trainer_class=make, step_replay=choice)
            for choice in _CHOICES
        ]
        losses = [run.trainer.evaluate(data)["eval_loss"] for run in runs]
        traced, refused, replayed = runs
        assert traced.losses == refused.losses == replayed.losses
        assert losses[0] == losses[1] == losses[2]
        # Six steps and six evaluation batches.
        assert [run.trainer.prepared for run in (traced, refused)] == [12, 12]
        assert [program.replays for program in steps_of(refused.trainer).programs] == [0, 0, 0, 0]
        assert "_prepare_input" in _reasons(refused)
        assert steps_of(replayed.trainer).train.replays == 4


def _decays(optimizer: Any, *args: Any) -> None:
    _calls.append("hook")
    with torch.no_grad():
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.mul_(0.9)


def _counted_step(self: Any, closure: Any = None) -> Any:
    _calls.append("step")
    return type(self).step(self, closure)


def _replace_step(trainer: Any) -> None:
    trainer.create_optimizer()
    trainer.optimizer.step = MethodType(_counted_step, trainer.optimizer)


def test_code_around_the_update_is_not_left_out() -> None:
    def hooked(trainer: Any) -> None:
        trainer.create_optimizer()
        trainer.optimizer.register_step_post_hook(_decays)

    def hooked_before(trainer: Any) -> None:
        trainer.optimizer.optimizer.register_step_pre_hook(_decays)

    def backward(trainer: Any) -> None:
        stock = trainer.accelerator.backward

        def doubled(loss: Any, **options: Any) -> None:
            _calls.append("backward")
            stock(loss * 2, **options)

        trainer.accelerator.backward = doubled

    assert "AdamW has a hook" in _reasons(_same(0, trainer_class=_changed(hooked, 0)))
    # The scheduler wraps the method that it finds.
    assert "step of AdamW was replaced" in _reasons(_same(0, trainer_class=_changed(_replace_step, 0)))
    assert "AdamW has a hook" in _reasons(_same(3, trainer_class=_changed(hooked_before)))
    run = _same(3, trainer_class=_changed(backward), args={"optim": "sgd"})
    assert "backward of the accelerator" in _reasons(run)


def _cross_entropy(outputs: Any, labels: Any, num_items_in_batch: Any = None, weight: float = 1.0) -> Any:
    return weight * torch.nn.functional.cross_entropy(outputs["logits"], labels)


def _tripled(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    return 3 * torch.nn.functional.cross_entropy(outputs["logits"], labels)


def _counted(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    _calls.append("loss")
    return _cross_entropy(outputs, labels)


def _halved(self: Any, model: Any, inputs: Any, return_outputs: bool = False, **options: Any) -> Any:
    outputs = model(**inputs)
    return (outputs["loss"] / 2, outputs) if return_outputs else outputs["loss"] / 2


def test_a_function_that_is_set_later_is_examined_anew() -> None:
    def set_loss(function: Any) -> Callable[..., Any]:
        return _changed(lambda trainer: setattr(trainer, "compute_loss_func", function))

    def set_method(trainer: Any) -> None:
        trainer.compute_loss = MethodType(_halved, trainer)

    _same(6, compute_loss_func=_cross_entropy, trainer_class=set_loss(_tripled))
    _same(6, trainer_class=_changed(set_method))
    run = _same(3, compute_loss_func=_cross_entropy, trainer_class=set_loss(_counted))
    assert len(_calls) == 2 * 5
    assert "compute_loss_func" in _reasons(run)


class _Loss(torch.nn.Module):
    def forward(self, outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        return _tripled(outputs, labels)


class _CountedLoss:
    def __call__(self, outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        return _counted(outputs, labels)


def test_loss_functions_that_are_no_plain_functions() -> None:
    for function in (functools.partial(_cross_entropy, weight=2.0), _Loss(), _CountedLoss()):
        data = vector_samples(24)
        traced, replayed = (
            ours(Classifier(), data, args=arguments(max_steps=6), compute_loss_func=function, step_replay=choice)
            for choice in (False, "auto")
        )
        assert traced.losses == replayed.losses
        assert (steps_of(replayed.trainer).train.replays > 0) is not isinstance(function, _CountedLoss)
    assert len(_calls) == 12


def _weighted(logits: Any, labels: Any) -> Any:
    return logits * _settings.weight


def test_a_preprocessing_that_comes_back_is_not_that_of_before() -> None:
    data = vector_samples(16)
    found = []
    for choice in (False, "auto"):
        trainer: Any = hf_trainer.Trainer(Classifier(), arguments(), step_replay=choice)
        predictions = []
        for function, weight in ((_weighted, 1.0), (None, 1.0), (_weighted, 5.0)):
            trainer.preprocess_logits_for_metrics, _settings.weight = function, weight
            predictions += [trainer.predict(data).predictions for _ in range(2)]
        found.append(torch.tensor(predictions))
    assert torch.equal(*found)
    # The first two of each eight are traced.
    assert steps_of(trainer).evaluation["eval_step"].replays == 18


class _Smoother:
    def __call__(self, outputs: Any, labels: Any, **options: Any) -> Any:
        _calls.append("smoother")
        return torch.nn.functional.cross_entropy(outputs["logits"][:, 0], labels[:, 0])


def test_label_smoothers() -> None:
    def ignore(trainer: Any) -> None:
        trainer.label_smoother.ignore_index = 5

    def replace(trainer: Any) -> None:
        trainer.label_smoother = _Smoother()

    options = {"make": gpt2, "data": token_samples(4 * _STEPS), "args": {"label_smoothing_factor": 0.1}}
    _same(6, trainer_class=_changed(ignore), **options)
    assert "_Smoother" in _reasons(_same(3, trainer_class=_changed(replace), **options))


def test_a_callback_for_gradients_that_comes_later_finds_them() -> None:
    class Looks(TrainerCallback):
        def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            _calls.append(str([float(item.grad.norm()) for item in model.parameters()]))

    _same(6, trainer_class=_changed(lambda trainer: trainer.add_callback(Looks())))
    assert len(_calls) == 2 * 5


def test_functions_that_a_library_model_calls() -> None:
    def loss(logits: Any, labels: Any, vocab_size: int, **options: Any) -> Any:
        _calls.append("loss")
        return torch.nn.functional.cross_entropy(logits.view(-1, vocab_size), labels.view(-1))

    def attention(module: Any, query: Any, *args: Any, **options: Any) -> Any:
        _calls.append("attention")
        return sdpa_attention_forward(module, query, *args, **options)

    def llama() -> Any:
        return tiny("llama", attn_implementation="counted")

    def set_loss(trainer: Any) -> None:
        trainer.model.loss_function = loss

    data = token_samples(4 * _STEPS)
    assert "known to be safe" in _reasons(_same(3, make=gpt2, data=data, trainer_class=_changed(set_loss)))
    AttentionInterface.register("counted", attention)
    assert "known to be safe" in _reasons(_same(0, make=llama, data=data))


@pytest.mark.parametrize("accumulated", [1, 2])
def test_what_a_replay_takes_outlives_the_execution(accumulated: int) -> None:
    """Also the sum of losses and the gradients. The value before it of a tensor waits for the device."""
    run = ours(gpt2(), token_samples(32), args=arguments(max_steps=8, gradient_accumulation_steps=accumulated))
    assert steps_of(run.trainer).train.replays
    runtime: Any = xla_adapters.get_runtime()
    values = [value for taken in runtime.executables._graphs._taken._taken for value in taken]
    assert values
    assert not any(torch._is_functional_tensor(value) for value in values)


def test_gradients_that_appear_behind_a_replayed_step_are_dropped() -> None:
    """By the loop's `model.zero_grad()`, which returns early only if there are no gradients."""
    seen: list[tuple[int, bool]] = []

    class Interferes(torch.optim.lr_scheduler.LambdaLR):
        def step(self, *args: Any, **kwargs: Any) -> None:
            super().step(*args, **kwargs)
            self.steps = getattr(self, "steps", 0) + 1
            if self.steps == 6:
                model.transformer.wpe.weight.grad = torch.ones_like(model.transformer.wpe.weight)

    class Looks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append((state.global_step, model.transformer.wpe.weight.grad is None))

    model = gpt2().to(DEVICE)
    model.transformer.wpe.weight.requires_grad_(False)
    optimizer = torch.optim.AdamW([item for item in model.parameters() if item.requires_grad], lr=1e-3)
    scheduler = Interferes(optimizer, lambda step: 1.0)
    before = torch.nn.Module.zero_grad
    run = ours(
        model,
        token_samples(32),
        args=arguments(max_steps=8),
        optimizers=(optimizer, scheduler),
        callbacks=[Looks()],
    )
    assert steps_of(run.trainer).train.replays == 6, steps_of(run.trainer).train.replay_reasons
    assert seen == [(step, True) for step in range(1, 9)]
    assert torch.nn.Module.zero_grad is before


def _encoded(samples: list[dict[str, Any]]) -> BatchEncoding:
    """A batch as `DataCollatorWithPadding` returns it: a mapping that is not a dict."""
    return BatchEncoding(torch.utils.data.default_collate(samples))


def test_a_batch_that_is_no_dict_is_replayed() -> None:
    traced_and_replayed(6, args={"max_steps": 8}, data_collator=_encoded)


def _features(samples: list[dict[str, Any]]) -> BatchFeature:
    """A batch as processors of images and audio return it: a mapping with an attribute."""
    return BatchFeature(torch.utils.data.default_collate(samples))


def test_attributes_of_a_batch_are_compared() -> None:
    _same(_STEPS - 2, data_collator=_features)
    batch, other = _features(vector_samples(2)), _features(vector_samples(2))
    assert batch_of(batch)[1] == batch_of(other)[1]
    other.skip_tensor_conversion = ["x"]
    assert batch_reason(other) is None
    assert batch_of(batch)[1] != batch_of(other)[1]
    other.skip_tensor_conversion = object()
    assert "'skip_tensor_conversion', which cannot be compared" in str(batch_reason(other))


@pytest.mark.parametrize("family", ["mixtral", "vit"])
def test_a_model_that_was_loaded_is_replayed(family: str, tmp_path: Path) -> None:
    """`from_pretrained` leaves on the model how it has renamed weights."""
    saved = tiny(family, **({"num_key_value_heads": 2} if family == "mixtral" else {}))
    saved.save_pretrained(tmp_path)
    pictures = torch.randn(24, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    seen = [{"pixel_values": picture, "labels": number % 2} for number, picture in enumerate(pictures)]
    data = seen if family == "vit" else token_samples(24)
    run = assert_parity(lambda: type(saved).from_pretrained(tmp_path), data, args={"max_steps": 6})
    assert run.trainer.model._weight_conversions
    assert steps_of(run.trainer).train.replays == 4, steps_of(run.trainer).train.replay_reasons


def test_hooks_by_which_a_model_captures_its_outputs_are_replayed() -> None:
    def make() -> Any:
        torch.manual_seed(0)
        sizes = {"hidden_sizes": [8, 8], "depths": [1, 1], "num_attention_heads": [1, 1], "num_encoder_blocks": 2}
        shapes = {"sr_ratios": [2, 1], "patch_sizes": [3, 3], "strides": [2, 2], "mlp_ratios": [2, 2]}
        drops = dict.fromkeys(("hidden_dropout_prob", "drop_path_rate", "classifier_dropout_prob"), 0.0)
        config = SegformerConfig(**sizes, **shapes, **drops, decoder_hidden_size=8, num_labels=3)
        return SegformerForSemanticSegmentation(config)

    draw = torch.Generator().manual_seed(1)
    data = [
        {"pixel_values": torch.randn(3, 16, 16, generator=draw), "labels": torch.randint(3, (16, 16), generator=draw)}
        for _ in range(24)
    ]
    run = assert_parity(make, data, args={"max_steps": 6})
    assert any(module._forward_hooks for module in run.trainer.model.modules())
    assert steps_of(run.trainer).train.replays >= 3, steps_of(run.trainer).train.replay_reasons


def test_only_the_hooks_of_a_library_itself_are_known() -> None:
    model = gpt2()
    model.enable_input_require_grads()
    (known,) = model.get_input_embeddings()._forward_hooks.values()

    @functools.wraps(known)
    def around(*args: Any) -> Any:
        return known(*args)

    assert computes_only(known)
    assert not computes_only(around)
    assert not computes_only(functools.partial(known))


def _with_a_stranger(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {**torch.utils.data.default_collate(samples), "past_key_values": DynamicCache()}


def test_a_batch_with_a_value_nobody_can_compare_is_traced() -> None:
    run = traced_and_replayed(0, args={"max_steps": 4}, data_collator=_with_a_stranger)
    assert any("DynamicCache" in reason for reason in steps_of(run.trainer).train.replay_reasons)


class _OwnLoss(hf_trainer.Trainer):
    seen = 0

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        self.seen += 1
        return super().compute_loss(*args, **kwargs)


@pytest.mark.parametrize(("replay", "seen"), [("auto", 8), (True, 2)])
def test_overridden_compute_loss(replay: bool | str, seen: int) -> None:
    run = ours(gpt2(), token_samples(32), args=arguments(max_steps=8), trainer_class=_OwnLoss, step_replay=replay)
    assert run.trainer.seen == seen
    assert run.counts.compiles == 1
    if replay == "auto":
        assert any("_OwnLoss.compute_loss" in reason for reason in steps_of(run.trainer).train.replay_reasons)


class _Weighted(hf_trainer.Trainer):
    weight = 0.5

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = self.weight * torch.nn.functional.cross_entropy(outputs["logits"], labels)
        return (loss, outputs) if return_outputs else loss


def test_a_loss_of_ones_own_that_does_nothing_else_is_replayed() -> None:
    class Reweighting(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            _Weighted.weight = 0.5

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 6:
                _Weighted.weight = 0.25

    run = traced_and_replayed(
        8,
        make=Classifier,
        data=vector_samples(32),
        args={"max_steps": 12},
        trainer_class=_Weighted,
        callbacks=[Reweighting()],
    )
    assert steps_of(run.trainer).train.replay_reasons == {"self.weight was replaced": 1}


def test_evaluation_and_prediction_steps() -> None:
    found = []
    for choice in (False, "auto"):
        data = vector_samples(24)
        run = ours(Classifier(), data, args=arguments(max_steps=2), step_replay=choice, eval_dataset=data)
        trainer = run.trainer
        metrics = [trainer.evaluate()["eval_loss"] for _ in range(2)]
        predicted = trainer.predict(data)
        found.append((metrics, predicted.predictions, predicted.label_ids))
        assert steps_of(trainer).evaluation["eval_step"].replays == (0 if choice is False else 13), steps_of(
            trainer
        ).evaluation.replay_reasons
    assert found[0][0] == found[1][0]
    assert (found[0][1] == found[1][1]).all()
    assert (found[0][2] == found[1][2]).all()
