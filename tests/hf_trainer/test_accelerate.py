"""Loops for accelerate: losses and weights of plain CPU torch, and one execution for each step, which no line marks."""

from __future__ import annotations

import copy
import json
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.tracking import GeneralTracker
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

import xla_adapters
from hf_trainer.accelerate import Accelerator
from tests.isolation import isolated, run_in_child
from tests.plain_cpu import without_xla
from xla_adapters.errors import (
    CheckpointDamagedError,
    ConfigError,
    DiscardedTensorError,
    TensorReadError,
    UnsupportedOptionError,
)

FEATURES, CLASSES, BATCH = 8, 4, 8


def samples(count: int = 48) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "x": torch.randn(FEATURES, generator=generator),
            "y": torch.randint(0, CLASSES, (), generator=generator),
        }
        for _ in range(count)
    ]


def network(dropout: float = 0.0) -> nn.Module:
    drop = [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(
        nn.Linear(FEATURES, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), *drop, nn.Linear(16, CLASSES)
    )


class Setup:
    """What a script makes before its loop."""

    def __init__(self, accelerator: Any, *, batches: int = 6, rest: int = 0) -> None:
        set_seed(7)
        self.accelerator = accelerator
        self.model = network()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler: Any = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.9**step)
        self.loader: Any = DataLoader(samples(BATCH * batches + rest), batch_size=BATCH, shuffle=True)
        self.evaluation: Any = DataLoader(samples(20), batch_size=BATCH)
        prepared = accelerator.prepare(self.model, self.optimizer, self.loader, self.evaluation, self.scheduler)
        self.model, self.optimizer, self.loader, self.evaluation, self.scheduler = prepared

    def epoch(self, decides: Callable[[torch.Tensor], Any] = lambda loss: True) -> None:
        for batch in self.loader:
            loss = self.loss(batch)
            if decides(loss):
                self.update(loss)

    def loss(self, batch: Any) -> torch.Tensor:
        return F.cross_entropy(self.model(batch["x"]), batch["y"])

    def update(self, loss: torch.Tensor) -> None:
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    @property
    def weights(self) -> list[torch.Tensor]:
        return [value.detach().cpu().clone() for value in self.model.state_dict().values()]


# ---- loops, as scripts have them --------------------------------------------------------------------


def with_metrics(accelerator: Any) -> tuple[list[float], Any]:
    """As accelerate's nlp_example: the sum of losses on the device, an evaluation after each epoch."""
    setup, seen = Setup(accelerator), []
    for _ in range(2):
        setup.model.train()
        total = torch.zeros((), device=accelerator.device)
        for batch in setup.loader:
            batch = {name: value.to(accelerator.device) for name, value in batch.items()}
            loss = setup.loss(batch)
            total += loss.detach().float()
            setup.update(loss)
        seen.append(total.item())
        setup.model.eval()
        hits = 0
        for batch in setup.evaluation:
            with torch.no_grad():
                logits = setup.model(batch["x"])
            predictions, labels = accelerator.gather_for_metrics((logits.argmax(-1), batch["y"]))
            hits += int((predictions == labels).sum())
        seen.append(float(hits))
    return seen, setup.weights


def reading_each_loss(accelerator: Any) -> tuple[list[float], Any]:
    """As torch's tutorials: gradients are zeroed at the top, and each loss is read at the bottom."""
    setup, seen = Setup(accelerator), []
    mean = torch.full((FEATURES,), 0.1, device=accelerator.device)
    for batch in setup.loader:
        setup.optimizer.zero_grad()
        loss = F.cross_entropy(setup.model(batch["x"] - mean), batch["y"])
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(setup.model.parameters(), 0.5)
        setup.optimizer.step()
        seen.append(loss.item())
        assert type(seen[-1]) is float
    return seen, setup.weights


