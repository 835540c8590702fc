"""Typical user programs for `benchmarks.replay_coverage`."""

from __future__ import annotations

from tests.programs import (
    hf_models,
    hf_user_code,
    lightning_guides,
    lightning_tutorials,
    own_loops,
)
from tests.programs.program import Program, hf, lightning, own_loop

PROGRAMS: tuple[Program, ...] = (
    hf("gpt2", hf_models.gpt2, stock=True),
    hf("llama-accumulation", hf_models.llama, calls=2, stock=True),
    hf("qwen2-evaluated", hf_models.qwen2, stock=True),
    hf("mistral-sgd", hf_models.mistral, stock=True),
    hf("t5-seq2seq", hf_models.t5, stock=True),
    hf("bert-best-model", hf_models.bert, stock=True),
    hf("distilbert-smoothing", hf_models.distilbert, stock=True),
    hf("bert-tokens", hf_models.token_classification, stock=True),
    hf("distilbert-questions", hf_models.question_answering, stock=True),
    hf("roberta-masked", hf_models.masked_language, stock=True),
    hf("bert-choice", hf_models.multiple_choice, stock=True),
    hf("vit-digits", hf_models.vit, stock=True),
    hf("convnext-digits", hf_models.convnext, stock=True),
    hf("ast-audio", hf_models.audio_classification, stock=True),
    hf("whisper-speech", hf_models.speech_to_text, stock=True),
    hf("weighted-loss", hf_user_code.weighted_loss),
    hf("weighted-loss-function", hf_user_code.weighted_loss_function),
    hf("focal-loss", hf_user_code.focal_loss),
    hf("distillation", hf_user_code.distillation),
    hf("several-heads", hf_user_code.several_heads),
    hf("lora", hf_user_code.lora),
    hf("own-sgd", hf_user_code.sgd),
    hf("layerwise-rates", hf_user_code.layerwise_rates),
    hf("annealed-loss", hf_user_code.annealed_loss),
    lightning("autoencoder", lightning_guides.autoencoder),
    lightning("digits-classifier", lightning_guides.digits_classifier),
    lightning("one-cycle", lightning_guides.one_cycle),
    lightning("transfer", lightning_guides.transfer),
    lightning("transformer-lm", lightning_guides.transformer_lm, calls=2),
    lightning("gan", lightning_tutorials.gan),
    lightning("averaged-weights", lightning_tutorials.averaged_weights),
    lightning("mixup", lightning_tutorials.mixup),
    lightning("several-losses", lightning_tutorials.several_losses),
    lightning("vae-warmup", lightning_tutorials.vae),
    own_loop("loop-mlp", own_loops.mlp),
    own_loop("loop-convnet", own_loops.convnet),
    own_loop("loop-transformer", own_loops.transformer),
    own_loop("loop-method", own_loops.method),
    own_loop("loop-accumulation", own_loops.accumulation),
    own_loop("loop-contrastive", own_loops.contrastive),
)


def named(names: str) -> list[Program]:
    """The programs of these names, comma-separated; all if empty.

    Raises:
        ValueError: there is none of a name; the message lists what there is.
    """
    known = {program.name: program for program in PROGRAMS}
    words = [word.strip() for word in names.split(",")] if names else list(known)
    for word in words:
        if word not in known:
            raise ValueError(f"no program is called {word!r}; there are {', '.join(known)}")
    return [known[word] for word in words]
