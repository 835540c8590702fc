"""A step that is traced without memory is the step of a training."""

from __future__ import annotations

import pytest
import torch

from tests.hlo.modules import donated, operations, parameters, results, shardings_of_parameters
from tests.isolation import isolated
from tests.preflight.nets import Net, batch, job, plan_of
from xla_adapters import distribute_module, step
from xla_adapters.preflight.job import adamw
from xla_adapters.preflight.traced_step import TracedStep, trace_step
from xla_adapters.runtime import get_runtime
from xla_adapters.runtime.torch_xla.tracing import XLATracing
from xla_adapters.sharding import ShardingConfig, place_batch

ON_FOUR = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4"}


def traced(scheme: str, *shape: int) -> TracedStep:
    get_runtime().device.initialize(spmd=True)
    return trace_step(job(plan_of(scheme, *shape)))


def trained(scheme: str, *shape: int) -> bytes:
    """The graph of the second step of a real training."""
    modules: list[bytes] = []
    model = distribute_module(Net(), partition_fn=ShardingConfig(scheme=scheme, mesh_shape=shape))  # type: ignore[arg-type]
    optimizer, stock = adamw(list(model.parameters())), XLATracing.finish_step

    def finish_step(self: XLATracing) -> None:
        runtime = get_runtime()
        pending = {runtime.lazy.tensor_number(item): item for item in self.live_tensors() if self.is_pending(item)}
        modules.append(runtime.executables.text([pending[number] for number in sorted(pending)]))
        stock(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(XLATracing, "finish_step", finish_step)
        for _ in range(2):
            values = place_batch(model, batch())
            with step():
                loss = model(**values)["loss"]
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            assert loss.item() > 0
    return modules[-1]


@isolated(env={**ON_FOUR, "XLA_ADAPTERS_CPU_TUNING": "0"})
@pytest.mark.parametrize(("scheme", "shape"), [("dp", (4, 1)), ("fsdp", (4, 1)), ("2d", (2, 2))])
def test_it_is_the_graph_of_a_training(scheme: str, shape: tuple[int, int]) -> None:
    ours, real = traced(scheme, *shape).module, trained(scheme, *shape)
    for what in (operations, parameters, results):
        assert what(ours) == what(real)


@isolated(env=ON_FOUR)
def test_state_is_donated_and_named_and_has_no_memory() -> None:
    found = traced("fsdp", 4, 1)
    state = {f"{kind}{name}" for name, _ in Net().named_parameters() for kind in ("", "exp_avg of ", "exp_avg_sq of ")}
    assert {found.names[number] for number in donated(found.module)} == state
    assert set(found.names.values()) - state == {"batch.inputs", "batch.labels"}
    assert set(found.names) <= set(shardings_of_parameters(found.module))
    assert get_runtime().tracing.pending_count() == 0


@isolated(env=ON_FOUR)
def test_a_step_that_reads_cannot_be_traced() -> None:
    class Reading(Net):
        def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            assert inputs.sum().item() >= 0
            return super().forward(inputs, labels)

    get_runtime().device.initialize(spmd=True)
    given = job(plan_of("dp", 4, 1))
    with torch.device("meta"):
        object.__setattr__(given, "model", Reading())
    from xla_adapters.errors import TensorReadError

    with pytest.raises(TensorReadError):
        trace_step(given)
