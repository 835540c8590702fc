"""Computes which device holds which slice of a tensor, and arranges meshes and tensors in grids for drawing."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from xla_adapters.sharding.mesh import Mesh, Spec, axes_of

# If a grid would have more rows than this, its longest axis becomes the columns.
_TALLEST = 32
# A mesh of a single axis is drawn in several rows if it has more devices than this.
_LONGEST = 16
_FOLDED = 8


@dataclass(frozen=True, kw_only=True)
class Slice:
    """A slice of a tensor, and the devices that hold it.

    Attributes:
        index: its position along each dimension, in slices.
        bounds: start and end along each dimension, in elements.
        whole: the shape of the tensor.
        devices: ids of the devices, each of which holds a copy.
    """

    index: tuple[int, ...]
    bounds: tuple[tuple[int, int], ...]
    whole: tuple[int, ...]
    devices: tuple[int, ...]

    def __str__(self) -> str:
        parts = (
            ":" if (start, end) == (0, size) else f"{start}:{end}"
            for (start, end), size in zip(self.bounds, self.whole, strict=True)
        )
        return f"[{', '.join(parts)}]"


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A labelled grid for drawing.

    Attributes:
        cells: rows of device ids or slice numbers.
        rows, columns: the labels.
    """

    cells: tuple[tuple[int, ...], ...]
    rows: tuple[str, ...]
    columns: tuple[str, ...]

    def panels(self, widest: int) -> tuple[Grid, ...]:
        """Splits the grid into grids of at most `widest` columns, which are drawn below each other."""
        starts = range(0, len(self.columns), max(1, widest))
        return tuple(
            Grid(
                cells=tuple(row[start : start + widest] for row in self.cells),
                rows=self.rows,
                columns=self.columns[start : start + widest],
            )
            for start in starts
        )


def slices(mesh: Mesh, shape: Sequence[int], spec: Spec) -> tuple[Slice, ...]:
    """All different slices of a tensor, in row-major order.

    Device ids count through the mesh in row-major order. If a dimension is split over several axes, the first is the
    outermost, as in torch_xla's partition specs.

    Raises:
        ConfigError: an axis is unknown.
    """
    parts = [mesh.parts(dim) for dim in spec]
    holders: dict[tuple[int, ...], list[int]] = {
        index: [] for index in itertools.product(*(range(count) for count in parts))
    }
    for device in range(mesh.size):
        place = [int(number) for number in np.unravel_index(device, mesh.shape)]
        index = []
        for dim in spec:
            number = 0
            for axis in axes_of(dim):
                number = number * mesh.axis_size(axis) + place[mesh.axis_names.index(axis)]
            index.append(number)
        holders[tuple(index)].append(device)
    # XLA splits an uneven dimension into shards of equal size; the last ones are shorter.
    local = mesh.local_shape(tuple(shape), spec)
    return tuple(
        Slice(
            index=index,
            bounds=tuple(
                (min(number * step, size), min((number + 1) * step, size))
                for number, step, size in zip(index, local, shape, strict=True)
            ),
            whole=tuple(shape),
            devices=tuple(devices),
        )
        for index, devices in holders.items()
    )


def slice_numbers(parts: Sequence[Slice]) -> dict[int, int]:
    """By device id, the number of the slice that the device holds."""
    return {device: number for number, part in enumerate(parts) for device in part.devices}


def mesh_grid(mesh: Mesh) -> Grid:
    """A mesh as a grid: the last axis is the columns, the others are the rows; axes of length 1 are left out."""
    long_axes = [axis for axis, size in enumerate(mesh.shape) if size > 1] or [len(mesh.shape) - 1]
    across = long_axes[-1]
    if mesh.size // mesh.shape[across] > _TALLEST:
        across = max(long_axes, key=lambda axis: mesh.shape[axis])
    if len(long_axes) == 1 and mesh.size > _LONGEST:
        rows = [tuple(range(start, min(start + _FOLDED, mesh.size))) for start in range(0, mesh.size, _FOLDED)]
        name = mesh.axis_names[across]
        return Grid(
            cells=tuple(rows),
            rows=tuple(f"{name}={row[0]}-{row[-1]}" if len(row) > 1 else f"{name}={row[0]}" for row in rows),
            columns=("",) * _FOLDED,
        )
    down = [axis for axis in long_axes if axis != across]
    others = [axis for axis in range(len(mesh.shape)) if axis not in long_axes]
    ids = np.arange(mesh.size).reshape(mesh.shape).transpose([*others, *down, across]).reshape(-1, mesh.shape[across])
    places = itertools.product(*(range(mesh.shape[axis]) for axis in down))
    return Grid(
        cells=_rows(ids),
        rows=tuple(
            " ".join(f"{mesh.axis_names[axis]}={number}" for axis, number in zip(down, place, strict=True))
            for place in places
        ),
        columns=tuple(f"{mesh.axis_names[across]}={number}" for number in range(mesh.shape[across])),
    )


def tensor_grid(parts: Sequence[Slice], widest: int) -> Grid:
    """The slices of a tensor as a grid: the last split dimension is the columns, the others are the rows."""
    counts = [max(part.index[dim] for part in parts) + 1 for dim in range(len(parts[0].index))]
    split = [dim for dim, count in enumerate(counts) if count > 1]
    if not split:
        return Grid(cells=((0,),), rows=("",), columns=("",))
    last = split[-1]
    if len(split) == 1 and (last != len(counts) - 1 or counts[last] > widest):
        # A single split dimension goes down if it is not the last, and in several columns if it is too long.
        width = 1 if counts[last] <= widest and len(counts) > 1 else widest
        numbers = np.arange(math.ceil(len(parts) / width) * width).reshape(-1, width)
        if width == 1:
            return Grid(cells=_rows(numbers), rows=tuple(_range(part, last) for part in parts), columns=("",))
        cells = tuple(tuple(number for number in row if number < len(parts)) for row in _rows(numbers))
        rows = tuple(f"{parts[row[0]].bounds[last][0]}:{parts[row[-1]].bounds[last][1]}" for row in cells)
        return Grid(cells=cells, rows=rows, columns=("",) * width)
    columns = counts[last]
    cells = _rows(np.arange(len(parts)).reshape(-1, columns))
    return Grid(
        cells=cells,
        rows=tuple(" ".join(_range(parts[row[0]], dim) for dim in split[:-1]) for row in cells),
        columns=tuple(_range(parts[number], last) for number in cells[0]),
    )


def _range(part: Slice, dim: int) -> str:
    start, end = part.bounds[dim]
    return f"{start}:{end}"


def _rows(ids: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(number) for number in row) for row in ids)
