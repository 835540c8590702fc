"""Few shapes by buckets of lengths; `python -m benchmarks.shapes`.

Lengths, in bytes, of: sentences of the docstrings of Python's standard library, its source files (divided by 16), and a
log-normal distribution. Batches of 16 samples, two epochs.
  padded       elements after padding, to the number that the best buckets need with such batches
               (by a plain recurrence over all lengths, not by the code that is measured);
  one length   useful elements per padded one, to those if all samples were as long as the longest;
  shapes       different shapes of batches; "grouped" those of transformers' train_sampling_strategy="group_by_length",
               each of which it compiles.
Then a GPT-2 is trained on the sentences, with buckets and with one length, in turn; no replay is verified:
  tokens/s     useful ones in the last of three epochs, medians over the rounds.
"""

from __future__ import annotations

import ast
import os
import random
import statistics
import sys
import sysconfig
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ["XLA_ADAPTERS_CACHE_DIR"] = "off"

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments
from transformers.trainer_pt_utils import LengthGroupedSampler

import hf_trainer
from benchmarks import report
from tests.children import run_in_child
from xla_adapters.data.shapes import ShapePolicy

_BATCH, _EPOCHS, _BUCKETS = 16, 2, (1, 4, 8)
_SAMPLES, _LONGEST = 2000, 2048
_TRAINED, _TRAINED_LONGEST = 1280, 256


