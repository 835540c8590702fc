"""Generation: the tokens of the plain CPU, by one graph for each token."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import transformers as hf
from transformers.cache_utils import StaticLayer

import hf_trainer
import xla_adapters
from hf_trainer.shapes import _COUNTING_ALL
from tests.device import DEVICE, ON_TORCH_TPU
from tests.isolation import isolated
from tests.tiny_models import config_of, tiny
from xla_adapters.data.shapes import NOT_SEEING_PADDING
from xla_adapters.errors import UnsupportedOptionError

_LENGTH = 6
_Made = tuple[Any, dict[str, Any]]
_LAYERS = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_TEXT: dict[str, Any] = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def _tokens(rows: int = 2, length: int = 5) -> torch.Tensor:
    return torch.randint(3, 64, (rows, length), generator=torch.Generator().manual_seed(0))


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def whisper() -> _Made:
    """Takes `input_features`; has no argument `inputs`."""
    model = tiny("whisper", max_source_positions=20)
    return model, {"input_features": _noise(2, 8, 40), "max_new_tokens": _LENGTH}


def bert_pair() -> _Made:
    """Its decoder needs the length of the cache as a number."""
    hf.set_seed(0)
    bert = {**_LAYERS, "vocab_size": 64, "max_position_embeddings": 32}
    config = hf.EncoderDecoderConfig.from_encoder_decoder_configs(hf.BertConfig(**bert), hf.BertConfig(**bert))
    model = hf.EncoderDecoderModel(config=config)
    for settings in (model.config, model.generation_config):
        settings.decoder_start_token_id, settings.pad_token_id, settings.eos_token_id = 1, 0, 2
    tokens = _tokens()
    return model, {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "max_new_tokens": _LENGTH}


def blip() -> _Made:
    """Encodes the image outside of its `forward`, then generates with its decoder."""
    hf.set_seed(0)
    text = {**_LAYERS, **_TEXT, "sep_token_id": 2, "max_position_embeddings": 32, "encoder_hidden_size": 16}
    vision = {**_LAYERS, "image_size": 8, "patch_size": 4}
    model = hf.BlipForConditionalGeneration(hf.BlipConfig(text_config=text, vision_config=vision, projection_dim=16))
    tokens = torch.tensor([[1, 5, 6, 2]]).repeat(2, 1)
    return model, {
        "pixel_values": _noise(2, 3, 8, 8),
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "max_new_tokens": _LENGTH,
    }


def kosmos2() -> _Made:
    """Calls single layers of its parts."""
    hf.set_seed(0)
    text = {
        **_TEXT,
        "embed_dim": 16,
        "layers": 1,
        "ffn_dim": 16,
        "attention_heads": 2,
        "max_position_embeddings": 64,
    }
    vision = {**_LAYERS, "image_size": 8, "patch_size": 4}
    config = hf.Kosmos2Config(text_config=text, vision_config=vision, latent_query_num=2)
    model = hf.Kosmos2ForConditionalGeneration(config)
    tokens = _tokens(2, 6)
    mask = torch.zeros_like(tokens)
    mask[:, 1:3] = 1
    return model, {
        "pixel_values": _noise(2, 3, 8, 8),
        "input_ids": tokens,
        "image_embeds_position_mask": mask,
        "attention_mask": torch.ones_like(tokens),
        "max_new_tokens": _LENGTH,
    }


def parakeet() -> _Made:
    """Generates by one `forward` (CTC), which gets the arguments of `generate`."""
    hf.set_seed(0)
    encoder = {
        **_LAYERS,
        "num_mel_bins": 16,
        "conv_kernel_size": 3,
        "subsampling_conv_channels": 8,
        "max_position_embeddings": 64,
    }
    model = hf.ParakeetForCTC(hf.ParakeetCTCConfig(vocab_size=64, pad_token_id=0, encoder_config=encoder))
    return model, {"input_features": _noise(2, 48, 16), "attention_mask": torch.ones(2, 48, dtype=torch.long)}


def pop2piano() -> _Made:
    """Computes its input from the features and the composer."""
    hf.set_seed(0)
    model = hf.Pop2PianoForConditionalGeneration(
        hf.Pop2PianoConfig(
            vocab_size=64,
            composer_vocab_size=2,
            d_model=16,
            d_kv=8,
            d_ff=16,
            num_layers=1,
            num_decoder_layers=1,
            num_heads=2,
            decoder_start_token_id=0,
        )
    )
    model.generation_config.composer_to_feature_token = {"composer1": 0, "composer2": 1}
    return model, {"input_features": _noise(2, 5, 16), "composer": "composer1", "max_new_tokens": _LENGTH}


def seamless() -> _Made:
    """Makes the tokens that it starts with on its own device."""
    hf.set_seed(0)
    model = hf.SeamlessM4TForTextToText(
        hf.SeamlessM4TConfig(
            **_TEXT,
            hidden_size=16,
            encoder_layers=1,
            encoder_ffn_dim=16,
            encoder_attention_heads=2,
            decoder_layers=1,
            decoder_ffn_dim=16,
            decoder_attention_heads=2,
            max_position_embeddings=64,
            decoder_start_token_id=2,
        )
    )
    model.generation_config.text_decoder_lang_to_code_id = {"eng": 5}
    return model, {"input_ids": _tokens(), "tgt_lang": "eng", "max_new_tokens": _LENGTH}


MODELS: dict[str, Callable[[], _Made]] = {
    "whisper": whisper,
    "bert_pair": bert_pair,
    "blip": blip,
    "kosmos2": kosmos2,
    "parakeet": parakeet,
    "pop2piano": pop2piano,
    "seamless": seamless,
}
# It assigns through a boolean index.
IN_PIECES = ("kosmos2",)


# ---- tests ------------------------------------------------------------------------------------------


_NEW_TOKENS = 8


def _computable(model: Any) -> Any:
    """The model. TorchTPU's attention is a kernel for TPUs, which the stand-in for one cannot run."""
    if ON_TORCH_TPU:
        model.set_attn_implementation("eager")
    return model.eval()


