"""How a parameter, its gradient and its optimizer state are stored, and what that costs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from xla_adapters.sharding.mesh import DATA, MODEL, DimSpec, Mesh, Spec, axes_of
from xla_adapters.sharding.planner.costs import GRADIENTS, Charge, Fabric


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A parameter and those planned with it.

    Attributes:
        name: of the one that stands for all.
        shape, itemsize: of each.
        trainable: it has a gradient and optimizer state.
        count: how many there are.
        fixed: the spec somebody else decided.
        uses: how many operators use each; more than one where it is tied.
        lookups: bytes of the rows taken from it, for each use that takes rows (an embedding).
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int
    trainable: bool
    count: int
    fixed: Spec | None = None
    uses: int = 1
    lookups: tuple[float, ...] = ()

    @property
    def size(self) -> float:
        """Bytes of one of them."""
        return float(math.prod(self.shape)) * self.itemsize


def split_dim(spec: Spec, axis: str) -> int | None:
    """The dimension that is split over an axis."""
    return next((dim for dim, entry in enumerate(spec) if axis in axes_of(entry)), None)


def choices(parameter: Parameter, mesh: Mesh) -> list[Spec]:
    """All ways to store a parameter: over the model axis, over the data axis, over both or none, where it divides."""
    if parameter.fixed is not None:
        return [parameter.fixed]
    rank = len(parameter.shape)
    # Of many dimensions (windows of convolutions) the two largest are enough.
    dims = sorted(sorted(range(rank), key=lambda dim: (-parameter.shape[dim], dim))[:3])
    axes = {axis for axis in (DATA, MODEL) if axis in mesh.axis_names and mesh.axis_size(axis) > 1}
    found: list[Spec] = []
    for model in [None, *dims] if MODEL in axes else [None]:
        for data in [None, *dims] if DATA in axes else [None]:
            spec: list[DimSpec] = [None] * rank
            if model is not None:
                spec[model] = MODEL
            if data is not None:
                if data == model:
                    # One dimension over both axes: GSPMD cannot undo one without the other, and gathers everything.
                    continue
                spec[data] = DATA
            if all(size % mesh.parts(entry) == 0 for size, entry in zip(parameter.shape, spec, strict=True)):
                found.append(tuple(spec))
    return found


def data_charges(parameter: Parameter, spec: Spec, fabric: Fabric) -> tuple[Charge, ...]:
    """On the data axis: gradients are summed up; a split parameter is gathered, forward and backward (ZeRO, FSDP)."""
    size = parameter.size / (1 if split_dim(spec, MODEL) is None else fabric.model)
    if split_dim(spec, DATA) is None:
        times = min(parameter.uses, 1) if fabric.topology.merges_sums else parameter.uses
        return fabric.all_reduce(DATA, size, GRADIENTS) * times if parameter.trainable else ()
    gathers = fabric.all_gather(DATA, size, "parameters") * _gathers(fabric)
    if not parameter.trainable:
        return gathers
    products = parameter.uses - len(parameter.lookups)
    sums = min(products, 1) if fabric.topology.merges_sums else products
    scatter = fabric.reduce_scatter(DATA, size, GRADIENTS) * sums
    for rows in parameter.lookups:
        # Each device adds the gradients of all rows to its own part of the table.
        own = rows / (fabric.model if split_dim(spec, MODEL) == 1 else 1)
        moves = fabric.all_gather if split_dim(spec, DATA) == 0 else fabric.all_to_all
        scatter += moves(DATA, own, GRADIENTS)
    return (*gathers, *scatter)


def use_charges(
    parameter: Parameter, stored: int | None, used: int | None, partial: bool, whole: bool, fabric: Fabric
) -> tuple[Charge, ...]:
    """On the model axis: from how a parameter is stored to how an operator uses it, and back for its gradient.

    One that is split along a dimension is used so, or whole.

    Args:
        parameter: which.
        stored, used: the dimension split over the model axis, or None.
        partial: each device has a part of the sum which is the gradient.
        whole: it is whole on the data axis.
        fabric: prices.
    """
    size = parameter.size
    trainable = parameter.trainable
    if stored == used and stored is not None:
        return ()
    if stored is None and used is None:
        # Over both axes at once: what the model axis adds is its part of the data axis' shard.
        return fabric.all_reduce(MODEL, size / fabric.data, GRADIENTS) if partial and trainable else ()
    if stored is None:
        return fabric.all_gather(MODEL, size, GRADIENTS) if trainable else ()
    assert used is None
    gathers = fabric.all_gather(MODEL, size, "parameters") * _gathers(fabric)
    if not trainable:
        return gathers
    if partial:
        return (*gathers, *fabric.reduce_scatter(MODEL, size, GRADIENTS))
    # Each device has the whole gradient, and that is summed up over the batch: what is more than its part of it.
    more = size - size / fabric.model
    return (*gathers, *(fabric.all_reduce if whole else fabric.reduce_scatter)(DATA, more, GRADIENTS))


def _gathers(fabric: Fabric) -> int:
    return 2 if fabric.topology.gathers_again else 1


def memory(parameter: Parameter, spec: Spec, fabric: Fabric, optimizer_bytes: float) -> dict[str, float]:
    """Bytes on each device, of all parameters of this kind together."""
    elements = parameter.count * math.prod(parameter.shape) / fabric.mesh.shards(spec)
    found = {"parameters": elements * parameter.itemsize}
    if parameter.trainable:
        found["gradients"] = elements * parameter.itemsize
        found["optimizer"] = elements * optimizer_bytes
    if split_dim(spec, DATA) is not None and not fabric.topology.gathers_again:
        found["gathered"] = elements * parameter.itemsize * fabric.data
    return found