def accumulating(accelerator: Any) -> tuple[list[float], Any]:
    """As diffusers' scripts: `.item()` before the backward, an average of weights after the update."""
    accelerator.gradient_accumulation_steps = 2
    setup, seen = Setup(accelerator, batches=6, rest=4), []
    average = [torch.zeros_like(parameter) for parameter in setup.model.parameters()]
    train_loss = 0.0
    for batch in setup.loader:
        with accelerator.accumulate(setup.model):
            loss = setup.loss(batch)
            train_loss += accelerator.gather(loss.repeat(BATCH)).mean().item() / 2
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(setup.model.parameters(), 1.0)
            setup.optimizer.step()
            setup.scheduler.step()
            setup.optimizer.zero_grad()
        if accelerator.sync_gradients:
            with torch.no_grad():
                for mean, parameter in zip(average, setup.model.parameters(), strict=True):
                    mean.mul_(0.9).add_(parameter, alpha=0.1)
            seen.append(float(train_loss))
            train_loss = 0.0
    return seen, [*setup.weights, *(value.cpu() for value in average)]


def adversarial(accelerator: Any) -> tuple[list[float], Any]:
    """Two models and two optimizers, both of which update for each batch."""
    setup, seen = Setup(accelerator), []
    maker = nn.Linear(FEATURES, FEATURES)
    other = torch.optim.SGD(maker.parameters(), lr=0.1)
    maker, other = accelerator.prepare(maker, other)
    for batch in setup.loader:
        loss = setup.loss({"x": maker(batch["x"]).detach(), "y": batch["y"]})
        setup.update(loss)
        second = -setup.loss({"x": maker(batch["x"]), "y": batch["y"]})
        accelerator.backward(second)
        other.step()
        other.zero_grad()
        setup.optimizer.zero_grad()
        seen += [loss.item(), second.item()]
    return seen, [*setup.weights, *(value.detach().cpu() for value in maker.parameters())]


def without_a_loader(accelerator: Any) -> tuple[list[float], Any]:
    """The loop makes its batches itself."""
    setup, seen = Setup(accelerator), []
    data = samples()
    for first in range(0, 48, BATCH):
        rows = data[first : first + BATCH]
        batch = {name: torch.stack([row[name] for row in rows]).to(accelerator.device) for name in ("x", "y")}
        loss = setup.loss(batch)
        setup.update(loss)
        seen.append(loss)
    return [loss.item() for loss in seen], setup.weights


def accumulating_by_hand(accelerator: Any) -> tuple[list[float], Any]:
    """The loss is read, as a number, where no update follows."""
    setup, seen = Setup(accelerator), []
    for index, batch in enumerate(setup.loader):
        loss = setup.loss(batch)
        accelerator.backward(loss / 2)
        seen.append(loss.item())
        if index % 2:
            setup.optimizer.step()
            setup.optimizer.zero_grad()
    return [float(number) for number in seen], setup.weights


def without_an_optimizer(accelerator: Any) -> tuple[list[float], Any]:
    """The loop updates the weights itself, and reads the loss as a number."""
    setup, seen = Setup(accelerator), []
    parameters = list(setup.model.parameters())
    for batch in setup.loader:
        loss = setup.loss(batch)
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= 0.1 * gradient
        seen.append(loss.item())
    return [float(number) for number in seen], setup.weights


def by_rows_that_count(accelerator: Any) -> tuple[list[float], Any]:
    """As scripts for language models: how many labels count in the next batches is read before their forwards."""
    setup, seen = Setup(accelerator), []
    batches = iter(setup.loader)
    for _ in range(3):
        ahead = [next(batches), next(batches)]
        count = accelerator.gather(sum(batch["y"].ne(0).sum() for batch in ahead)).sum().item()
        losses = []
        for batch in ahead:
            if (batch["y"] == 0).all():
                continue
            labels = torch.where(batch["y"] == 0, -100, batch["y"])
            loss = F.cross_entropy(setup.model(batch["x"]), labels, reduction="sum") / count
            accelerator.backward(loss)
            losses.append(loss.detach())
        setup.optimizer.step()
        setup.optimizer.zero_grad()
        seen += [float(count), sum(losses).item()]  # type: ignore[union-attr]
    return seen, setup.weights