_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {**_TOKENS, "n_layer": 2, "n_embd": 32},
    "llama": {**_TOKENS, "num_hidden_layers": 2, "hidden_size": 32},
    "t5": {"num_layers": 2, "d_model": 32},
    "bart": {"encoder_layers": 2, "decoder_layers": 2, "d_model": 32},
}


def build(name: str) -> Any:
    return _computable(tiny(name, **_SIZES[name]))


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "bart"])
@isolated
def test_tokens_equal_plain_cpu_generation(name: str, tmp_path: Path) -> None:
    model = build(name)
    reference = copy.deepcopy(model)
    prompt = torch.randint(3, 64, (2, 5), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(prompt)
    mask[0, :2] = 0
    trainer = hf_trainer.Trainer(model, transformers.TrainingArguments(output_dir=str(tmp_path), report_to=[]))
    for options in ({"do_sample": False}, {"do_sample": True, "top_k": 20}, {"num_beams": 2, "do_sample": False}):
        options["max_new_tokens"] = _NEW_TOKENS
        transformers.set_seed(1)
        wanted = reference.generate(prompt, attention_mask=mask, **options)
        transformers.set_seed(1)
        with xla_adapters.count() as counters:
            written = trainer.generate(prompt, attention_mask=mask, **options)
        assert torch.equal(written, wanted), options
        # Beams reorder the cache on the device.
        assert counters.eager_ops == 0 or (ON_TORCH_TPU and "num_beams" in options)
        if "num_beams" not in options:
            steps = written.shape[1] - (1 if model.config.is_encoder_decoder else prompt.shape[1])
            encoder = 1 if model.config.is_encoder_decoder else 0
            assert counters.executions == steps + encoder
            assert counters.transfers_to_host <= 2 * steps
    with xla_adapters.count() as again:
        trainer.generate(prompt, attention_mask=mask, do_sample=False, max_new_tokens=_NEW_TOKENS)
    assert again.compiles == 0
    assert "forward" not in vars(trainer.model)


@isolated(timeout=400)
def test_predict_with_generate(tmp_path: Path) -> None:
    tokens = torch.randint(3, 64, (6, 5), generator=torch.Generator().manual_seed(0))
    columns = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}
    data = [{name: value[row] for name, value in columns.items()} for row in range(len(tokens))]
    model = build("t5")
    wanted = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_length=7, do_sample=False).numpy()
    wanted_loss = model(**columns).loss.item()
    shapes: list[tuple[int, ...]] = []

    def metrics(prediction: transformers.EvalPrediction) -> dict[str, float]:
        shapes.append(prediction.predictions.shape)
        return {"matches": float((prediction.predictions[:, : wanted.shape[1]] == wanted).mean())}

    trainer = hf_trainer.Seq2SeqTrainer(
        model,
        transformers.Seq2SeqTrainingArguments(
            output_dir=str(tmp_path),
            report_to=[],
            per_device_eval_batch_size=3,
            predict_with_generate=True,
            generation_max_length=7,
        ),
        eval_dataset=data,
        compute_metrics=metrics,
    )
    first = trainer.evaluate()
    with xla_adapters.count() as counters:
        second = trainer.evaluate()
    assert first["eval_matches"] == second["eval_matches"] == 1.0
    assert abs(first["eval_loss"] - wanted_loss) < 1e-5
    assert counters.compiles == counters.eager_ops == 0
    # Per batch: the encoder, six tokens, and the forward for the loss.
    assert counters.executions == 2 * (1 + 6 + 1)
    predictions = trainer.predict(data).predictions
    assert np.array_equal(predictions[:, : wanted.shape[1]], wanted)
    assert "generate" not in vars(trainer.model)


