"""Several replayed steps as one execution: the same as one by one, to the last bit, whoever looks in between."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import xla_adapters
from tests.isolation import isolated
from tests.replay.replay_twins import Twin
from tests.support import differences
from xla_adapters import CompiledStep, ConfigError, TensorReadError, UnsupportedOptionError, XLAConfig, get_runtime
from xla_adapters.errors import DeviceOutOfMemoryError

TOGETHER = 4


def pair(run: Callable[[Twin], None], **options: Any) -> tuple[Twin, Twin]:
    """The same run with steps one by one and together; demands the same state to the last bit."""
    twins = Twin("auto", **options), Twin("auto", config={"steps_per_execution": TOGETHER}, **options)
    for twin in twins:
        run(twin)
    differing = differences(*(twin.state() for twin in twins))
    assert not differing, differing
    return twins


def executions(twin: Twin, passes: int) -> tuple[int, int]:
    """Runs passes; returns the executions and the compiles that they took."""
    with xla_adapters.count() as counters:
        twin.run(passes)
    return counters.executions, counters.compiles


def begun(twin: Twin) -> Twin:
    """Proven, and with an executable of several steps."""
    twin.run(2 + TOGETHER)
    return twin


@isolated
@pytest.mark.parametrize(
    "options",
    [{}, {"optimizer": torch.optim.SGD, "momentum": 0.9}, {"optimizer": torch.optim.NAdam}],
    ids=["AdamW", "SGD", "NAdam"],
)
def test_the_same_to_the_last_bit(options: dict[str, Any]) -> None:
    def run(twin: Twin) -> None:
        scheduler = torch.optim.lr_scheduler.StepLR(twin.optimizer, 1, 0.9)
        for _ in range(2 + 3 * TOGETHER):
            twin.run(1)
            scheduler.step()

    pair(run, **options)


@isolated
def test_one_execution_and_one_more_compile() -> None:
    twin = Twin("auto", config={"steps_per_execution": TOGETHER})
    twin.run(2)
    assert executions(twin, TOGETHER) == (1, 1)
    assert executions(twin, 3 * TOGETHER) == (3, 0)
    assert executions(twin, TOGETHER - 1) == (0, 0)
    assert twin.step.program.events[-1].reason == f"{TOGETHER} steps in one executable"
    assert twin.step.program.replays == 5 * TOGETHER - 1
    assert not twin.step.program.replay_reasons


def _saved(model: nn.Module) -> dict[str, torch.Tensor]:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    return torch.load(file)  # type: ignore[no-any-return]


LOOKS: dict[str, Callable[[Twin], Any]] = {
    "a parameter": lambda twin: twin.model[0].weight.sum().item(),
    "a buffer": lambda twin: twin.model[1].running_mean.tolist(),
    "a counter": lambda twin: int(twin.model[1].num_batches_tracked),
    "the optimizer": lambda twin: twin.optimizer.state[twin.model[0].weight]["exp_avg"].sum().item(),
    "the optimizer's state": lambda twin: str(twin.optimizer.state_dict()["state"][0]["exp_avg_sq"]),
    "a loss": lambda twin: float(twin.losses[-1]),
    "an earlier loss": lambda twin: float(twin.losses[-2]),
    "a view": lambda twin: twin.view.tolist(),  # type: ignore[attr-defined]
    "data": lambda twin: twin.model[4].weight.data.tolist(),
    "a copy": lambda twin: copy.deepcopy(twin.model)[0].weight.tolist(),
    "a copy of a parameter": lambda twin: copy.deepcopy(twin.model[0].weight).tolist(),
    "a pickle": lambda twin: pickle.loads(pickle.dumps(twin.model[0].weight)).tolist(),
    "saved": lambda twin: {name: value.tolist() for name, value in _saved(twin.model).items()},
    "forward": lambda twin: copy.deepcopy(twin.model).eval()(torch.ones(2, 4).to("xla")).tolist(),
    "to the host": lambda twin: get_runtime().transfers.to_host([twin.model[0].weight])[0].tolist(),
}


def _looked(twin: Twin, looks: Sequence[str]) -> list[tuple[Any, ...]]:
    begun(twin)
    twin.view = twin.model[0].weight.view(-1)[:3]  # type: ignore[attr-defined]
    seen = []
    for passes in (2, TOGETHER, 3):
        twin.run(passes)
        seen.append(tuple(LOOKS[look](twin) for look in looks))
    return seen


@isolated
def test_whoever_looks_sees_the_steps_before() -> None:
    one = Twin("auto")
    expected = dict(zip(LOOKS, zip(*_looked(one, list(LOOKS)), strict=True), strict=True))
    # In one process, which compiles once for all of them.
    for look, values in expected.items():
        assert len(set(map(repr, values))) == 3, look
        together = Twin("auto", config={"steps_per_execution": TOGETHER})
        assert [value for (value,) in _looked(together, [look])] == list(values), look
        assert not differences(one.state(), together.state()), look
        early = [reason for reason in together.step.reasons if "before their time" in reason]
        assert early, look
        assert all(f"{__file__}:" in reason for reason in early if " at " in reason), (look, early)


def _edit(twin: Twin) -> None:
    with torch.no_grad():
        twin.model[0].weight.mul_(0.5)


def _load(twin: Twin) -> None:
    twin.model.load_state_dict({name: value * 0.5 for name, value in twin.model.state_dict().items()})


def _freeze(twin: Twin) -> None:
    twin.model[0].requires_grad_(False)


def _new_buffer(twin: Twin) -> None:
    twin.model[1].running_mean = torch.full((8,), 0.5).to("xla")


def _new_counter(twin: Twin) -> None:
    twin.model[1].num_batches_tracked = torch.tensor(100).to("xla")


def _rates(twin: Twin) -> None:
    twin.optimizer.param_groups[0].update(lr=0.01, betas=(0.8, 0.9))


def _dropout(twin: Twin) -> None:
    twin.model[2].p = 0.6


def _another_size(twin: Twin) -> None:
    twin.run(1, size=9)


def _new_state(twin: Twin) -> None:
    twin.optimizer.load_state_dict(copy.deepcopy(twin.optimizer.state_dict()))


@isolated
def test_whatever_changes_changes_the_steps_behind() -> None:
    for change in (_edit, _load, _freeze, _new_buffer, _new_counter, _rates, _dropout, _another_size, _new_state):

        def run(twin: Twin, change: Callable[[Twin], None] = change) -> None:
            begun(twin)
            twin.run(2)
            change(twin)
            twin.run(2 + TOGETHER)

        pair(run)


@isolated
def test_a_batch_that_is_changed_behind_its_step() -> None:
    with xla_adapters.eager():
        _change_batches()


def _change_batches() -> None:
    results = []
    for several in (1, TOGETHER):
        torch.manual_seed(0)
        model = nn.Linear(3, 1).to("xla")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        batch = torch.ones(2, 3).to("xla")

        def step(inputs: torch.Tensor, model: nn.Linear = model, optimizer: Any = optimizer) -> torch.Tensor:
            loss = model(inputs).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        compiled = CompiledStep(step, config=XLAConfig(steps_per_execution=several, replay_verify_every=None))
        losses = []
        for _ in range(12):
            losses.append(compiled(batch))
            batch.mul_(0.9)
        results.append([float(loss) for loss in losses])
        assert compiled.replays == 10
    assert results[0] == results[1]


@isolated
def test_unrolled_within_rounding() -> None:
    twins = [Twin("auto", config={"steps_per_execution": several, "steps_form": "unrolled"}) for several in (1, 3)]
    for twin in twins:
        twin.run(2 + 6)
    one, other = (torch.stack([loss.cpu() for loss in twin.losses]) for twin in twins)
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@isolated
def test_steps_that_fail_leave_the_state_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    twin = begun(Twin("auto", config={"steps_per_execution": TOGETHER}))
    before = twin.model[0].weight.tolist()
    twin.run(TOGETHER - 1)

    def fails(*args: Any, **options: Any) -> Any:
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes")

    with monkeypatch.context() as patched:
        patched.setattr(get_runtime().executables, "run", fails)
        with pytest.raises(DeviceOutOfMemoryError):
            twin.run(1)
    assert twin.model[0].weight.tolist() == before
    with pytest.raises(TensorReadError, match="failed"):
        float(twin.losses[-1])
    twin.losses = []
    assert executions(twin, TOGETHER) == (1, 0)
    assert twin.model[0].weight.tolist() != before


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "4"])
def test_values_that_are_none(value: Any) -> None:
    with pytest.raises(ConfigError, match="steps_per_execution"):
        XLAConfig(steps_per_execution=value)


@pytest.mark.parametrize(
    "options", [{"step_replay": False}, {"xla_mode": "eager"}, {"accumulation": "unrolled"}], ids=str
)
def test_without_replay_it_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="only replayed steps are executed together"):
        XLAConfig(steps_per_execution=2, **options)
    with pytest.raises(ConfigError, match=r"steps_per_execution=2: the code inside `with step\(\)`"):
        xla_adapters.step(config=XLAConfig(steps_per_execution=2))


@isolated
def test_under_spmd_it_is_refused() -> None:
    xla_adapters.initialize(spmd=True)
    step = CompiledStep(lambda batch: batch.sum(), config=XLAConfig(steps_per_execution=2))
    with pytest.raises(UnsupportedOptionError, match="under SPMD"):
        step(torch.ones(2))
