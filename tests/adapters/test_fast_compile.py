"""`initialize(fast_compile=True)` in both trainers: the same run up to rounding of sums, one graph, replayed."""

from __future__ import annotations

import functools
import logging
import re
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertForMaskedLM

import xla_adapters
from lightning_strategy import XLAEagerStrategy
from tests.hf_trainer.scenarios import arguments, ours, steps_of, token_samples
from tests.isolation import run_in_child
from tests.lightning_strategy.scenarios import CLASSES, FEATURES, Classifier, fit
from tests.tiny_models import tiny

# ---- transformers -----------------------------------------------------------------------------------


# A compiler pass ignores rows of up to 32 numbers. The sums here are longer.
_WIDTH, _LENGTH, _STEPS = 48, 40, 6
# From this number on, equal layers are compiled as one outlined function.
_LAYERS = 8
_SIZES = {
    "hidden_size": _WIDTH,
    "intermediate_size": 2 * _WIDTH,
    "num_hidden_layers": _LAYERS,
    "max_position_embeddings": _LENGTH,
}
_GPT2 = {"n_positions": _LENGTH, "n_embd": _WIDTH, "n_layer": _LAYERS}


def _model(name: str, dropout: float) -> Any:
    if name == "gpt2":
        return tiny("gpt2", **_GPT2, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout)
    if name == "llama":
        return tiny("llama", **_SIZES, attention_dropout=dropout)
    return tiny("bert", kind=BertForMaskedLM, **_SIZES, hidden_dropout_prob=dropout)


class _Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _train(
    fast: bool, name: str, dropout: float, optim: str, accumulation: int
) -> tuple[list[float], dict[str, torch.Tensor], int, int]:
    """Losses, parameters, and the numbers of replayed steps and compiles."""
    xla_adapters.initialize(fast_compile=fast)
    # Outlined functions have tests of their own.
    said = _Messages()
    logger = logging.getLogger("xla_adapters")
    logger.addHandler(said)
    logger.setLevel(logging.INFO)
    torch.manual_seed(0)
    args = arguments(max_steps=_STEPS, logging_steps=1, optim=optim, gradient_accumulation_steps=accumulation)
    run = ours(_model(name, dropout), token_samples(32, length=_LENGTH), args=args)
    run.assert_one_graph(_STEPS, graphs=accumulation, executions_per_step=accumulation)
    # Accumulation has a second graph, without the update.
    assert len(xla_adapters.get_runtime().executables._calls) == (accumulation if fast else 0)  # type: ignore[attr-defined]
    in_loops = [text.partition("of these loops: ")[2] for text in said.texts if "is compiled in blocks" in text]
    # The layers and their gradients, but for those of an end.
    turns = [[int(number) for number in re.findall(r"(\d+) times", text)] for text in in_loops]
    assert [len(found) for found in turns] == ([2] * accumulation if fast else [])
    assert all(number >= _LAYERS - 1 for found in turns for number in found)
    return run.losses, run.parameters(), steps_of(run.trainer).train.replays, run.counts.compiles


@pytest.mark.parametrize(
    ("name", "dropout", "optim", "accumulation"),
    [
        ("bert", 0.0, "sgd", 1),
        pytest.param("gpt2", 0.2, "adamw_torch", 2, marks=pytest.mark.slow),
        pytest.param("llama", 0.2, "sgd", 1, marks=pytest.mark.slow),
    ],
)
def test_the_same_training_but_for_rounding(name: str, dropout: float, optim: str, accumulation: int) -> None:
    one, other = (
        run_in_child(functools.partial(_train, fast, name, dropout, optim, accumulation)) for fast in (False, True)
    )
    assert one[2:] == other[2:]
    assert other[2] == (_STEPS - 2) * accumulation
    assert other[0] == pytest.approx(one[0], rel=1e-5)
    if optim == "sgd":
        # AdamW goes as far for a gradient that is nothing but rounding as for any other.
        for parameter, value in one[1].items():
            torch.testing.assert_close(other[1][parameter], value, rtol=1e-5, atol=1e-6, msg=parameter)


# ---- Lightning --------------------------------------------------------------------------------------


class _Deep(Classifier):
    def __init__(self) -> None:
        super().__init__()
        layers = [
            nn.TransformerEncoderLayer(FEATURES, 2, 16, dropout=0.1, activation="gelu", batch_first=True)
            for _ in range(6)
        ]
        self.net = nn.Sequential(*layers, nn.Linear(FEATURES, CLASSES))


def _fit(fast: bool) -> tuple[list[float], int, int, int]:
    xla_adapters.initialize(fast_compile=fast)
    # Graphs that are compiled in blocks are counted separately.
    run = fit(_Deep, XLAEagerStrategy(), gradient_clip_val=1.0)
    in_blocks = len(xla_adapters.get_runtime().executables._calls)  # type: ignore[attr-defined]
    return run.module.losses, run.counters.compiles, run.counters.executions, in_blocks


@pytest.mark.slow
def test_the_same_training_in_one_graph() -> None:
    usual, fast = (run_in_child(functools.partial(_fit, fast)) for fast in (False, True))
    assert fast[1:3] == usual[1:3]
    assert (usual[3], fast[3]) == (0, 1)
    assert fast[0] == pytest.approx(usual[0], rel=1e-4)
