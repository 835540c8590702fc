"""An optimizer's state that replays have in rows: who uses it finds it as it would be otherwise."""

from __future__ import annotations

import copy
import io
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_xla.core.xla_model as xm

import xla_adapters
from tests.core.replay_twins import Twin, assert_twins
from tests.core.support import are_all_packed, differences, pack_small_states
from tests.isolation import isolated
from xla_adapters import CompiledStep, XLAConfig, get_backend, packed_state
from xla_adapters.config import StepReplay


def moments(twin: Twin) -> list[torch.Tensor]:
    """What the optimizer keeps on the device."""
    return [value for state in twin.optimizer.state.values() for name, value in state.items() if name != "step"]


def are_packed(twin: Twin) -> bool:
    return are_all_packed(moments(twin))


@isolated
def test_replays_have_it_in_rows() -> None:
    pack_small_states()
    twin = Twin("auto")
    assert get_backend().replay_works
    with xla_adapters.count() as proof:
        twin.run(3)
    # To the rows, back for the second trace, and the numbers of the proof.
    assert (proof.compiles, proof.executions, proof.transfers_to_host) == (1, 3, 3)
    assert twin.step.replays == 1
    assert are_packed(twin)
    with xla_adapters.count() as replays:
        twin.run(5)
    assert (replays.compiles, replays.executions, replays.transfers_to_host) == (0, 5, 0)
    replay = twin.step.program._replay
    assert replay is not None
    (plan,) = replay._plans.values()
    assert plan.recording is not None
    kinds = [getattr(source, "kind", "") for source in plan.recording.sources]
    assert kinds.count("packed") == 2
    # The parameters, and none of their moments.
    assert kinds.count("tensor") == len(list(twin.model.parameters())) + 3


@isolated
def test_what_needs_no_value_brings_nothing_back() -> None:
    pack_small_states()
    twin = Twin("auto")
    twin.run(4)
    moment = moments(twin)[0]
    assert isinstance(moment, torch.Tensor)
    assert (moment.shape, moment.dtype, moment.device.type) == (torch.Size((8, 4)), torch.float32, "xla")
    assert moment.numel() == 32
    assert are_packed(twin)


def _sum(twin: Twin) -> Any:
    return [float(moment.sum()) for moment in moments(twin)]


def _state_dict(twin: Twin) -> Any:
    return twin.optimizer.state_dict()["state"]


def _deep_copy(twin: Twin) -> Any:
    return copy.deepcopy(twin.optimizer.state_dict())["state"]


def _saved(twin: Twin) -> Any:
    file = io.BytesIO()
    torch.save([moment.cpu() for moment in moments(twin)], file)
    return torch.load(io.BytesIO(file.getvalue()))


def _pickled(twin: Twin) -> Any:
    file = io.BytesIO()
    torch.save(list(twin.optimizer.state.values()), file)
    return torch.load(io.BytesIO(file.getvalue()), map_location="cpu")


def _saved_by_torch_xla(twin: Twin) -> Any:
    path = Path("optimizer.pt")
    xm.save(twin.optimizer.state_dict(), path)
    found = torch.load(path)["state"]
    path.unlink()
    assert all(value.device.type == "cpu" for state in found.values() for value in state.values())
    return found


def _list_of_tensors(twin: Twin) -> Any:
    return torch._foreach_norm(moments(twin))


def _in_a_thread(twin: Twin) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append([moment.cpu() for moment in moments(twin)]))
    thread.start()
    thread.join()
    return found


def _scaled(twin: Twin) -> Any:
    with torch.no_grad():
        for moment in moments(twin):
            moment.mul_(0.5)


def _scaled_by_data(twin: Twin) -> Any:
    moments(twin)[1].data.view(-1)[:2].fill_(0.25)


def _on_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().tolist()
    if isinstance(value, dict):
        return {key: _on_host(item) for key, item in value.items()}
    return [_on_host(item) for item in value] if isinstance(value, (list, tuple)) else value