@pytest.mark.parametrize("name", MODELS)
@isolated(timeout=400)
def test_models_that_generate_in_a_way_of_their_own(name: str, tmp_path: Path) -> None:
    xla_adapters.initialize()
    model, inputs = MODELS[name]()
    reference = copy.deepcopy(_computable(model))
    wanted = reference.generate(**inputs)
    args = transformers.TrainingArguments(output_dir=str(tmp_path), report_to=[])
    trainer = hf_trainer.Trainer(model, args, on_graph_break="warn" if name in IN_PIECES else "error")
    assert torch.equal(trainer.generate(**inputs), wanted)
    with xla_adapters.count() as again:
        assert torch.equal(trainer.generate(**inputs), wanted)
    assert again.compiles == again.eager_ops == 0
    # Vision or text is encoded once; the first of the new tokens is a start token in some models.
    new_tokens = 1 if name == "parakeet" else inputs["max_new_tokens"]
    assert again.executions <= new_tokens + (4 if name in IN_PIECES else 2)
    assert not any("forward" in vars(part) or "generate" in vars(part) for part in model.modules())
    assert model.device.type == DEVICE


@pytest.mark.parametrize("name", ["whisper", "bert_pair"])
@isolated(timeout=400)
def test_predict_with_generate_by_another_input(name: str, tmp_path: Path) -> None:
    xla_adapters.initialize()
    model, inputs = MODELS[name]()
    options = {"max_new_tokens": inputs.pop("max_new_tokens")}
    wanted = copy.deepcopy(_computable(model)).generate(**inputs, **options).numpy()
    labels = torch.full((2, 5), 5)
    rows = [{key: value[row] for key, value in (*inputs.items(), ("labels", labels))} for row in range(2)]
    args = transformers.Seq2SeqTrainingArguments(
        output_dir=str(tmp_path), report_to=[], predict_with_generate=True, per_device_eval_batch_size=2
    )
    trainer = hf_trainer.Seq2SeqTrainer(model, args)
    result = trainer.predict(rows, **options)
    assert np.array_equal(result.predictions[:, : wanted.shape[1]], wanted)
    assert np.isfinite(result.metrics["test_loss"])


