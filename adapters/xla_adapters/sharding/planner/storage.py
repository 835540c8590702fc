"""The ways to store a parameter with its gradient and optimizer state, and their costs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from xla_adapters.sharding.mesh import DATA, MODEL, DimSpec, Mesh, Spec, axes_of
from xla_adapters.sharding.planner.costs import GRADIENTS, Charge, Fabric

# Adam's two averages, in the dtype of the parameter.
ADAM_COPIES = 2
# libtpu makes a loop if its product takes longer than this share of the time that sending its result takes. Read from
# compiled steps: loops at 0.47 (v5e, 2,048 tokens of a device) and 0.34 (v4), none at 0.23 (v5e, 1,024) and 0.2 (v6e).
_LOOP_SHARE = 0.3


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A class of equal parameters that get the same spec (those of equal layers).

    Attributes:
        name: of the parameter that represents the class.
        shape: of each.
        itemsize: bytes per element.
        trainable: whether they have a gradient and optimizer state.
        count: number of parameters in the class.
        fixed: the spec, if it is given.
        uses: number of operators that use each; more than one for tied weights.
        lookups: for each use as an embedding, the bytes of the rows that are looked up.
        products: whether all uses are products.
        rows: how many rows of the batch's values the gradient of a product is summed over.
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int
    trainable: bool
    count: int
    fixed: Spec | None = None
    uses: int = 1
    lookups: tuple[float, ...] = ()
    products: bool = False
    rows: int = 0

    @property
    def size(self) -> float:
        """Bytes of one parameter."""
        return float(math.prod(self.shape)) * self.itemsize


def gathered_size(parameter: Parameter, fabric: Fabric) -> float:
    """Bytes of one parameter as it is gathered to be used."""
    halved = fabric.topology.rounds_products and parameter.products and parameter.itemsize == 4
    return parameter.size / (2 if halved else 1)


def loops(parameter: Parameter, spec: Spec, fabric: Fabric) -> bool:
    """Whether the gradient is scattered by a loop of collective-permutes while it is computed.

    So are products over all devices whose computing takes long enough to hide the permutes.
    """
    if not parameter.trainable or parameter.uses <= len(parameter.lookups) or split_dim(spec, DATA) is None:
        return False
    topology = fabric.topology
    computing = 2 * parameter.rows / fabric.data / topology.flops
    sending = parameter.itemsize / topology.bandwidth_of(DATA)
    return topology.rounds_products and fabric.data == fabric.mesh.size > 1 and computing >= _LOOP_SHARE * sending


def gathering(parameter: Parameter, spec: Spec, fabric: Fabric) -> tuple[int, ...]:
    """How often a parameter that is stored so may be gathered over the data axis in a step; (0,) if it is not split."""
    if split_dim(spec, DATA) is None:
        return (0,)
    # Once keeps it for the backward.
    return (1, 2) if fabric.topology.gathers_again and parameter.trainable else (1,)


def split_dim(spec: Spec, axis: str) -> int | None:
    """The dimension that is split over an axis; None if none is."""
    return next((dim for dim, entry in enumerate(spec) if axis in axes_of(entry)), None)


def choices(parameter: Parameter, mesh: Mesh) -> list[Spec]:
    """The specs to choose from: split over the model axis, the data axis, both or none, where dimensions divide."""
    if parameter.fixed is not None:
        return [parameter.fixed]
    rank = len(parameter.shape)
    # Of many dimensions (kernels of convolutions) the three largest are enough.
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
                    # If one dimension is split over both axes, GSPMD cannot gather one axis only, and gathers both.
                    continue
                spec[data] = DATA
            if all(size % mesh.parts(entry) == 0 for size, entry in zip(parameter.shape, spec, strict=True)):
                found.append(tuple(spec))
    return found


def data_charges(parameter: Parameter, spec: Spec, fabric: Fabric, gathers: int) -> tuple[Charge, ...]:
    """Collectives on the data axis: gradients are reduced, and split parameters are gathered (ZeRO, FSDP).

    Args:
        parameter, spec, fabric: which, how it is stored, and where.
        gathers: how often it is gathered.
    """
    size = parameter.size / (1 if split_dim(spec, MODEL) is None else fabric.model)
    # The gradient of a lookup is scattered into zeros, and is reduced by itself.
    products = parameter.uses - len(parameter.lookups)
    sums = min(products, 1) if fabric.topology.merges_sums else products
    if split_dim(spec, DATA) is None:
        return fabric.all_reduce(DATA, size, GRADIENTS) * (sums + len(parameter.lookups)) if parameter.trainable else ()
    whole = size * gathered_size(parameter, fabric) / parameter.size
    gathered = fabric.all_gather(DATA, whole, "parameters") * gathers
    if not parameter.trainable:
        return gathered
    scatter = fabric.reduce_scatter(DATA, size, GRADIENTS, loop=loops(parameter, spec, fabric)) * sums
    for rows in parameter.lookups:
        # Each device needs the gradients of all looked-up rows for its shard of the table.
        own = rows / (fabric.model if split_dim(spec, MODEL) == 1 else 1)
        moves = fabric.all_gather if split_dim(spec, DATA) == 0 else fabric.all_to_all
        scatter += moves(DATA, own, GRADIENTS)
    return (*gathered, *scatter)


def use_charges(
    parameter: Parameter, stored: int | None, used: int | None, partial: bool, whole: bool, fabric: Fabric
) -> tuple[Charge, ...]:
    """Collectives on the model axis, from the stored to the used layout of a parameter, and back for its gradient.

    A parameter that is split along a dimension is used with that split, or gathered.

    Args:
        parameter: the parameter.
        stored, used: the dimension split over the model axis, or None.
        partial: whether each device has only a partial sum of the gradient.
        whole: whether the parameter is not split over the data axis.
        fabric: the cost of collectives.
    """
    size = parameter.size
    trainable = parameter.trainable
    if stored == used and stored is not None:
        return ()
    if stored is None and used is None:
        # The gradient is reduced over both axes at once; the model axis adds the volume of a data shard.
        return fabric.all_reduce(MODEL, size / fabric.data, GRADIENTS) if partial and trainable else ()
    if stored is None:
        return fabric.all_gather(MODEL, size, GRADIENTS) if trainable else ()
    assert used is None
    gathers = fabric.all_gather(MODEL, gathered_size(parameter, fabric), "parameters") * _gathers(fabric)
    if not trainable:
        return gathers
    if partial:
        return (*gathers, *fabric.reduce_scatter(MODEL, size, GRADIENTS))
    # Each device reduces the whole gradient over the data axis, not only its shard; this is the difference.
    more = size - size / fabric.model
    return (*gathers, *(fabric.all_reduce if whole else fabric.reduce_scatter)(DATA, more, GRADIENTS))


def _gathers(fabric: Fabric) -> int:
    return 2 if fabric.topology.gathers_again else 1


def memory(
    parameter: Parameter, spec: Spec, fabric: Fabric, optimizer_bytes: float | None, gathers: int
) -> dict[str, float]:
    """Bytes per device by kind, of all parameters of the class together.

    Args:
        parameter, spec, fabric: which, how it is stored, and where.
        optimizer_bytes: bytes of optimizer state per element; None for Adam's.
        gathers: how often it is gathered over the data axis; a parameter that is gathered once is kept.
    """
    elements = parameter.count * math.prod(parameter.shape) / fabric.mesh.shards(spec)
    found = {"parameters": elements * parameter.itemsize}
    if parameter.trainable:
        found["gradients"] = elements * parameter.itemsize
        found["optimizer"] = elements * (
            ADAM_COPIES * parameter.itemsize if optimizer_bytes is None else optimizer_bytes
        )
    if gathers == 1:
        found["gathered"] = elements * fabric.data * gathered_size(parameter, fabric) / math.prod(parameter.shape)
    return found
