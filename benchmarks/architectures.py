"""Which architectures of transformers train as one graph per step; `python -m benchmarks.architectures`.

Each is built from a tiny config and trained for a few steps by `hf_trainer.Trainer` in `eager+compile` with
`on_graph_break="error"`, in its own process, and compared with a plain loop on the CPU with the same weights and
batches. Dropout is off, so that the losses can be compared. With `--bf16` both run under bfloat16 autocast.
"""

from __future__ import annotations

import copy
import functools
import sys
import tempfile
from dataclasses import asdict, dataclass

import torch
import transformers

from benchmarks import report, zoo
from benchmarks.snapshots import StepSnapshots
from benchmarks.training import LEARNING_RATE, Batches, arguments, only_item
from benchmarks.zoo import Batch
from hf_trainer import Trainer
from tests.children import run_in_child
from xla_adapters import count, get_runtime
from xla_adapters.errors import GraphBreakError

TOLERANCE = 1e-4
BF16_TOLERANCE = 2e-2
WANTED = 20


@dataclass
class Row:
    """One line of the table.

    `executions_per_step` and `eager_ops` count from `on_step_begin` to `on_step_end`, `transfers_per_step`
    (to the host) up to `on_log`, so that it holds the read of the logged loss; `compiles` counts all of
    `train()`. Where steps differ, the one furthest from 1 is shown.
    """

    name: str
    parameters: int | None = None
    compiles: int | None = None
    executions_per_step: int | None = None
    transfers_per_step: int | None = None
    eager_ops: int | None = None
    first_loss: float | None = None
    last_loss: float | None = None
    difference: float | None = None
    compile_seconds: float | None = None
    seconds: float | None = None
    reason: str | None = None

    def judge(self, tolerance: float = TOLERANCE) -> None:
        """Says what is wrong with what was counted, unless the run failed and has its reason."""
        if self.reason is not None:
            return
        wrong = []
        if self.compiles != 1:
            wrong.append(f"{self.compiles} compiles")
        if self.executions_per_step != 1:
            wrong.append(f"{self.executions_per_step} executions in a step")
        if self.difference is None or not self.difference <= tolerance:
            wrong.append(f"losses differ by {self.difference}")
        self.reason = "; ".join(wrong) or None

    @property
    def ok(self) -> bool:
        """One compile, one execution per step, the losses of plain torch."""
        return self.reason is None


def train(architecture: zoo.Architecture, steps: int, xla_mode: str = "eager+compile", bf16: bool = False) -> Row:
    """Runs in a child."""
    row = Row(architecture.name)
    model = architecture.build()
    row.parameters = sum(parameter.numel() for parameter in model.parameters())
    reference = copy.deepcopy(model)
    batches = architecture.batches(steps)
    snapshots = StepSnapshots()
    try:
        # The first access to `replay_works` executes two tiny graphs, which must not be counted.
        _ = get_runtime().replay_works
        with tempfile.TemporaryDirectory() as folder, count() as counters:
            trainer = Trainer(
                model,
                arguments(folder, bf16=bf16),
                train_dataset=Batches(batches),
                data_collator=only_item,
                callbacks=[snapshots],
                xla_mode=xla_mode,
                on_graph_break="error",
            )
            trainer.train()
    except GraphBreakError as error:
        row.reason = _graph_break(error)
        return row
    row.compiles, row.compile_seconds = counters.compiles, counters.compile_seconds
    row.executions_per_step = int(max((step["executions"] for step in snapshots.steps), key=lambda n: abs(n - 1)))
    row.transfers_per_step = int(max(step["transfers_to_host"] for step in snapshots.logged))
    row.eager_ops = int(sum(step["eager_ops"] for step in snapshots.steps))
    row.first_loss, row.last_loss = snapshots.losses[0], snapshots.losses[-1]
    # After the run on XLA: a backward on the CPU before it would start torch's threads too early for it.
    expected = plain_losses(reference, batches, [_loss_arguments(trainer, batch) for batch in batches], bf16)
    if len(expected) == len(snapshots.losses):
        row.difference = max(abs(a - b) for a, b in zip(expected, snapshots.losses, strict=True))
    row.judge(BF16_TOLERANCE if bf16 else TOLERANCE)
    return row


def _loss_arguments(trainer: transformers.Trainer, batch: Batch) -> Batch:
    """The arguments that transformers' Trainer passes to the model's loss: the number of labels to average over.

    Counted by transformers' own rule. Where that is not the number of labels predicted (it counts
    GPT-2's first label, which is never predicted), the mean is off in every trainer alike.
    """
    if not trainer.model_accepts_loss_kwargs:
        return {}
    labels = transformers.Trainer._get_num_items_in_batch(trainer, [batch], torch.device("cpu"))
    return {} if labels is None else {"num_items_in_batch": labels}