# ---- replays ----------------------------------------------------------------------------------------


class Scaled(transformers.GPT2LMHeadModel):
    """Reads a number of its own, which may change between two tokens."""

    scale = 1.0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        computed = super().forward(*args, **kwargs)
        return hf.modeling_outputs.CausalLMOutputWithPast(
            logits=computed.logits * self.scale, past_key_values=computed.past_key_values
        )


class Doubtful(transformers.GPT2LMHeadModel):
    """Reads a number in a way that is not followed."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        computed = super().forward(*args, **kwargs)
        logits = computed.logits * getattr(self, "scale", 2.0)
        return hf.modeling_outputs.CausalLMOutputWithPast(logits=logits, past_key_values=computed.past_key_values)


class Counting(transformers.GPT2LMHeadModel):
    """Does something beside tensors, which a replay would leave out."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(*args, **kwargs)


class At(transformers.StoppingCriteria):
    """Calls a function behind some tokens."""

    def __init__(self, tokens: tuple[int, ...], change: Callable[[], object]) -> None:
        self.tokens, self.change, self.seen = tokens, change, 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.seen += 1
        if self.seen in self.tokens:
            self.change()
        return torch.zeros(len(input_ids), dtype=torch.bool)


def _own(kind: type) -> Any:
    transformers.set_seed(0)
    return _computable(kind(config_of("gpt2"))).eval()


def _greedy(model: Any, tokens: torch.Tensor, count: int = 11, **options: Any) -> dict[str, Any]:
    model.generation_config.eos_token_id = None
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "max_new_tokens": count, **options}


def _made(model: Any, tmp_path: Path, **options: Any) -> Any:
    return hf_trainer.Trainer(model, transformers.TrainingArguments(str(tmp_path), report_to=[]), **options)


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "bart"])
@isolated
def test_tokens_are_replayed(name: str, tmp_path: Path) -> None:
    """Also for other batches of that shape, beams, samples, and after the weights have changed."""
    model = build(name)
    reference = copy.deepcopy(model)
    trainer = _made(model, tmp_path)
    program = trainer._xla.steps.generation.program
    seed = 0
    for choice in ({"do_sample": False}, {"do_sample": True, "top_k": 20}, {"num_beams": 2, "do_sample": False}):
        for _ in range(2):
            seed += 1
            prompt = torch.randint(3, 64, (2, 5), generator=torch.Generator().manual_seed(seed))
            options = _greedy(reference, prompt, 11, do_sample=choice["do_sample"]) | choice
            model.generation_config.eos_token_id = None
            transformers.set_seed(seed)
            wanted = reference.generate(**options)
            transformers.set_seed(seed)
            before = program.calls, program.replays, program.verified
            with xla_adapters.count() as counters:
                assert torch.equal(trainer.generate(**options), wanted), options
            calls, replays, verified = program.calls - before[0], program.replays - before[1], program.verified
            with torch.no_grad():
                for one in (*model.parameters(), *reference.parameters()):
                    one.mul_(1.25)
        # In the second generation all but what makes the cache, and what verifies.
        first = 2 if model.config.is_encoder_decoder else 1
        assert replays == calls - first - (verified - before[2])
        if "num_beams" not in choice:
            assert counters.executions - 2 * (verified - before[2]) <= calls
    assert not program.replay_reasons
    assert "forward" not in vars(model)