def with_a_norm_of_numbers(accelerator: Any) -> tuple[list[float], Any]:
    """As scripts for speech: the norm of the gradients is added up of numbers before the update, and written."""
    setup, seen = Setup(accelerator), []
    for batch in setup.loader:
        accelerator.backward(setup.loss(batch))
        norm = sum(parameter.grad.norm().item() ** 2 for parameter in setup.model.parameters()) ** 0.5
        setup.optimizer.step()
        setup.optimizer.zero_grad()
        seen += [torch.tensor([norm, 1.0])[0].item(), norm]
    return [float(number) for number in seen], setup.weights


def with_perplexity(accelerator: Any) -> tuple[list[float], Any]:
    """As transformers' scripts: losses of an evaluation whose last batch is smaller; a schedule of the optimizer."""
    setup, losses = Setup(accelerator), []
    schedule = torch.optim.lr_scheduler.StepLR(setup.optimizer, 2)
    for batch in setup.loader:
        setup.update(setup.loss(batch))
        schedule.step()
    setup.model.eval()
    for batch in setup.evaluation:
        with torch.no_grad():
            loss = setup.loss(batch)
        losses.append(accelerator.gather_for_metrics(loss.repeat(BATCH)))
    return torch.cat(losses).tolist(), setup.weights


# Executions for each: a step for each batch, and in `with_metrics` for each of the evaluation and its comparison.
LOOPS: dict[Callable[[Any], Any], int] = {
    with_metrics: 12 + 6,
    reading_each_loss: 6,
    accumulating: 7,
    adversarial: 6,
    without_a_loader: 6,
    accumulating_by_hand: 6,
    without_an_optimizer: 6,
    by_rows_that_count: 3,
    with_a_norm_of_numbers: 6,
    with_perplexity: 6 + 3,
}


def on_cpu(loop: Callable[[Any], Any]) -> Any:
    with without_xla():
        return loop(accelerate.Accelerator(cpu=True))


def counted(loop: Callable[[Any], Any]) -> Any:
    accelerator = Accelerator()
    loop(accelerator)
    graphs = accelerator._steps.train.graphs
    calls = accelerator._steps.train.calls + accelerator._steps.evaluation.calls
    with xla_adapters.count() as counts:
        again = loop(accelerator)
    more = accelerator._steps.train.calls + accelerator._steps.evaluation.calls - calls
    return again, graphs, accelerator._steps.train.graphs - graphs, more, counts.compiles


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_losses_and_weights_of_the_cpu_in_one_execution_for_each_step(loop: Callable[[Any], Any]) -> None:
    seen, weights = run_in_child(partial(on_cpu, loop))
    (losses, trained), graphs, new_graphs, steps, compiles = run_in_child(partial(counted, loop))
    assert losses == pytest.approx(seen, rel=1e-5, abs=1e-6)
    for expected, value in zip(weights, trained, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)
    assert steps == LOOPS[loop]
    # The second time nothing compiles.
    assert (graphs, new_graphs, compiles) == ({accumulating: 3, accumulating_by_hand: 2}.get(loop, 1), 0, 0)


# ---- where steps begin and end ----------------------------------------------------------------------


@isolated
def test_a_value_that_is_read_before_the_update_is_an_error_with_the_line() -> None:
    setup = Setup(Accelerator())
    before = setup.weights
    with pytest.raises(TensorReadError, match=r"(?s)test_accelerate.py:\d+.*after optimizer.step"):
        setup.epoch(lambda loss: loss > 0)
    torch.testing.assert_close(setup.weights, before)
    # The loop may go on.
    setup.epoch()


@isolated
def test_a_number_that_is_read_before_the_update_cannot_decide_it() -> None:
    setup = Setup(Accelerator())
    with pytest.raises(TensorReadError, match=r"test_accelerate.py:\d+"):
        setup.epoch(lambda loss: loss.item() > 0)