@pytest.mark.parametrize(
    "use",
    [
        *(_sum, _state_dict, _deep_copy, _saved, _pickled, _saved_by_torch_xla, _list_of_tensors, _in_a_thread),
        *(_scaled, _scaled_by_data),
    ],
    ids=lambda use: use.__name__,
)
@isolated
def test_whoever_uses_it_finds_it(use: Callable[[Twin], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack_small_states()
    monkeypatch.chdir(tmp_path)
    seen: list[Any] = []

    def run(twin: Twin) -> None:
        twin.run(5)
        if twin.step.replays:
            assert are_packed(twin)
        seen.append(_on_host(use(twin)))
        assert not are_packed(twin)
        twin.run(4)
        if twin.step.replays:
            assert are_packed(twin)
        seen.append(_on_host(use(twin)))

    assert_twins(run, replays=7)
    assert seen[:2] == seen[2:]


@isolated
def test_a_step_that_takes_it_back_while_another_thread_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two instructions of the other thread's, that is."""
    pack_small_states()
    twin = Twin("auto")
    twin.run(5)
    assert are_packed(twin)
    expected = [moment.tolist() for moment in moments(twin)]
    (state,) = packed_state._states
    unpack = state.unpack
    state.pack()

    def unpack_and_pack() -> None:
        unpack()
        monkeypatch.undo()
        state.pack()

    found = []
    for moment in moments(twin):
        monkeypatch.setattr(state, "unpack", unpack_and_pack)
        found.append(moment.tolist())
        state.pack()
    assert found == expected


@isolated
def test_a_loaded_state_is_traced_and_packed_anew() -> None:
    pack_small_states()

    def run(twin: Twin) -> None:
        twin.run(4)
        kept = copy.deepcopy(twin.optimizer.state_dict())
        twin.run(2)
        twin.optimizer.load_state_dict(kept)
        twin.run(5)

    twin = assert_twins(run, replays=7, reason="state of AdamW was replaced")
    assert twin.step.program.graphs == 1


@isolated
def test_each_trace_watches_the_same_optimizer() -> None:
    pack_small_states()
    twin = Twin("auto")
    twin.run(4)
    watching = len(twin.optimizer._optimizer_state_dict_pre_hooks)
    for _ in range(3):
        twin.step.program.verify_replay()
        twin.run(4)
    assert watching == len(twin.optimizer._optimizer_state_dict_pre_hooks) == 1


@isolated
def test_a_view_that_is_held_sees_what_each_step_writes() -> None:
    """It cannot be brought up to date from a row: the step is compiled as it is."""
    pack_small_states()
    seen: list[list[float]] = []

    def run(twin: Twin) -> None:
        twin.run(4)
        view = moments(twin)[0].detach().view(-1)
        for _ in range(3):
            twin.run(1)
            seen.append(view.tolist())

    retraced, replayed = Twin(False), Twin("auto")
    run(retraced)
    run(replayed)
    assert seen[:3] == seen[3:]
    assert any("view" in reason for reason in replayed.step.reasons), replayed.step.reasons


@isolated
def test_steps_of_two_sizes_have_the_same_rows() -> None:
    pack_small_states()
    assert get_backend().replay_works

    def run(twin: Twin) -> None:
        for size in (6, 4):
            twin.run(4, size=size)
        with xla_adapters.count() as counters:
            for size in (6, 4, 6, 4):
                twin.run(1, size=size)
        if twin.step.replays:
            assert (counters.compiles, counters.executions, counters.transfers_to_host) == (0, 4, 0)

    assert_twins(run, replays=8)


@isolated
def test_steps_that_wait_for_each_other_update_it_too() -> None:
    """They have it as it is, and another step of the same optimizer in rows."""
    pack_small_states()
    assert get_backend().replay_works

    def run(replay: StepReplay) -> Twin:
        twin = Twin(replay)
        together = CompiledStep(
            twin.step._function,
            config=XLAConfig(step_replay=replay, steps_per_execution=1 if replay is False else 2),
            seed=twin._seed,
        )
        single = twin.step
        for number in range(8):
            twin.step = (single, together)[number % 2]
            twin.run(4, size=6 - 2 * (number % 2))
        if replay:
            assert min(single.replays, together.replays) >= 8, (single.reasons, together.reasons)
        return twin

    retraced, replayed = run(False), run("auto")
    assert differences(retraced.state(), replayed.state()) == []


@isolated
def test_what_cannot_be_compiled_is_compiled_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    pack_small_states()

    def refuses(*_: Any) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(get_backend(), "_compile_call", refuses)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        twin = assert_twins(lambda twin: twin.run(5), replays=3)
    assert ["could not be compiled (no)" in str(item.message) for item in caught].count(True) == 1
    assert not are_packed(twin)


@isolated
def test_a_step_that_is_given_up_is_compiled_as_it_is() -> None:
    """Each pass would have to bring the rows back. It is traced, and the state stays where it is."""
    pack_small_states()

    def run(twin: Twin) -> None:
        twin.run(1)
        traced = twin.step._function
        calls: list[int] = []

        def counting(*args: Any) -> Any:
            calls.append(1)
            return traced(*args) * len(calls)

        twin.step._function = counting
        twin.run(6)

    retraced, replayed = Twin(False), Twin(True)
    run(retraced)
    run(replayed)
    assert replayed.step.replays == 0
    assert not are_packed(replayed)
    with xla_adapters.count() as counters:
        replayed.run(2)
    assert (counters.executions, counters.transfers_to_host) == (2, 0)


@isolated
def test_an_error_in_a_traced_step_leaves_the_state_as_it_was() -> None:
    pack_small_states()

    def run(twin: Twin) -> None:
        twin.run(5)
        with pytest.raises(ZeroDivisionError):
            twin.step.program.verify_replay()
            traced = twin.step._function
            twin.step._function = lambda *args: traced(*args) / 0 + 1 // 0
            try:
                twin.run(1)
            finally:
                twin.step._function = traced
        twin.run(3)

    retraced, replayed = Twin(False), Twin("auto")
    run(retraced)
    run(replayed)
    assert retraced.state()["losses"].tolist() == replayed.state()["losses"].tolist()
