"""Whatever is trained, and whatever is changed meanwhile: the replayed step is the retraced one, bit for bit."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.isolation import isolated
from tests.replay.replay_scenarios import CHANGES, MODELS, OPTIMIZERS, SCHEDULES, SIZES, Scenario, replays_like_retraced

_EVENTS = st.lists(
    st.tuples(st.sampled_from(sorted(CHANGES)), st.integers(1, 6), st.sampled_from(SIZES)), max_size=2
).map(tuple)
_SCENARIOS = st.builds(
    Scenario,
    model=st.sampled_from(sorted(MODELS)),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    width=st.sampled_from((4, 5)),
    dropout=st.sampled_from((0.0, 0.3)),
    schedule=st.sampled_from((None, *sorted(SCHEDULES))),
    clipping=st.sampled_from((None, "norm", "value")),
    precision=st.sampled_from(("float32", "autocast", "bfloat16")),
    accumulate=st.sampled_from((1, 1, 2)),
    observed=st.booleans(),
    events=_EVENTS,
)


def _search(examples: int) -> None:
    """What fails is printed as a call of `replays_like_retraced`, the smallest that hypothesis finds."""
    replays = passes = 0

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(_SCENARIOS)
    def replayed_is_retraced(scenario: Scenario) -> None:
        nonlocal replays, passes
        # Also for a crash or a hang of the child, which hypothesis cannot report.
        print(f"replays_like_retraced({scenario!r})", flush=True)
        found = replays_like_retraced(scenario)
        replays, passes = replays + found[0], passes + found[1]

    replayed_is_retraced()
    assert replays > passes / 3, f"{replays} of {passes} passes were replayed: little was tried"


@isolated(env={"XLA_FLAGS": "--xla_backend_optimization_level=0"})
def test_gradients_accumulated_in_bfloat16() -> None:
    """Found at random: gradients that were views made more outputs, and XLA rounded between its fusions otherwise."""
    scenario = Scenario(model="mlp", optimizer="adamw", width=5, precision="bfloat16", accumulate=2, clipping="norm")
    replays_like_retraced(scenario)


# Compiling is nearly all that it costs.
@pytest.mark.slow
@isolated(timeout=400, env={"XLA_FLAGS": "--xla_backend_optimization_level=0"})
def test_random_trainings() -> None:
    _search(6)


@pytest.mark.long
@isolated(timeout=550)
def test_many_random_trainings() -> None:
    _search(20)
