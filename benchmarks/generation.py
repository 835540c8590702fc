"""What a token of a generation costs the host; `python -m benchmarks.generation`.

Greedy generation with a static cache, in turn by stock transformers on torch_xla, by ours traced, and by ours replayed.
Each is generated with until nothing compiles, then timed; medians over the rounds.
  host   milliseconds of CPU time of the process for a token, with what XLA computes and
         transformers' own loop.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ["XLA_ADAPTERS_CACHE_DIR"] = "off"

import torch
import transformers

import hf_trainer
from benchmarks import report
from tests.children import run_in_child
from xla_adapters import XLAConfig, initialize

# Of the host time of a traced token, and of a stock one.
LIMIT = 0.5
_SIZE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
_WARM_UP = 3


def models() -> dict[str, Callable[[], Any]]:
    """What generates, by name."""
    return {
        "GPT-2 4x128": lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=256, n_positions=128, n_embd=128, n_layer=4, n_head=4)
        ),
        "Llama 4x128": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=256, **_SIZE)),
        "T5 4x128": lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(vocab_size=256, d_model=128, d_kv=32, d_ff=256, num_layers=4, num_heads=4)
        ),
    }


def milliseconds(name: str, tokens: int, replay: bool | None) -> float:
    """Of the host's CPU for a token.

    Args:
        name: of the model.
        tokens: how many are generated.
        replay: None for stock transformers.
    """
    initialize(eager=replay is not None, keep_memory=False if replay is None else None)
    transformers.set_seed(0)
    model = models()[name]().eval()
    prompt = torch.randint(3, 256, (4, 16))
    model.generation_config.eos_token_id = None
    model.generation_config.update(decoder_start_token_id=0, pad_token_id=0)
    options: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": False}
    with tempfile.TemporaryDirectory() as folder:
        if replay is None:
            model.to("xla")
            options |= {"cache_implementation": "static", "disable_compile": True}
            generate = partial(model.generate, prompt.to("xla"), **options)
        else:
            # Verifications, of which so few tokens would have many, have a benchmark of their own.
            config = XLAConfig(step_replay="auto" if replay else False, replay_verify_every=None)
            args = transformers.TrainingArguments(folder, report_to=[])
            generate = partial(hf_trainer.Trainer(model, args, xla_args=config).generate, prompt, **options)
        for _ in range(_WARM_UP):
            generate().cpu()
        begin = time.process_time()
        generate().cpu()
        return 1e3 * (time.process_time() - begin) / tokens


def main(given: list[str] | None = None) -> int:
    """Measures, prints, checks."""
    parser = report.parser("What a token costs the host.")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(given)
    torch.set_num_threads(1)
    kinds: dict[str, bool | None] = {"stock": None, "traced": False, "replayed": True}
    found: dict[str, dict[str, list[float]]] = {name: {kind: [] for kind in kinds} for name in models()}
    for _ in range(options.rounds):
        for name, times in found.items():
            for kind, replay in kinds.items():
                run = partial(milliseconds, name, options.tokens, replay)
                times[kind].append(run_in_child(run, timeout=900).result())
    rows = []
    for name, times in found.items():
        of_stock, of_traced = (
            statistics.median(ours / other for ours, other in zip(times["replayed"], times[kind], strict=True))
            for kind in ("stock", "traced")
        )
        rows.append((name, *(statistics.median(times[kind]) for kind in kinds), of_stock, of_traced))
    print(report.table(("model", *(f"{kind}, ms" for kind in kinds), "of stock", "of traced"), rows))
    made = report.Report(
        "generation", settings={"tokens": options.tokens, "rounds": options.rounds}, results={"milliseconds": found}
    )
    for name, *_, of_stock, of_traced in rows:
        made.target(f"{name}: host time of a replayed token, of a stock one", of_stock, "at most", LIMIT)
        made.target(f"{name}: host time of a replayed token, of a traced one", of_traced, "at most", LIMIT)
    return made.finish(options)


if __name__ == "__main__":
    sys.exit(main())