def plain_losses(
    model: torch.nn.Module, batches: list[Batch], loss_arguments: list[Batch], bf16: bool = False
) -> list[float]:
    """The losses of an ordinary loop on the CPU with the trainer's defaults: AdamW, clipping at 1."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    losses = []
    model.train()
    for batch, extra in zip(batches, loss_arguments, strict=True):
        # One context a step: until its exit autocast keeps its copies of the weights.
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            loss = model(**batch, **extra).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _graph_break(error: GraphBreakError) -> str:
    """The first line of the message, and where it happened."""
    lines = str(error).splitlines()
    where = [line.strip().removeprefix("where: ") for line in lines if line.strip().startswith("where:")]
    return f"{lines[0]}; {where[0] if where else 'no line known'}"


def measure(architecture: zoo.Architecture, steps: int, timeout: float, bf16: bool = False) -> Row:
    """Trains in a child; whatever goes wrong there stands in the row."""
    outcome = run_in_child(functools.partial(train, architecture, steps, bf16=bf16), timeout=timeout)
    row: Row = outcome.value if outcome.ok else Row(architecture.name, reason=outcome.short_error)
    row.seconds = outcome.seconds
    return row


def table_of(rows: list[Row]) -> str:
    """The rows for a person; reasons stand below, they are long."""
    headers = (
        "architecture",
        "ok",
        "parameters",
        "compiles",
        "executions/step",
        "transfers/step",
        "eager ops in steps",
        "first loss",
        "last loss",
        "difference to CPU",
        "compile s",
    )
    lines = [
        (
            row.name,
            row.ok,
            row.parameters,
            row.compiles,
            row.executions_per_step,
            row.transfers_per_step,
            row.eager_ops,
            row.first_loss,
            row.last_loss,
            row.difference,
            row.compile_seconds,
        )
        for row in rows
    ]
    text = report.table(headers, lines)
    failed = [f"  {row.name}: {row.reason}" for row in rows if not row.ok]
    return text + ("\n\nnot ok, and why:\n" + "\n".join(failed) if failed else "")


def main(command: list[str] | None = None) -> int:
    """The program."""
    parser = report.parser(str(__doc__))
    parser.add_argument("--only", default="", metavar="NAMES", help="comma-separated parts of names")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=240, help="seconds per architecture")
    parser.add_argument("--at-least", type=int, default=WANTED, help="how many must be ok")
    parser.add_argument("--bf16", action="store_true", help="under bfloat16 autocast, ours and the CPU's")
    options = parser.parse_args(command)
    chosen = zoo.named(options.only)
    for architecture in chosen:
        architecture.load_classes()
    rows = []
    for number, architecture in enumerate(chosen, start=1):
        row = measure(architecture, options.steps, options.timeout, options.bf16)
        rows.append(row)
        state = "ok" if row.ok else f"not ok: {row.reason}"
        print(f"[{number}/{len(chosen)}] {row.name} ({row.seconds:.0f} s): {state}", file=sys.stderr, flush=True)
    tolerance = BF16_TOLERANCE if options.bf16 else TOLERANCE
    made = report.Report(
        "architectures", settings={"steps": options.steps, "learning_rate": LEARNING_RATE, "bf16": options.bf16}
    )
    made.results["rows"] = [asdict(row) | {"ok": row.ok} for row in rows]
    good = [row for row in rows if row.ok]
    made.target(
        "architectures with 1 compile, 1 execution per step, CPU's loss", len(good), "at least", options.at_least
    )
    unexplained = sum(1 for row in rows if not row.ok and not row.reason)
    made.target("architectures that fail without a reason", unexplained, "exactly", 0)
    differences = [row.difference for row in good if row.difference is not None]
    made.target("largest loss difference among those", max(differences, default=None), "at most", tolerance)
    precision = "bfloat16 autocast" if options.bf16 else "float32"
    print(
        f"{len(rows)} architectures, {options.steps} steps each, {precision}, xla_mode='eager+compile', "
        "on_graph_break='error'\n"
    )
    print(table_of(rows))
    print(f"\n{len(good)} of {len(rows)} are ok. Counted: see `Row` in benchmarks/architectures.py.")
    return made.finish(options)


if __name__ == "__main__":
    sys.exit(main())