@isolated
def test_a_method_of_the_cache_that_is_replaced_between_two_tokens(tmp_path: Path) -> None:
    own, model = StaticLayer.update, build("gpt2")
    reference = copy.deepcopy(model)
    trainer = _made(model, tmp_path)

    def half_the_keys(layer: Any, keys: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return own(layer, keys / 2, *args, **kwargs)

    written = []
    for one in (reference, model):
        one.generation_config.eos_token_id = None
        options = _greedy(reference, _tokens()) | {"cache_implementation": "static", "disable_compile": True}
        replace = At((7,), lambda: setattr(StaticLayer, "update", half_the_keys))
        try:
            generate = one.generate if one is reference else trainer.generate
            written.append(generate(**options, stopping_criteria=[replace]))
        finally:
            StaticLayer.update = own  # type: ignore[method-assign]
    assert torch.equal(*written)
    assert trainer._xla.steps.generation.program.replays


class OwnT5(transformers.T5ForConditionalGeneration):
    """As of a script."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None, **others: Any) -> Any:
        return super().forward(input_ids, attention_mask, labels=labels, **others)


@pytest.mark.parametrize("kind", [transformers.T5ForConditionalGeneration, OwnT5])
@isolated(timeout=400)
def test_tokens_of_evaluations_are_replayed(kind: type, tmp_path: Path) -> None:
    """Also from the second batch on."""
    model: Any = _computable(kind(build("t5").config))
    model.generation_config.eos_token_id = None
    for parameter in model.parameters():
        # With the usual ones all that so small a model writes is padding.
        torch.nn.init.normal_(parameter, std=0.5)
    tokens = _tokens(10, 5)
    data = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row} for row in tokens]
    wanted = copy.deepcopy(model).generate(tokens, max_length=9, do_sample=False).numpy()
    args = transformers.Seq2SeqTrainingArguments(
        str(tmp_path), report_to=[], predict_with_generate=True, per_device_eval_batch_size=2, generation_max_length=9
    )
    trainer = hf_trainer.Seq2SeqTrainer(model, args)
    assert np.array_equal(trainer.predict(data).predictions[:, :9], wanted)
    assert len(set(wanted.flatten().tolist())) > 3
    program = trainer._xla.steps.generation.program
    # Five batches of an encoder, eight tokens, and the forward for the loss.
    assert program.calls == 5 * (1 + 8 + 1)
    # The first token makes the cache; two more are traced, and again as the first batch has changed the configuration.
    assert program.replays + program.verified == 5 * 7 - 2 - 2


@isolated
def test_what_changes_between_two_tokens(tmp_path: Path) -> None:
    """A number that the model reads, a hook, and a module that was replaced."""

    def changes(model: Any) -> At:
        def change() -> None:
            model.scale = -model.scale
            if stop.seen > 7:
                model.transformer.h[0].mlp.register_forward_hook(lambda module, args, result: result * 0)
            if stop.seen > 8:
                model.transformer.h[0].ln_1 = torch.nn.Identity()

        stop = At((5, 6, 8, 9), change)
        return stop

    model = _own(Scaled)
    reference = copy.deepcopy(model)
    trainer = _made(model, tmp_path)
    tokens = _tokens()
    wanted = reference.generate(**_greedy(reference, tokens), stopping_criteria=[changes(reference)])
    written = trainer.generate(**_greedy(model, tokens), stopping_criteria=[changes(model)])
    assert torch.equal(written, wanted)
    assert trainer._xla.steps.generation.program.replays


@isolated
def test_tokens_are_replayed_again_when_a_hook_is_gone(tmp_path: Path) -> None:
    model = build("gpt2")
    reference = copy.deepcopy(model)
    trainer = _made(model, tmp_path)
    program = trainer._xla.steps.generation.program

    def replays() -> int:
        before = program.replays
        options = _greedy(reference, _tokens())
        model.generation_config.eos_token_id = None
        assert torch.equal(trainer.generate(**options), reference.generate(**options))
        return program.replays - before

    replays()
    hooks = [
        one.transformer.h[0].register_forward_hook(lambda module, args, result: result) for one in (model, reference)
    ]
    assert not replays()
    for hook in hooks:
        hook.remove()
    for _ in range(3):
        replays()
    assert replays() >= 8


@pytest.mark.parametrize("how", ["counts", "doubtful", "refused", "promised", "sliding"])
@isolated
def test_tokens_that_are_not_replayed(how: str, tmp_path: Path) -> None:
    """And one kind that is, since the user promises it."""
    if how == "sliding":
        transformers.set_seed(0)
        config = transformers.MistralConfig(**_LAYERS, **_TEXT, num_key_value_heads=2, sliding_window=4)
        model: Any = _computable(transformers.MistralForCausalLM(config)).eval()
    else:
        kinds = {"counts": Counting, "refused": transformers.GPT2LMHeadModel, "promised": Doubtful}
        model = _own(kinds.get(how, Doubtful))
    reference = copy.deepcopy(model)
    replay: Any = {"refused": False, "promised": True}.get(how, "auto")
    trainer = _made(model, tmp_path, step_replay=replay)
    tokens = _tokens()
    for _ in range(2):
        assert torch.equal(trainer.generate(**_greedy(model, tokens)), reference.generate(**_greedy(reference, tokens)))
    program = trainer._xla.steps.generation.program
    assert bool(program.replays) == (how == "promised")
    if how == "counts":
        assert model.calls == reference.calls == 22
    if how == "sliding":
        assert any("StaticCache keeps Python numbers" in reason for reason in program.replay_reasons)
    if how in ("counts", "doubtful"):
        assert any("getattr" in reason and "test_generation.py" in reason for reason in program.replay_reasons)


@isolated
def test_an_evaluation_with_logits_is_replayed(tmp_path: Path) -> None:
    """Those of a linear layer are a view."""
    model = build("gpt2")
    rows = _tokens(12, 8)
    data = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row} for row in rows]
    with torch.no_grad():
        wanted = copy.deepcopy(model).eval()(input_ids=rows).logits.numpy()
    args = transformers.TrainingArguments(str(tmp_path), report_to=[], per_device_eval_batch_size=2)
    trainer = hf_trainer.Trainer(model, args, eval_dataset=data, compute_metrics=lambda prediction: {})
    assert np.allclose(trainer.predict(data).predictions, wanted, atol=1e-5)
    program = trainer._xla.steps.evaluation["eval_step"]
    assert (program.calls, program.replays) == (6, 4)
    assert not program.replay_reasons


# ---- few shapes -------------------------------------------------------------------------------------


def _prompts(*lengths: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One row for each length, masked in front."""
    ids = _tokens(len(lengths), max(lengths))
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        mask[row, : max(lengths) - length] = 0
    return ids.masked_fill(mask == 0, 0), mask


def _of_causal_models(family: str) -> bool:
    return type(config_of(family)) in transformers.AutoModelForCausalLM._model_mapping


@pytest.mark.parametrize(
    "family", sorted(family for family in NOT_SEEING_PADDING - _COUNTING_ALL if _of_causal_models(family))
)
@isolated
def test_decoders_do_not_see_what_is_before_a_prompt(family: str) -> None:
    """On the CPU, with larger weights, since small ones hide differences."""
    transformers.set_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_of(family)).eval()
    for parameter in model.parameters():
        parameter.data.mul_(4 if parameter.ndim > 1 else 1)
    ids, mask = _prompts(7, 4, 6)
    options = {"max_new_tokens": _LENGTH, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found = []
    for before in (0, 5):
        given = {"inputs": ids, "attention_mask": mask}
        given = {name: torch.nn.functional.pad(value, (before, 0)) for name, value in given.items()}
        result = model.generate(**given, **options, return_dict_in_generate=True, output_logits=True)
        found.append((result.sequences[:, before:], torch.stack(result.logits)))
    assert torch.equal(found[0][0], found[1][0])
    scale = float(found[0][1].abs().max())
    torch.testing.assert_close(found[1][1], found[0][1], atol=2e-4 * max(1, scale), rtol=0)


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
@isolated(timeout=400)
def test_prompts_of_few_lengths(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = build(name)
    reference = copy.deepcopy(model)
    args = transformers.TrainingArguments(output_dir=str(tmp_path), report_to=[])
    trainer = hf_trainer.Trainer(model, args, shapes={"buckets": [4, 8]})
    greedy: dict[str, Any] = {"do_sample": False, "max_new_tokens": 3}
    of_pairs = model.config.is_encoder_decoder

    def as_on_the_cpu(*lengths: int, **options: Any) -> None:
        ids, mask = _prompts(*lengths)
        if of_pairs:
            ids, mask = ids.flip(1), mask.flip(1)
        transformers.set_seed(1)
        wanted = reference.generate(ids, attention_mask=mask, **options)
        transformers.set_seed(1)
        assert torch.equal(trainer.generate(ids, attention_mask=mask, **options), wanted), (lengths, options)

    with xla_adapters.count() as counters:
        for longest in (5, 3, 8, 7, 6, 4):
            as_on_the_cpu(longest, 3, **greedy)
    # Two lengths of the first call; the next tokens of a decoder have one cache for both.
    assert counters.compiles + counters.loads == (2 * 3 if of_pairs else 2 + 1)
    as_on_the_cpu(6, 3, do_sample=True, top_k=20, max_new_tokens=3)
    as_on_the_cpu(6, 3, do_sample=False, num_beams=2, num_return_sequences=2, max_new_tokens=3, length_penalty=0.5)
    # Whole lengths, which count the prompt's.
    as_on_the_cpu(7, 3, do_sample=False, max_length=10, min_length=9)
    ids, mask = _prompts(6, 3)
    config = transformers.GenerationConfig(max_length=9, do_sample=False, return_dict_in_generate=True)
    given = {"attention_mask": mask, "generation_config": config}
    assert torch.equal(trainer.generate(ids, **given).sequences, reference.generate(ids, **given).sequences)
    assert "keep their length" not in caplog.text
    # The cache is as long for each of them.
    as_on_the_cpu(7, 3, do_sample=False, max_length=12)
    with xla_adapters.count() as again:
        as_on_the_cpu(6, 3, do_sample=False, max_length=12)
        as_on_the_cpu(5, 5, do_sample=False, max_length=12)
    assert again.compiles + again.loads == 0
    found = trainer.generate(ids, max_new_tokens=3, attention_mask=mask, return_dict_in_generate=True)
    assert "past_key_values" not in found
    guessing = transformers.GenerationConfig(max_new_tokens=3, prompt_lookup_num_tokens=2)
    with pytest.raises(UnsupportedOptionError, match="prompt_lookup_num_tokens"):
        trainer.generate(ids, attention_mask=mask, generation_config=guessing)
    with pytest.raises(UnsupportedOptionError, match=r"assistant_model=\.\.\.\): tokens that were guessed wrong"):
        trainer.generate(ids, max_new_tokens=3, attention_mask=mask, assistant_model=build(name))
    # What looks at a prompt sees it as it is.
    as_on_the_cpu(7, 3, repetition_penalty=1.5, **greedy)
    assert ("repetition_penalty of generate may see" in caplog.text) != of_pairs
    # Also what the model's own config says where the caller's says nothing.
    for generating in (trainer.model, reference):
        generating.generation_config.no_repeat_ngram_size = 2
    as_on_the_cpu(6, 3, generation_config=transformers.GenerationConfig(max_new_tokens=3, do_sample=False))
    assert ("no_repeat_ngram_size of generate may see" in caplog.text) != of_pairs
    for generating in (trainer.model, reference):
        generating.generation_config.no_repeat_ngram_size = None
    as_on_the_cpu(9, 3, **greedy)
    assert "more than the last bucket (8)" in caplog.text
    if name == "gpt2":
        as_on_the_cpu(7, 3, do_sample=False, max_new_tokens=9)
        assert "17 positions (a bucket and new tokens) are more than the 16 of the model" in caplog.text


class OwnLlama(transformers.LlamaForCausalLM):
    """As of a script."""


OwnLlama.__module__ = "__main__"


_needs_peft = pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")


@pytest.mark.parametrize("how", ["class", pytest.param("lora", marks=_needs_peft)])
@isolated
def test_models_of_ones_own(how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model: Any = build("llama")
    if how == "class":
        model = OwnLlama(model.config).eval()
    else:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False)).eval()
    reference = copy.deepcopy(model)
    args = transformers.TrainingArguments(output_dir=str(tmp_path), report_to=[])
    trainer = hf_trainer.Trainer(model, args, shapes={"buckets": [4, 8]})
    with xla_adapters.count() as counters:
        for longest in (5, 3, 7):
            ids, mask = _prompts(longest, 3)
            given = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 3, "do_sample": False}
            assert torch.equal(trainer.generate(**given), reference.generate(**given))
    assert counters.compiles + counters.loads == 2 + 1
    assert "keep their length" not in caplog.text