@isolated
def test_what_the_integers_of_the_batch_determine_may_be_read_anywhere_in_the_step() -> None:
    setup = Setup(Accelerator())
    reads: list[Callable[[torch.Tensor], Any]] = [
        *(torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.numpy, lambda labels: 1 in labels),
        *(lambda labels: bool((labels == 1).any()), lambda labels: int(labels.max()), lambda labels: f"{labels.sum()}"),
        *(lambda labels: [label.item() for label in labels], lambda labels: list(range(labels.sum()))),
    ]
    seen = []
    for batch in setup.loader:
        loss = setup.loss(batch)
        seen.append((batch["y"], [str(read(batch["y"])) for read in reads]))
        setup.update(loss)
    for labels, values in seen:
        assert values == [str(read(labels.cpu())) for read in reads]
    assert setup.accelerator._steps.train.calls == 6


@isolated
def test_under_warn_the_step_is_executed_in_two_parts() -> None:
    setup = Setup(Accelerator(on_graph_break="warn"))
    with pytest.warns(xla_adapters.GraphBreakWarning, match="test_accelerate.py"):
        setup.epoch(lambda loss: loss > 0)
    assert setup.accelerator._steps.train.calls == 6


@isolated
def test_a_step_that_fails_is_discarded_and_the_loop_may_go_on() -> None:
    setup = Setup(Accelerator())
    trained = 0
    for index, batch in enumerate(setup.loader):
        before = setup.weights
        try:
            with setup.accelerator.accumulate(setup.model):
                loss = setup.loss(batch)
                setup.update(loss)
                if index == 2:
                    raise ValueError("of the script")
        except ValueError:
            torch.testing.assert_close(setup.weights, before)
            with pytest.raises(DiscardedTensorError):
                loss.item()
            continue
        trained += 1
    assert setup.accelerator._steps.count == trained == 5


