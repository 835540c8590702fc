"""The automatic plan: the cheapest of planner and recipes, within the device's memory.

Plans are compiled in a process of their own; what the compiled steps send and keep decides.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.sizes import to_shard
from hf_trainer.patches import as_if_compiling
from tests.isolation import isolated
from tests.sharding.planner.models import evaluate
from tests.tiny_models import tiny
from tests.tools.trainings import needs_libtpu
from xla_adapters.errors import ConfigError
from xla_adapters.runtime.compile_cache import COMPILE_CACHE
from xla_adapters.sharding import (
    ActivationPlan,
    CollectiveCost,
    Measurement,
    Mesh,
    PlanCost,
    ShardingConfig,
    ShardingPlan,
    automatic,
    default_mesh,
    make_plan,
    template,
)
from xla_adapters.sharding.automatic import Candidate, alternatives, cheapest, distinct
from xla_adapters.sharding.measure import (
    Job,
    MeasuringError,
    PlanCache,
    PlanCompiler,
    PlanResult,
    digest_of_step,
    measure_plans,
    measuring_process,
    pack,
    unpack,
)
from xla_adapters.sharding.planner import Topology
from xla_adapters.tools.preflight import plan_compiler


class Wide(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(inputs))).square().mean()


def plan_for(width: int, rows: int, **options: Any) -> tuple[Any, nn.Module, dict[str, torch.Tensor]]:
    with torch.device("meta"):
        model = Wide(width)
    batch = {"inputs": torch.empty(rows, width, device="meta")}
    config = ShardingConfig(**{"topology": "v5e", **options})
    return make_plan(model, config, 8, example=lambda: batch), model, batch


@isolated
@pytest.mark.parametrize(("width", "rows"), [(64, 4096), (1024, 64), (4096, 16)])
def test_no_recipe_is_predicted_to_be_cheaper(width: int, rows: int) -> None:
    plan, model, batch = plan_for(width, rows)
    topology = Topology.preset("v5e")
    assert plan.predicted is not None
    for scheme in ("dp", "fsdp", "tp", "2d"):
        recipe = template(scheme, model, default_mesh(scheme, 8))
        predicted = evaluate(recipe, model, batch, topology=topology)
        assert plan.predicted.step_seconds <= predicted.step_seconds * (1 + 1e-6), scheme


@isolated
def test_the_mesh_that_was_asked_for_is_used() -> None:
    plan, _, _ = plan_for(256, 64, mesh_shape=(2, 4))
    assert plan.mesh == Mesh.data_and_model(2, 4)


@isolated
def test_without_a_budget_the_devices_memory_is_one() -> None:
    # 24 GB of state, of which a v5e has 16: no device can hold it whole.
    plan, model, _ = plan_for(14000, 8)
    assert 16 * sum(parameter.numel() for parameter in model.parameters()) > 16 * 2**30
    assert plan.predicted.memory_bytes <= 0.9 * 16 * 2**30
    assert all(plan.mesh.shards(entry.spec) > 1 for entry in plan.parameters if len(entry.shape) == 2)
    with pytest.raises(ConfigError, match="too little"):
        plan_for(100_000, 8)


@isolated
def test_where_a_recipe_beats_the_plans_those_that_gspmd_follows_by_itself_compete() -> None:
    rounds: list[list[Any]] = []
    model, batch = to_shard("gpt2", width=32)

    def compiled(plans: Any, *_: Any) -> list[Candidate]:
        # All recipes take a second, what is planned first two, and of what is planned then the first one half.
        rounds.append(list(plans))
        cost = [1.0 if plan.name != "planner" else 2.0 if len(rounds) == 1 else 0.5 + n for n, plan in enumerate(plans)]
        return [Candidate(plan=plan, seconds=item, memory_bytes=1.0) for plan, item in zip(plans, cost, strict=True)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(automatic, "measured", compiled)
        plan = make_plan(model, ShardingConfig(), 8, example=lambda: batch, around=as_if_compiling)
        first, second = rounds
        assert second
        assert all(item.name == "planner" for item in second)
        assert (plan.mesh, plan.parameters) == (second[0].mesh, second[0].parameters)
        assert distinct([*first, *second]) == [*first, *second]
        rounds.clear()
        # With a budget, plans are corrected for it instead; what was not measured corrects nothing.
        config = ShardingConfig(memory_budget=10**9)
        plan = make_plan(model, config, 8, example=lambda: batch, around=as_if_compiling)
        assert len(rounds) == 2
        assert all(item.name == "planner" for item in rounds[1])
        assert plan.name != "planner"


@isolated
def test_with_a_budget_plans_are_tried_until_none_promises_to_be_faster() -> None:
    """Each takes more memory than was said: what fits in the end was planned for less."""
    rounds: list[list[Any]] = []
    model, batch = to_shard("gpt2", width=128)

    def compiled(plans: Any, *_: Any) -> list[Candidate]:
        rounds.append(list(plans))
        found = []
        for plan in plans:
            said = plan.predicted
            more = said.memory_bytes + (4e6 if plan.name == "planner" else 0.0)
            done = dataclasses.replace(plan, measured=Measurement(wire_bytes=said.wire_bytes, memory_bytes=int(more)))
            # A recipe is slower than any plan.
            seconds = said.step_seconds + (plan.name != "planner")
            found.append(Candidate(plan=done, seconds=seconds, memory_bytes=more))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(automatic, "measured", compiled)
        config = ShardingConfig(memory_budget=30 * 10**6)
        plan = make_plan(model, config, 8, example=lambda: batch, around=as_if_compiling)
    tried = [item for plans in rounds for item in plans]
    assert distinct(tried) == tried
    assert 2 <= len(rounds) <= 5
    assert all(len(plans) <= 4 for plans in rounds[1:])
    assert plan.name == "planner"
    assert plan.predicted is not None
    assert plan.predicted.memory_bytes + 4e6 <= 30e6
    (fits,) = [item for item in tried if (item.mesh, item.parameters) == (plan.mesh, plan.parameters)][:1]
    assert fits not in rounds[0]


WIDTH, ROWS = 32, 16


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = self.head(self.down(torch.relu(self.up(inputs)))) * self.scale
        return {"loss": outputs.square().mean(), "outputs": outputs}


def batch() -> dict[str, torch.Tensor]:
    return {"inputs": torch.zeros(ROWS, WIDTH)}


def recipe(model: nn.Module, scheme: str, *shape: int) -> ShardingPlan:
    return template(scheme, model, Mesh.data_and_model(*shape))


@pytest.mark.slow
@isolated(timeout=300, env={"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8"})
def test_plans_are_measured_kept_and_compared(tmp_path: Path) -> None:
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    numbers = sum(parameter.numel() for parameter in model.parameters())
    plans = [recipe(model, "dp", 8, 1), recipe(model, "fsdp", 8, 1)]
    # Made for a model with another layer: it cannot be compiled, the others can.
    plans.insert(1, dataclasses.replace(plans[0], parameters=plans[0].parameters[:1]))
    plans.append(dataclasses.replace(plans[0], name="the same"))
    dp, wrong, fsdp, same = measure_plans(model, batch(), plans)
    assert same == dp
    assert "no parameter" in wrong.problem
    assert wrong.measurement is None
    assert dp.measurement is not None
    assert fsdp.measurement is not None
    # The gradients and the loss, in float32, summed over a ring of 8.
    assert dp.measurement.wire_bytes == 2 * 4 * (numbers + 1) * 7 / 8
    assert set(dp.measurement.collectives) == {"all-reduce"}
    # Weights are put together once, where they are used (and not for the backward pass again); then as before.
    assert fsdp.measurement.wire_bytes == (3 * 4 * numbers + 2 * 4) * 7 / 8
    assert "all-gather" in fsdp.measurement.collectives
    # Weights and Adam's two averages, whole and in eighths; updates take the place of what they update.
    whole, eighths = dp.measurement.memory_bytes, fsdp.measurement.memory_bytes
    assert 12 * numbers < whole < 24 * numbers
    assert whole - eighths > 12 * numbers * 7 / 8
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())

    plan = make_plan(model, ShardingConfig(), 8, example=batch, folder=tmp_path)
    assert plan.measured is not None
    assert {(item.name, item.mesh) for item in plan.alternatives} >= {
        ("dp", str(plans[0].mesh)),
        ("tp", "data=1 x model=8"),
    }
    assert [item.seconds for item in plan.alternatives] == sorted(item.seconds for item in plan.alternatives)
    assert "Considered (predicted by the cost model; measured" in plan.report()

    def unwanted(model: Any, batch: Any, plans: list[ShardingPlan], **options: Any) -> list[PlanResult]:
        assert all(plan.name == "planner" for plan in plans), "recipes are known already"
        return [PlanResult(problem="not now") for _ in plans]

    measuring_process.measure_plans = unwanted
    assert make_plan(model, ShardingConfig(), 8, example=batch, folder=tmp_path) == plan
    # Another budget is another plan, of steps that are known already.
    least = min(item.measured.memory_bytes for item in plan.alternatives if item.measured is not None)
    tight = make_plan(model, ShardingConfig(memory_budget=int(least)), 8, example=batch, folder=tmp_path)
    assert tight.measured is not None
    assert tight.measured.memory_bytes == least
    with pytest.raises(ConfigError, match=f"the smallest that any plan takes is {least}"):
        make_plan(model, ShardingConfig(memory_budget=int(least) - 1), 8, example=batch, folder=tmp_path)
    (tmp_path / "sharding_plans" / "measured.json").write_text("{")
    with pytest.raises(ConfigError, match=r"measured.json is damaged .*: remove it"):
        make_plan(model, ShardingConfig(memory_budget=int(2 * least)), 8, example=batch, folder=tmp_path)


@isolated(env={"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8"})
def test_a_run_without_a_folder_finds_its_plan_beside_its_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Lightning's with `enable_checkpointing=False`."""
    assert PlanCache.of_run(None) is None
    monkeypatch.setattr(COMPILE_CACHE, "plans", tmp_path)
    config = ShardingConfig(measure_top_k=0)
    plan = make_plan(Net(), config, 8, example=batch)
    (stored,) = (tmp_path / "sharding_plans").iterdir()
    monkeypatch.setattr(automatic, "_Search", None)
    assert make_plan(Net(), config, 8, example=batch) == plan
    # A damaged one is made again, and replaced.
    whole = stored.read_bytes()
    stored.write_bytes(whole[: len(whole) // 2])
    monkeypatch.undo()
    monkeypatch.setattr(COMPILE_CACHE, "plans", tmp_path)
    assert make_plan(Net(), config, 8, example=batch) == plan
    assert [(path, path.read_bytes()) for path in stored.parent.iterdir()] == [(stored, whole)]


@isolated(env={"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8"})
def test_a_model_that_cannot_travel_is_planned_by_prediction() -> None:
    model = Net()
    model.lock = threading.Lock()
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("xla_adapters").addHandler(handler)
    plan = make_plan(model, ShardingConfig(), 8, example=batch)
    assert plan.measured is None
    assert any("compared by prediction: the model cannot be pickled" in message for message in messages)


@pytest.mark.long
@isolated
def test_the_process_that_measures_may_end_early() -> None:
    plans = [recipe(Net(), "dp", 8, 1)]
    with pytest.raises(MeasuringError, match=r"the process that measures had no more than 0.1 s"):
        measure_plans(Net(), batch(), plans, timeout=0.1)
    with pytest.raises(MeasuringError, match="the process that measures was killed, as a machine does that is out of"):
        measure_plans(Net(), batch(), plans, around=killed)


@contextmanager
def killed() -> Iterator[None]:
    os.kill(os.getpid(), signal.SIGKILL)
    yield


def _masked(values: torch.Tensor) -> torch.Tensor:
    return values.masked_fill(values < 0, 0.1)


def _chosen(values: torch.Tensor) -> torch.Tensor:
    return torch.where(values > 0, values, 0.1)


def _written_to(values: torch.Tensor) -> torch.Tensor:
    values = values + 1
    values[values < 0] = 0
    return values


ACTIVATIONS = (
    *(torch.relu, torch.sigmoid, nn.Hardswish(), nn.Hardtanh(), nn.ELU(), nn.Softshrink(), nn.GELU(), nn.Softplus()),
    *(nn.Threshold(0.1, 0.2), partial(torch.clamp, min=-1.0, max=1.0), partial(torch.clamp_min, min=0.0)),
    *(_masked, _chosen, _written_to),
)


class Activations(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(len(ACTIVATIONS) + 1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer, activation in zip(self.layers[1:], ACTIVATIONS, strict=True):
            inputs = activation(layer(inputs))
        return self.layers[0](inputs).square().mean()


@pytest.mark.slow
@isolated(timeout=550, env={"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8"})
def test_many_activations_are_not_sent() -> None:
    model = Activations()
    numbers = sum(parameter.numel() for parameter in model.parameters())
    (fsdp,) = measure_plans(model, {"inputs": torch.zeros(4096, WIDTH)}, [recipe(model, "fsdp", 8, 1)])
    assert fsdp.measurement is not None
    assert fsdp.measurement.wire_bytes == (3 * 4 * numbers + 2 * 4) * 7 / 8


@isolated(env={"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8"})
def test_plans_are_made_again_for_what_predictions_leave_out(monkeypatch: pytest.MonkeyPatch) -> None:
    missed = 6000.0
    rounds: list[list[ShardingPlan]] = []

    def compiled(plans: list[ShardingPlan], *args: Any) -> list[Candidate]:
        rounds.append(list(plans))
        found = []
        for plan in plans:
            assert plan.predicted is not None
            memory = plan.predicted.memory_bytes + missed
            seen = Measurement(wire_bytes=plan.predicted.wire_bytes, memory_bytes=memory, collectives={})
            plan = dataclasses.replace(plan, measured=seen)
            found.append(Candidate(plan=plan, seconds=plan.predicted.step_seconds, memory_bytes=memory))
        return found

    monkeypatch.setattr(automatic, "measured", compiled)
    free = make_plan(Net(), ShardingConfig(), 8, example=batch)
    assert len(rounds) == 1
    assert free.predicted is not None
    budget = int(free.predicted.memory_bytes + missed / 2)
    plan = make_plan(Net(), ShardingConfig(memory_budget=budget), 8, example=batch)
    assert plan.measured is not None
    assert plan.measured.memory_bytes <= budget
    # The plan that was predicted to fit did not, and others were asked for with what is left.
    first, second = rounds[1:]
    assert free.parameters in [item.parameters for item in first]
    assert second
    assert all(item.predicted.memory_bytes <= budget - missed for item in second if item.predicted is not None)


def test_without_a_compiler_for_tpus_predictions_decide_and_the_plan_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ShardingConfig(topology="v5e:2x4", measure_top_k=1)
    monkeypatch.setattr("xla_adapters.tools.tpu_compiler.util.find_spec", lambda name: None)
    plan = make_plan(Net(), config, 8, example=batch)
    assert plan.measured is None
    (note,) = [note for note in plan.notes if note.startswith("measure_top_k=1: nothing was measured")]
    assert "libtpu and pypjrt is not installed" in note
    monkeypatch.setattr(measuring_process, "_registered", [])
    (note,) = make_plan(Net(), config, 8, example=batch).notes
    assert note.endswith("plans are compiled for CPU devices only")
    with pytest.raises(ConfigError, match="topology v5e:2x2: it has 4 devices, and the mesh 8"):
        plan_compiler("v5e:2x2", 8)


def test_a_plan_for_tpus_is_what_their_compiler_says_is_fastest_and_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def measure(model: Any, batch: Any, plans: list[ShardingPlan], *, around: Any) -> list[PlanResult]:
        asked.append([plan.name for plan in plans])
        # `tp` sends least and is refused; `fsdp` is the next, though it is predicted to be slow.
        sent = {"tp": 1e3, "fsdp": 1e6}
        return [
            PlanResult(
                measurement=Measurement(wire_bytes=size, memory_bytes=1e6),
                collectives=(CollectiveCost(kind="all-reduce", axis="data", count=1, wire_bytes=size),),
                fits=plan.name != "tp",
            )
            for plan in plans
            for size in (sent.get(plan.name, 1e9),)
        ]

    compiler = PlanCompiler(name="libtpu", measure=measure)
    monkeypatch.setattr(measuring_process, "_registered", [lambda topology, devices: compiler])
    plan = make_plan(Net(), ShardingConfig(topology="v5e", measure_top_k=1), 8, example=batch)
    assert plan.name == "fsdp"
    assert plan.measured is not None
    assert len(asked) == 1
    assert {"dp", "fsdp", "tp", "2d"} <= set(asked[0])
    remarks = {item.name: item.remark for item in plan.alternatives}
    assert remarks["tp"] == "more than a device has"
    assert remarks["fsdp"] == ""
    # Compiling for TPUs takes minutes: only if it is asked for.
    assert make_plan(Net(), ShardingConfig(topology="v5e"), 8, example=batch).measured is None
    assert len(asked) == 1


def test_what_is_too_large_without_activations_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2**15, 2**15, bias=False), nn.Linear(2**15, 2**15, bias=False))
    asked: list[str] = []

    def measure(model: Any, batch: Any, plans: list[ShardingPlan], *, around: Any) -> list[PlanResult]:
        asked.extend(plan.name for plan in plans)
        return [PlanResult(measurement=Measurement(wire_bytes=1e6, memory_bytes=1e6)) for _ in plans]

    compiler = PlanCompiler(name="libtpu", measure=measure)
    monkeypatch.setattr(measuring_process, "_registered", [lambda topology, devices: compiler])
    example = (torch.empty(16, 2**15, device="meta"),)
    plan = make_plan(model, ShardingConfig(topology="v5e", measure_top_k=1), 8, example=lambda: example)
    # Parameters and two averages take 26 GB, a v5e has 17.
    assert "dp" not in asked
    assert {item.name: item.remark for item in plan.alternatives}["dp"] == "more than a device has"


@needs_libtpu
@pytest.mark.slow
@isolated(timeout=550, env={"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8"})
def test_plans_are_compiled_for_tpus() -> None:
    plan = make_plan(Net(), ShardingConfig(topology="v5e:2x4", measure_top_k=1), 8, example=batch)
    assert plan.measured is not None
    assert plan.notes == ()
    found = {item.name: item.measured for item in plan.alternatives}
    assert {"dp", "fsdp", "tp", "2d"} <= set(found)
    numbers = sum(parameter.numel() for parameter in Net().parameters())
    dp = found["dp"]
    assert dp is not None
    # The gradients and the loss, in float32, summed over a ring of 8.
    assert 2 * 4 * numbers * 7 / 8 <= dp.wire_bytes < 2 * 4 * numbers * 7 / 8 + 1000


@isolated
def test_a_job_has_ties_flags_and_buffers_but_no_weights() -> None:
    model = Net()
    model.head.weight = model.up.weight
    model.down.weight.requires_grad_(False)
    found = unpack(pack(Job(model=model, batch=batch(), plans=[])))
    assert found.model.head.weight is found.model.up.weight
    assert not found.model.down.weight.requires_grad
    assert found.model.down.weight.device.type == "meta"
    assert found.model.scale.item() == 2
    assert found.batch["inputs"].shape == (ROWS, WIDTH)


@isolated
def test_a_job_has_what_models_of_transformers_note_when_they_are_made() -> None:
    from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

    packed = pack(Job(model=tiny("mixtral", output_router_logits=True, num_key_value_heads=2), batch=batch(), plans=[]))
    # As in a process in which no model was made.
    _CAN_RECORD_REGISTRY.clear()
    ids = torch.ones(1, 4, dtype=torch.long)
    computed = unpack(packed, "cpu").model(input_ids=ids, labels=ids)
    assert isinstance(computed.aux_loss, torch.Tensor)


@isolated
def test_results_are_named_by_where_everything_lies() -> None:
    model = Net()
    digests = [digest_of_step(model, batch(), recipe(model, *which)) for which in (("dp", 8, 1), ("fsdp", 8, 1))]
    assert len({*digests, digest_of_step(model, {"inputs": torch.zeros(8, WIDTH)}, recipe(model, "dp", 8, 1))}) == 3
    assert digests[0] == digest_of_step(Net(), batch(), recipe(Net(), "dp", 8, 1))
    plan = dataclasses.replace(
        recipe(model, "dp", 8, 1), activations=(ActivationPlan(module="up", spec=("data", None)),)
    )
    held = dataclasses.replace(plan.activations[0], gradient=(None, "data"))
    others = {
        digest_of_step(model, batch(), dataclasses.replace(plan, activations=(one,)))
        for one in (held, *plan.activations)
    }
    assert len({digests[0], *others}) == 3


def candidate(name: str, seconds: float, memory: float) -> Candidate:
    plan = ShardingPlan(name=name, mesh=Mesh.data_and_model(2, 1), parameters=(), predicted=PlanCost())
    return Candidate(plan=plan, seconds=seconds, memory_bytes=memory)


def measured_bytes(sent: float) -> Measurement:
    return Measurement(wire_bytes=sent, memory_bytes=1, collectives={})


def test_the_cheapest_that_fits_wins() -> None:
    found = [candidate("a", 3, 10), candidate("b", 1, 30), candidate("c", 2, 20), candidate("d", 1.00001, 25)]
    assert cheapest(found, None).plan.name == "d"
    assert cheapest(found, 20).plan.name == "c"
    with pytest.raises(ConfigError, match=r"memory_budget=9 .* is 10 bytes"):
        cheapest(found, 9)
    refused = [dataclasses.replace(item, fits=item.plan.name == "a") for item in found]
    assert cheapest(refused, None).plan.name == "a"
    with pytest.raises(ConfigError, match=r"the memory of a device is too little: the smallest .* is 20 bytes"):
        cheapest([item for item in refused if not item.fits], None)
    sent = {"a": 1.0, "b": 9.0, "c": 5.0, "d": 7.0}
    plans = [dataclasses.replace(item.plan, measured=measured_bytes(sent[item.plan.name])) for item in found]
    compiled = [dataclasses.replace(item, plan=plan) for item, plan in zip(found, plans, strict=True)]
    assert [cheapest(compiled, None, within=share).plan.name for share in (0.0, 0.01, 1.0, 2.0)] == ["d", "d", "c", "a"]
    assert cheapest(compiled, 20, within=0.01).plan.name == "c"
    # Of predictions the fastest: what they send is not known.
    assert cheapest(found, None, within=2.0).plan.name == "d"
    listed = alternatives(found, 20)
    assert [item.name for item in listed] == ["d", "b", "c", "a"]
    assert [item.remark for item in listed] == ["more than memory_budget"] * 2 + [""] * 2


def test_plans_that_put_everything_in_the_same_place_are_one() -> None:
    mesh = Mesh.data_and_model(2, 4)
    one = ShardingPlan(name="one", mesh=mesh, parameters=(), batch=("data", "model"))
    same = ShardingPlan(name="same", mesh=Mesh.data_and_model(8, 1), parameters=(), batch=("data",))
    other = dataclasses.replace(one, name="other", batch=("model", "data"))
    assert [plan.name for plan in distinct([one, same, other])] == ["one", "other"]


def test_results_survive_being_written(tmp_path: Path) -> None:
    kept = PlanCache(tmp_path)
    assert kept.results() == {}
    result = PlanResult(
        measurement=Measurement(wire_bytes=1.5, memory_bytes=2, collectives={"all-reduce": 1}), seconds=3
    )
    kept.keep_results({"digest": result})
    assert kept.results() == {"digest": result}