@_needs_peft
@isolated
def test_prompt_tuning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import peft

    tuning = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model: Any = peft.get_peft_model(build("llama"), tuning)
    ids, mask = _prompts(6, 3)
    given = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 4, "do_sample": False}
    wanted = copy.deepcopy(model).generate(**given)
    args = transformers.TrainingArguments(output_dir=str(tmp_path), report_to=[])
    trainer = hf_trainer.Trainer(model, args, shapes={"buckets": [8]})
    assert torch.equal(trainer.generate(**given), wanted)


@pytest.mark.parametrize("name", ["gpt2", "t5"])
@isolated(timeout=400)
def test_an_evaluation_that_generates_has_few_graphs(name: str, tmp_path: Path, caplog: Any) -> None:
    model = _computable(tiny(name, **_SIZES[name], **({"n_positions": 64} if name == "gpt2" else {})))
    of_pairs = model.config.is_encoder_decoder
    numbers = random.Random(0)
    data = []
    for _ in range(22):
        ids = [numbers.randrange(3, 64) for _ in range(numbers.randint(3, 14))]
        data.append({"input_ids": ids, "labels": ids[: numbers.randint(2, 6)] if of_pairs else ids})

    def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        def padded(rows: list[list[int]], fill: int) -> torch.Tensor:
            longest = max(map(len, rows))
            extended = [[fill] * (longest - len(row)) for row in rows]
            pairs = zip(rows, extended, strict=True)
            return torch.tensor([row + more if of_pairs else more + row for row, more in pairs])

        ids = [sample["input_ids"] for sample in samples]
        mask = padded([[1] * len(row) for row in ids], 0)
        labels = padded([sample["labels"] for sample in samples], -100)
        return {"input_ids": padded(ids, 0), "attention_mask": mask, "labels": labels}

    def predictions(shapes: Any) -> tuple[Any, int]:
        args = transformers.Seq2SeqTrainingArguments(
            output_dir=str(tmp_path), report_to=[], predict_with_generate=True, per_device_eval_batch_size=4
        )
        trainer = hf_trainer.Seq2SeqTrainer(copy.deepcopy(model), args, data_collator=collate, shapes=shapes)
        with xla_adapters.count() as counters:
            predicted = trainer.predict(data, do_sample=False, max_new_tokens=4)  # type: ignore[arg-type]
        return predicted, counters.compiles + counters.loads

    actual, graphs = predictions({"buckets": 2})
    expected, _ = predictions(None)
    batches = [collate(data[begin : begin + 4]) for begin in range(0, len(data), 4)]
    losses = [model(**batch).loss.item() for batch in batches]
    loss = sum(loss * len(batch["labels"]) for loss, batch in zip(losses, batches, strict=True)) / len(data)
    assert abs(actual.metrics["test_loss"] - loss) < 1e-4
    assert abs(expected.metrics["test_loss"] - loss) < 1e-4
    assert np.array_equal(actual.predictions, expected.predictions)
    assert np.array_equal(actual.label_ids, expected.label_ids)
    # A loss and a first call for each length, and (with an encoder) that and next tokens, too.
    assert graphs == (2 * 4 if of_pairs else 2 * 2 + 1)
    assert "keep" not in caplog.text