@isolated
@pytest.mark.parametrize("part", ["forward", "backward"])
def test_an_error_in_the_model_discards_the_step(part: str) -> None:
    class Failing(nn.Linear):
        fails = False

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            output = super().forward(input)
            if self.fails and part == "forward":
                raise ValueError("of the model")
            if self.fails:
                output.register_hook(self.fail)
            return output

        def fail(self, gradient: torch.Tensor) -> None:
            raise ValueError("of the model")

    accelerator = Accelerator()
    model = Failing(FEATURES, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = torch.ones(BATCH, FEATURES, device=accelerator.device)
    for fails in (False, True, False):
        model.fails = fails
        before = model.weight.detach().cpu()
        try:
            accelerator.backward(model(batch).sum())
            optimizer.step()
            optimizer.zero_grad()
        except ValueError:
            assert fails
        assert torch.equal(before, model.weight.detach().cpu()) == fails


@isolated
def test_an_error_of_a_model_that_the_loop_catches_loses_no_update() -> None:
    setup = Setup(Accelerator())
    for batch in setup.loader:
        before = setup.model[0].weight.clone()
        with pytest.raises(RuntimeError):
            setup.model(batch["x"][:, :3])
        setup.update(setup.loss(batch))
        assert not torch.equal(before.cpu(), setup.model[0].weight.cpu())
    assert setup.accelerator._steps.count == 6


@isolated
def test_a_loop_that_catches_the_error_of_a_read_loses_nothing() -> None:
    setup = Setup(Accelerator())
    for batch in setup.loader:
        loss = setup.loss(batch)
        setup.accelerator.backward(loss)
        with pytest.raises(TensorReadError):
            float(loss)
    gradients = [parameter.grad for parameter in setup.model.parameters()]
    assert all(gradient is not None and gradient.abs().sum().item() > 0 for gradient in gradients)
    assert setup.accelerator._steps.train.calls == 6


@isolated
def test_without_a_loader_an_error_leaves_no_step_open() -> None:
    setup = Setup(Accelerator())
    x = torch.ones(2, FEATURES, device=setup.accelerator.device)
    with pytest.raises(TensorReadError):
        setup.model(x).sum().cpu()
    assert not xla_adapters.in_step()
    assert (x * 2).sum().item() == 4 * FEATURES
    Setup(setup.accelerator)


@isolated
def test_numbers_of_the_open_step_are_logged_when_it_has_ended(tmp_path: Path) -> None:
    logged = []

    class Tracker(GeneralTracker):  # type: ignore[misc]
        name, requires_logging_directory, tracker = "own", False, None

        def log(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
            assert all(type(value) in (int, float) for value in values.values())
            logged.append((step, values))

    setup = Setup(Accelerator(log_with=Tracker()))
    setup.accelerator.init_trackers("project")
    losses = []
    for index, batch in enumerate(setup.loader):
        loss = setup.loss(batch)
        setup.accelerator.log({"loss": loss.item()}, step=index)
        setup.update(loss)
        losses.append(loss.item())
    setup.accelerator.end_training()
    assert logged == [(index, {"loss": loss}) for index, loss in enumerate(losses)]


@isolated
def test_batches_that_are_dispatched_and_lookups_by_keyword() -> None:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    setup = Setup(accelerator)
    for batch in setup.loader:
        logits = setup.model(batch["x"])
        chosen = torch.take_along_dim(input=logits, indices=batch["y"][:, None], dim=1)
        setup.update(chosen.sum() + torch.gather(input=logits, dim=1, index=batch["y"][:, None]).sum())
    assert accelerator._steps.train.calls == 6


@isolated
def test_an_error_of_a_model_after_a_backward_loses_no_gradients() -> None:
    setup = Setup(Accelerator())
    for batch in setup.loader:
        setup.accelerator.backward(setup.loss(batch))
        with pytest.raises(RuntimeError):
            setup.model(batch["x"][:, :3])
    assert setup.accelerator._steps.train.calls == 6
    gradients = [parameter.grad for parameter in setup.model.parameters()]
    assert all(gradient is not None and gradient.abs().sum().item() > 0 for gradient in gradients)


@isolated
def test_an_evaluation_after_a_training_that_is_over() -> None:
    accelerator = Accelerator()
    first = Setup(accelerator)
    first.epoch()
    accelerator.free_memory()
    second = Setup(accelerator)
    second.model.eval()
    for batch in second.evaluation:
        # Training mode of the first model does not count any more.
        assert second.model(batch["x"]).sum().item() != 0.0
    assert first.model.training
    assert accelerator._steps.evaluation.calls == 3


@isolated
def test_a_variable_that_switches_fsdp_on_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "false")
    Accelerator()
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(UnsupportedOptionError, match="sharding='fsdp'"):
        Accelerator()


@isolated
def test_leaving_the_loop_early_keeps_what_was_done() -> None:
    setup = Setup(Accelerator())
    for batch in setup.loader:
        loss = setup.loss(batch)
        break
    assert not xla_adapters.in_step()
    assert loss.item() > 0
    before = setup.weights
    for batch in setup.loader:
        setup.update(setup.loss(batch))
        break
    assert not torch.equal(before[0], setup.weights[0])


@isolated
def test_accumulation_by_hand_and_a_trigger() -> None:
    setup = Setup(Accelerator())
    triggered = []
    for index, batch in enumerate(setup.loader):
        loss = setup.loss(batch)
        setup.accelerator.backward(loss / 3)
        if index % 3 == 2:
            setup.optimizer.step()
            setup.optimizer.zero_grad()
        if index == 3:
            setup.accelerator.set_trigger()
        triggered.append(setup.accelerator.check_trigger())
    assert triggered == [index == 3 for index in range(6)]
    steps = setup.accelerator._steps
    assert (steps.train.calls, steps.count) == (6, 2)


@isolated
def test_batches_that_nothing_is_computed_with_are_no_steps() -> None:
    setup = Setup(Accelerator())
    rows = sum(len(batch["x"]) for batch in setup.loader)
    first = next(iter(setup.loader))
    assert (rows, first["y"].shape, first["x"].device.type) == (48, (BATCH,), setup.accelerator.device.type)
    steps = setup.accelerator._steps
    assert (steps.train.calls, steps.evaluation.calls, steps.count) == (0, 0, 0)
    assert not xla_adapters.in_step()


@isolated
def test_an_evaluation_in_the_middle_of_an_epoch() -> None:
    setup, hits = Setup(Accelerator()), []
    for index, batch in enumerate(setup.loader):
        setup.update(setup.loss(batch))
        if index == 2:
            setup.model.eval()
            with torch.no_grad():
                hits = [(setup.model(rows["x"]).argmax(-1) == rows["y"]).sum().item() for rows in setup.evaluation]
            setup.model.train()
    steps = setup.accelerator._steps
    assert (steps.train.calls, steps.train.graphs, steps.evaluation.calls, len(hits)) == (6, 1, 3, 3)


@isolated
def test_metrics_without_gradients_in_training_mode_may_be_read() -> None:
    setup = Setup(Accelerator())
    for batch in setup.loader:
        with torch.no_grad():
            assert setup.model(batch["x"]).sum().item() != 0.0


@isolated
def test_a_read_before_the_backward_in_evaluation_mode_is_told() -> None:
    setup = Setup(Accelerator())
    setup.model.eval()
    with pytest.warns(UserWarning, match=r"model.train\(\)"):
        setup.epoch(lambda loss: float(loss) > 0)
    assert setup.accelerator._steps.count == 6


@isolated
def test_a_copy_of_a_model_computes_with_its_own_weights_and_a_model_can_be_pickled() -> None:
    setup = Setup(Accelerator())
    trained = copy.deepcopy(setup.model)
    for batch in setup.loader:
        setup.update(setup.loss(batch))
    x = torch.ones(2, FEATURES, device=setup.accelerator.device)
    setup.model.eval()
    trained.eval()
    with torch.no_grad():
        assert not torch.equal(setup.model(x).cpu(), trained(x).cpu())
    restored = pickle.loads(pickle.dumps(setup.model.cpu()))
    torch.testing.assert_close(restored(x.cpu()), setup.model(x.cpu()))


@isolated
def test_a_stream_and_two_loaders_at_once() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(samples(20))

    accelerator = Accelerator()
    setup = Setup(accelerator)
    stream = accelerator.prepare(DataLoader(Stream(), batch_size=BATCH, drop_last=True))
    for batch, other in zip(setup.loader, stream, strict=False):
        setup.update(setup.loss(batch) + setup.loss(other))
    assert (accelerator._steps.train.calls, accelerator._steps.train.graphs) == (2, 1)


# ---- states ------------------------------------------------------------------------------------------


def trained(folder: Path, *, precision: str | None = None, resume: bool = False, dropout: float = 0.5) -> list[float]:
    accelerator = Accelerator(mixed_precision=precision)
    # A loop that resumes has the seed of the first one, whatever it sets.
    set_seed(4 if resume else 3)
    model = network(dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    loader = DataLoader(samples(), batch_size=BATCH)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses = []
    if resume:
        accelerator.load_state(folder)
        loader = accelerator.skip_first_batches(loader, 3)
    for batch in loader:
        loss = F.cross_entropy(model(batch["x"]).float(), batch["y"])
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if len(losses) == 3 and not resume:
            accelerator.save_state(str(folder))
    return losses


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_a_resumed_loop_computes_the_same_with_dropout(tmp_path: Path, precision: str | None) -> None:
    folder = tmp_path / "state"
    losses = run_in_child(partial(trained, folder, precision=precision))
    assert run_in_child(partial(trained, folder, precision=precision, resume=True)) == losses[3:]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["state"]


def test_a_damaged_state_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    run_in_child(partial(trained, folder))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")

    def load() -> None:
        with pytest.raises(CheckpointDamagedError, match=r"model\.safetensors"):
            Accelerator().load_state(folder)

    run_in_child(load)


@isolated
def test_states_are_numbered_and_the_oldest_go(tmp_path: Path) -> None:
    config = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    setup = Setup(Accelerator(project_config=config))
    for batch in setup.loader:
        setup.update(setup.loss(batch))
        setup.accelerator.save_state()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_4", "checkpoint_5"]
    state = json.loads((tmp_path / "checkpoints/checkpoint_5/xla_adapters.json").read_text())
    assert state["steps"] == 6
    weights = setup.weights
    for batch in setup.loader:
        setup.update(setup.loss(batch))
    setup.accelerator.load_state()
    torch.testing.assert_close(setup.weights, weights, rtol=0, atol=0)


@isolated
def test_a_save_that_fails_leaves_no_state(tmp_path: Path) -> None:
    setup = Setup(Accelerator())

    def fail(*args: Any) -> None:
        raise ValueError("of the script")

    setup.accelerator.register_save_state_pre_hook(fail)
    with pytest.raises(ValueError, match="of the script"):
        setup.accelerator.save_state(str(tmp_path / "state"))
    assert list(tmp_path.iterdir()) == []


# ---- options -----------------------------------------------------------------------------------------


@isolated
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mixed_precision": "fp16"}, "bf16"),
        ({"cpu": True}, "cpu=True"),
        ({"dynamo_backend": "inductor"}, "compiled by XLA already"),
        ({"step_replay": True}, "leave the option out"),
        ({"accumulation": "unrolled"}, "leave the option out"),
        ({"free_grads": True}, "leave the option out"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedOptionError, match=said):
        Accelerator(**options)


@isolated
def test_an_unknown_option_and_a_fused_optimizer_are_refused() -> None:
    with pytest.raises(TypeError, match="steps_per_execution_"):
        Accelerator(steps_per_execution_=2)
    model = nn.Linear(2, 2)
    with pytest.raises(UnsupportedOptionError, match="fused"):
        Accelerator().prepare(model, torch.optim.AdamW(model.parameters(), fused=True))


@isolated
def test_bfloat16_computes_in_bfloat16_and_keeps_float32_parameters() -> None:
    seen = []
    accelerator = Accelerator(mixed_precision="bf16")
    model = nn.Linear(FEATURES, 1)
    model.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loss = model(torch.ones(2, FEATURES, device=accelerator.device)).sum()
    accelerator.backward(loss)
    optimizer.step()
    assert model.weight.dtype is torch.float32
    assert torch.bfloat16 in seen or loss.dtype is torch.float32


def sharded(scheme: str | None) -> Any:
    accelerator = Accelerator(**({} if scheme is None else {"sharding": scheme}))
    losses, weights = reading_each_loss(accelerator)
    return losses, weights, accelerator._steps.train.graphs, accelerator._steps.train.calls


@pytest.mark.parametrize("scheme", ["dp", "fsdp"])
def test_sharded_over_eight_devices(scheme: str) -> None:
    seen, weights = run_in_child(partial(on_cpu, reading_each_loss))
    losses, trained, graphs, calls = run_in_child(partial(sharded, scheme), env={"CPU_NUM_DEVICES": "8"})
    assert losses == pytest.approx(seen, rel=1e-5)
    for expected, value in zip(weights, trained, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)
    assert (graphs, calls) == (1, 6)


@isolated(env={"CPU_NUM_DEVICES": "8"})
def test_several_devices_need_sharding() -> None:
    with pytest.raises(ConfigError, match="sharding='fsdp'"):
        Accelerator()


@isolated
@pytest.mark.parametrize("mode", ["eager", "eager+compile"])
def test_each_step_has_random_numbers_of_its_own(mode: Any) -> None:
    accelerator = Accelerator(xla_mode=mode)
    drop, weight = nn.Dropout(0.5), nn.Parameter(torch.ones(64))
    model = nn.Module()
    model.weight, model.forward = weight, lambda x: drop(x * model.weight)  # type: ignore[method-assign]
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    seen = set()
    for _ in range(4):
        dropped = model(torch.ones(64, device=accelerator.device))
        accelerator.backward(dropped.sum())
        optimizer.step()
        seen.add(tuple(dropped.tolist()))
    assert len(seen) == 4


@isolated
def test_everything_may_be_read_with_xla_mode_eager() -> None:
    setup = Setup(Accelerator(xla_mode="eager"))
    with warnings.catch_warnings():
        warnings.simplefilter("error", xla_adapters.GraphBreakWarning)
        setup.epoch(lambda loss: loss > 0)
    assert setup.accelerator._steps.train.calls == 0
