"""What a checkpoint holds beside Lightning's own entries, so that the run goes on exactly: random numbers and data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_strategy.checkpoints.data_position import DataPosition
from xla_adapters import get_runtime
from xla_adapters.runtime.rng import resume_random_algorithm
from xla_adapters.utils.host_random import HostRandom


def exact_state(seed: int, data: DataPosition) -> dict[str, Any]:
    """The state of random numbers and training data now, as plain values and host tensors.

    Args:
        seed: of the run.
        data: of the run.
    """
    runtime = get_runtime()
    state = {
        "seed": seed,
        "device": runtime.random.seed(),
        "algorithm": runtime.random.algorithm(),
        "host": HostRandom.now().to_save(),
        "epoch": data.next_epoch,
        "generators": data.generators(),
    }
    position = data.position()
    return state if position is None else {**state, "data": position}


def restore_exact_state(state: Mapping[str, Any], data: DataPosition) -> None:
    """Goes on from what `exact_state` returned, but for the run's seed, which is the caller's.

    Args:
        state: as saved; older checkpoints lack some of the entries.
        data: of the run.
    """
    get_runtime().random.set_seed(int(state["device"]))
    if "algorithm" in state:
        resume_random_algorithm(state["algorithm"])
    if "host" in state:
        host = HostRandom.of_saved(state["host"])
        data.resume(state.get("data"), host, state.get("epoch"), state.get("generators", ()))