def lengths() -> dict[str, list[int]]:
    """The lengths of the three kinds of data."""
    sentences, files = [], []
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.rglob("*.py")):
        if {"site-packages", "test", "tests"} & set(path.parts):
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        files.append(min(_LONGEST, len(text) // 16 + 1))
        for node in ast.walk(ast.parse(text)) if path.parent == library else ():
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (told := ast.get_docstring(node)):
                sentences += [min(_LONGEST, len(part)) for part in told.split(". ") if part]
    numbers = random.Random(0)
    normal = [min(_LONGEST, int(numbers.lognormvariate(5, 0.8)) + 1) for _ in range(_SAMPLES)]
    return {"sentences": numbers.sample(sentences, _SAMPLES), "source files": files, "log-normal": normal}


def least(sizes: list[int], number: int) -> int:
    """Elements after padding to the best `number` lengths, of batches of the longest samples, the next, and so on."""
    ordered = sorted(sizes, reverse=True)
    batches = [ordered[begin : begin + _BATCH] for begin in range(0, len(ordered), _BATCH)]
    longest = [batch[0] for batch in batches for _ in batch]
    distinct = sorted(set(longest))
    count = [0, *(sum(size <= bound for size in longest) for bound in distinct)]
    best: list[float] = [0.0, *([float("inf")] * len(distinct))]
    for _ in range(number):
        best = [
            0.0,
            *(
                min(best[begin] + (count[end] - count[begin]) * distinct[end - 1] for begin in range(end))
                for end in range(1, len(distinct) + 1)
            ),
        ]
    return int(best[-1])


def counted(name: str, sizes: list[int], number: int) -> dict[str, Any]:
    """What batches cost with so many buckets; nothing is trained."""
    shapes = ShapePolicy(buckets=number).fit(sizes, rows=_BATCH)
    sampler = shapes.sampler(sizes, _BATCH)
    padded, seen, grouped = 0, set(), set()
    stock = LengthGroupedSampler(_BATCH, lengths=sizes, generator=torch.Generator().manual_seed(0))
    for epoch in range(_EPOCHS):
        sampler.set_epoch(epoch)
        for order, longest, found in ((sampler, shapes.bounds, seen), (stock, None, grouped)):
            indices = list(order)
            for begin in range(0, len(sizes), _BATCH):
                rows = [sizes[index] for index in indices[begin : begin + _BATCH]]
                size = max(rows)
                if longest is not None:
                    size = next(bound for bound in longest if bound >= size)
                    padded += size * len(rows)
                found.add((len(rows) if longest is None else _BATCH, size))
    useful = _EPOCHS * sum(sizes)
    return {
        "data": name,
        "buckets": number,
        "padding": 1 - useful / padded,
        "padded": padded / (_EPOCHS * least(sizes, number)),
        "gain": _EPOCHS * len(sizes) * max(sizes) / padded,
        "shapes": len(seen),
        "grouped": len(grouped),
    }


class _Epochs(TrainerCallback):
    def __init__(self) -> None:
        self.times: list[float] = []

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.times.append(time.perf_counter())

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.end = time.perf_counter()


def _collate(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    longest = max(len(sample["input_ids"]) for sample in samples)
    ids = torch.tensor([sample["input_ids"] + [0] * (longest - len(sample["input_ids"])) for sample in samples])
    mask = torch.tensor([[1] * len(s["input_ids"]) + [0] * (longest - len(s["input_ids"])) for s in samples])
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def train(sizes: list[int], buckets: int) -> dict[str, Any]:
    """Trains a GPT-2 of 2 layers: useful tokens per second of the last epoch, and compiles."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=128, n_head=4, vocab_size=256, n_positions=_TRAINED_LONGEST))
    numbers, epochs = random.Random(0), _Epochs()
    data = [{"input_ids": [numbers.randrange(1, 256) for _ in range(size)]} for size in sizes]
    args = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=_BATCH,
        num_train_epochs=3,
        logging_strategy="epoch",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = hf_trainer.Trainer(
        model,
        args,
        train_dataset=data,
        data_collator=_collate,
        shapes=ShapePolicy(buckets=buckets),
        callbacks=[epochs],
        replay_verify_every=None,
    )
    trainer.train()
    return {
        "tokens": sum(sizes) / (epochs.end - epochs.times[-1]),
        "compiles": trainer._xla.steps.train.graphs,
        "announced": trainer._xla.shapes.number,
    }


def main(arguments: list[str] | None = None) -> int:
    """The program."""
    parser = report.parser(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one training")
    options = parser.parse_args(arguments)
    report.freeze_imports()
    rows = [counted(name, sizes, number) for name, sizes in lengths().items() for number in _BUCKETS]
    names = {"data": "data", "buckets": "buckets", "padding": "padding", "padded to the best": "padded"}
    names |= {"useful to one length": "gain", "shapes": "shapes", "grouped": "grouped"}
    print(report.table(list(names), [[row[key] for key in names.values()] for row in rows]))
    sizes = [min(size, _TRAINED_LONGEST) for size in lengths()["sentences"][:_TRAINED]]
    runs: dict[int, list[Any]] = {1: [], 8: []}
    for _ in range(options.rounds):
        for number, found in runs.items():
            outcome = run_in_child(partial(train, sizes, number), timeout=options.timeout)
            found.append(outcome.value if not outcome.short_error else {"error": outcome.short_error})
            print(number, found[-1], file=sys.stderr, flush=True)
    speeds = {n: statistics.median(run.get("tokens", 0.0) for run in found) for n, found in runs.items()}
    print(
        report.table(
            ["buckets", "useful tokens/s", "compiles"],
            [[number, speed, max(run.get("compiles", 0) for run in runs[number])] for number, speed in speeds.items()],
        )
    )
    made = report.Report("shapes", {"rounds": options.rounds}, {"rows": rows, "runs": runs})
    for row in rows:
        name = f"{row['data']}, {row['buckets']} buckets"
        made.target(f"{name}: padded to the best", row["padded"], "at most", 1.01)
        made.target(f"{name}: shapes", row["shapes"], "at most", row["buckets"])
        made.target(f"{name}: shapes when grouped, to ours", row["grouped"] / row["shapes"], "at least", 10)
        if row["buckets"] == max(_BUCKETS):
            made.target(f"{name}: useful elements to one length", row["gain"], "at least", 1.5)
    made.target("trained: useful tokens/s to one length", speeds[8] / speeds[1] if speeds[1] else None, "at least", 1.5)
    for number, found in runs.items():
        off = sum(run.get("compiles") != run.get("announced", -1) for run in found)
        made.target(f"trained, {number} buckets: runs with other compiles than announced", off, "exactly", 0)
    return made.finish(options)


if __name__ == "__main__":
    sys.exit(main())
