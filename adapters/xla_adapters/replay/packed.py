"""`run_packed`: a recorded pass as a call of an executable that has the optimizers' state in rows."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from xla_adapters.backend import Backend
from xla_adapters.packed_state import PackedState, watch
from xla_adapters.packing import Owner, PackedModule
from xla_adapters.replay.pending import PendingGraph
from xla_adapters.replay.places import Place
from xla_adapters.replay.recording import Kept, Recording
from xla_adapters.replay.update import UpdateRecipe

logger = logging.getLogger("xla_adapters")


def run_packed(recording: Recording, graph: PendingGraph, backend: Backend) -> bool:
    """Executes a traced pass with the optimizers' state packed, and makes its recording one of that executable.

    Args:
        recording: of the pass.
        graph: what is pending.
        backend: the seam.

    Returns:
        Whether it did; if not, nothing has changed.
    """
    owners = [_owner(recording, recipe) for recipe in recording.recipes]
    name = graph.name
    module = backend.packed_module(name, graph.outputs, owners) if any(owner.state for owner in owners) else None
    if module is None:
        return False
    rows = [[_tensor(recording.sources[given]) for given, _ in row] for row in module.rows]
    state = PackedState.of(rows, backend)
    obstacle = state.obstacle()
    if obstacle is not None:
        logger.info("an optimizer's state is not packed: %s", obstacle)
        return False
    values = graph.feed
    state.take([values[given] for row in module.rows for given, _ in row])
    numbers = range(len(module.rows))
    feed = [values[given] for given in module.inputs] + [backend.snapshot(state.row(number)) for number in numbers]
    donated = [position for position, given in enumerate(module.inputs) if given in graph.donors]
    donated += range(len(module.inputs), len(feed))
    call = backend.compile_packed(name, module, feed, donated)
    if call is None:
        return False
    taken = [*graph.donors.values(), *feed[len(module.inputs) :]]
    with state.lock:
        results = backend.run_graph(call.name, [feed[position] for position in call.order], taken=taken)
        _fill(graph, module, results, backend)
        backend.write([state.row(number) for number in numbers], results[len(module.outputs) :])
        state.tensors_left()
    watch(recipe.optimizer for recipe, owner in zip(recording.recipes, owners, strict=True) if owner.state)
    backend.finish_replayed()
    places = [Place("packed", owner=state, name=number) for number in numbers]
    sources = [*(recording.sources[given] for given in module.inputs), *places]
    recording.sources = [sources[position] for position in call.order]
    recording.donated = [index for index, position in enumerate(call.order) if position in set(donated)]
    recording.targets = [*(recording.targets[output] for output in module.outputs), *([place] for place in places)]
    now = {output: index for index, output in enumerate(module.outputs)}
    recording.kept = {key: _renumbered(kept, now) for key, kept in recording.kept.items()}
    recording.executable = call.name
    recording.packed = state
    recording.take_outputs(results)
    return True


def _owner(recording: Recording, recipe: UpdateRecipe) -> Owner:
    """An optimizer, by positions among the inputs and outputs."""
    handed_out = {leaf for kept in recording.kept.values() for leaf in kept.leaves if isinstance(leaf, int)}
    outputs = {
        places[0].key: index
        for index, places in enumerate(recording.targets)
        if len(places) == 1 and index not in handed_out
    }
    given = {
        id(source.owner): index
        for index, source in enumerate(recording.sources)
        if isinstance(source, Place) and source.kind == "tensor"
    }
    donated = set(recording.donated)
    state = {
        given[id(tensor)]: outputs.get(("tensor", id(tensor), ""))
        for tensor in recipe.state_tensors()
        if id(tensor) in given
    }
    parameters = (item for group in recipe.optimizer.param_groups for item in group["params"])
    return Owner(
        {index: output for index, output in state.items() if output is not None and index in donated},
        frozenset(given[id(item)] for item in parameters if id(item) in given),
    )


def _tensor(source: object) -> torch.Tensor:
    assert isinstance(source, Place)
    tensor = source.owner
    assert isinstance(tensor, torch.Tensor)
    return tensor


def _fill(graph: PendingGraph, module: PackedModule, results: Sequence[torch.Tensor], backend: Backend) -> None:
    """Gives all that is pending a value: that of the rows any that has its form."""
    values = dict(zip(module.outputs, results, strict=False))
    values.update({output: graph.feed[given] for row in module.rows for given, output in row})
    backend.fill(graph.outputs, [values[index] for index in range(len(graph.outputs))])


def _renumbered(kept: Kept, now: dict[int, int]) -> Kept:
    leaves = (now[leaf] if isinstance(leaf, int) else leaf for leaf in kept.leaves)
    return replace(kept, leaves=tuple(leaves))
