"""`run_packed`: a recorded pass as a call of an executable that has the optimizers' state in rows, and gradients."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from dataclasses import replace

import torch

from xla_adapters.backend import Backend
from xla_adapters.packed_gradients import PackedGradients, form_of
from xla_adapters.packed_state import PackedState, apart, watch
from xla_adapters.packing import Owner, PackedModule
from xla_adapters.replay.pending import PendingGraph
from xla_adapters.replay.places import Kept, Place
from xla_adapters.replay.recording import Recording
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
    if not any(owner.state for owner in owners):
        return False
    name = graph.name
    gradients, former = _gradients(recording, graph, backend)
    module = backend.packed_module(name, graph.outputs, owners, list(gradients))
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
        first, last = len(module.outputs), len(module.outputs) + len(module.rows)
        leaves = [[gradients[output] for output in row] for row in module.gradients]
        # Of this pass each is a tensor of its own: who it was given to while it was traced is not known.
        behind = apart(results[last:], leaves, backend) if leaves else []
        _fill(graph, module, results, behind, backend)
        backend.write([state.row(number) for number in numbers], results[first:last])
        state.tensors_left()
    watch(recipe.optimizer for recipe, owner in zip(recording.recipes, owners, strict=True) if owner.state)
    backend.finish_replayed()
    places = [Place("packed", owner=state, name=number) for number in numbers]
    sources = [*(recording.sources[given] for given in module.inputs), *places]
    recording.sources = [sources[position] for position in call.order]
    recording.donated = [index for index, position in enumerate(call.order) if position in set(donated)]
    recording.targets = [*(recording.targets[output] for output in module.outputs), *([place] for place in places)]
    if leaves:
        recording.gradients = PackedGradients.of(leaves, former, state.lock, backend)
        recording.targets += [[Place("gradients", owner=recording.gradients, name=row)] for row in range(len(leaves))]
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


def _gradients(
    recording: Recording, graph: PendingGraph, backend: Backend
) -> tuple[dict[int, torch.Tensor], dict[Hashable, torch.Tensor]]:
    """The outputs that are gradients which the pass leaves behind, with whose they are; and values that it takes.

    Those of parameters that it updates: of the same form, and gone when it is over.
    """
    handed_out = {leaf for kept in recording.kept.values() for leaf in kept.leaves if isinstance(leaf, int)}
    given = {
        id(source.owner): index
        for index, source in enumerate(recording.sources)
        if isinstance(source, Place) and source.kind == "tensor" and index in graph.donors
    }
    found: dict[int, torch.Tensor] = {}
    former: dict[Hashable, torch.Tensor] = {}
    for output, places in enumerate(recording.targets):
        if len(places) != 1 or places[0].kind != "grad" or output in handed_out:
            continue
        leaf = places[0].owner
        form = form_of(leaf)
        if id(leaf) in given and id(leaf) in recording.fresh_grads and form_of(graph.outputs[output]) == form:
            found[output] = leaf
            former[form] = backend.inner(graph.feed[given[id(leaf)]])
    return found, former


def _tensor(source: object) -> torch.Tensor:
    assert isinstance(source, Place)
    tensor = source.owner
    assert isinstance(tensor, torch.Tensor)
    return tensor


def _fill(
    graph: PendingGraph,
    module: PackedModule,
    results: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    backend: Backend,
) -> None:
    """Gives all that is pending a value: that of the optimizers' rows any that has its form."""
    values = dict(zip(module.outputs, results, strict=False))
    values.update({output: graph.feed[given] for row in module.rows for given, output in row})
    values.update(zip((output for row in module.gradients for output in row), gradients, strict=True))
    backend.fill(graph.outputs, [values[index] for index in range(len(graph.outputs))])


def _renumbered(kept: Kept, now: dict[int, int]) -> Kept:
    leaves = (now[leaf] if isinstance(leaf, int) else leaf for leaf in kept.leaves)
    return replace(kept, leaves=tuple(leaves))
