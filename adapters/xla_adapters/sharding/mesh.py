"""`Mesh`, a grid of devices with named axes, and `Spec`, which says over which axes each dimension is split.

`tiles_of` converts a spec on a mesh to XLA's tile assignment.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from xla_adapters.errors import ConfigError
from xla_adapters.runtime import TileAssignment

DATA, MODEL = "data", "model"

# Over which axes one dimension of a tensor is split: none, one, or several (the first is the outermost).
DimSpec = None | str | tuple[str, ...]
# One entry per dimension of a tensor.
Spec = tuple[DimSpec, ...]


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Devices in a grid with named axes; device ids count row by row.

    Args:
        shape: devices along each axis.
        axis_names: a name for each axis.

    Raises:
        ConfigError: lengths differ, a name is given twice, or an axis has no device.
    """

    shape: tuple[int, ...]
    axis_names: tuple[str, ...]

    def __post_init__(self) -> None:
        if isinstance(self.axis_names, str):
            raise ConfigError(f"axis_names={self.axis_names!r} must be a list of names, one for each axis of the mesh")
        object.__setattr__(self, "shape", tuple(self.shape))
        object.__setattr__(self, "axis_names", tuple(self.axis_names))
        if len(self.shape) != len(self.axis_names) or not self.shape:
            raise ConfigError(f"a mesh of shape {self.shape} needs as many axis names; got {self.axis_names}")
        if len(set(self.axis_names)) != len(self.axis_names):
            raise ConfigError(f"the axis names of a mesh must differ; got {self.axis_names}")
        if any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in self.shape):
            raise ConfigError(f"each axis of a mesh needs at least one device; got the shape {self.shape}")

    @classmethod
    def data_and_model(cls, data: int, model: int) -> Mesh:
        """A grid of `data` times `model` devices; batches are split over the first axis, layers over the second."""
        return cls(shape=(data, model), axis_names=(DATA, MODEL))

    @property
    def size(self) -> int:
        """Devices in all."""
        return math.prod(self.shape)

    def axis_size(self, axis: str) -> int:
        """Devices along an axis.

        Raises:
            ConfigError: the mesh has no axis of this name.
        """
        if axis not in self.axis_names:
            raise ConfigError(
                f"the mesh has no axis {axis!r}; its axes are {', '.join(map(repr, self.axis_names))} ({self})"
            )
        return self.shape[self.axis_names.index(axis)]

    def parts(self, dim: DimSpec) -> int:
        """Into how many equal parts a dimension with this entry is split."""
        return math.prod(self.axis_size(axis) for axis in axes_of(dim))

    def shards(self, spec: Spec) -> int:
        """Into how many different shards a tensor is split; further devices hold copies."""
        return math.prod(self.parts(dim) for dim in spec)

    def check(self, name: str, shape: tuple[int, ...], spec: Spec) -> None:
        """Raises if a tensor cannot be split so.

        Args:
            name: of the tensor, for the message.
            shape: of the tensor.
            spec: one entry per dimension.

        Raises:
            ConfigError: the rank differs, an axis is unknown or used twice, or a dimension does not divide.
        """
        if len(spec) != len(shape):
            raise ConfigError(
                f"{name}: the spec {render(spec)} has {len(spec)} entries, the tensor {len(shape)} dimensions"
            )
        self.check_axes(name, spec)
        for index, (size, dim) in enumerate(zip(shape, spec, strict=True)):
            if size % self.parts(dim):
                raise ConfigError(
                    f"{name}: dimension {index} of {tuple(shape)} cannot be split over {render((dim,))} into "
                    f"{self.parts(dim)} equal parts"
                )

    def check_axes(self, name: str, spec: Spec) -> None:
        """Raises if a spec names an axis this mesh lacks, or one twice.

        Raises:
            ConfigError: it does; `name` is of the tensor, for the message.
        """
        used = used_axes(spec)
        unknown = [axis for axis in used if axis not in self.axis_names]
        if unknown:
            raise ConfigError(
                f"{name}: the mesh has no axis {unknown[0]!r}; its axes are "
                f"{', '.join(map(repr, self.axis_names))} ({self})"
            )
        if len(set(used)) != len(used):
            raise ConfigError(f"{name}: the spec {render(spec)} uses an axis twice")

    def local_shape(self, shape: tuple[int, ...], spec: Spec) -> tuple[int, ...]:
        """The shape of one device's shard."""
        return tuple(-(-size // self.parts(dim)) for size, dim in zip(shape, spec, strict=True))

    def __str__(self) -> str:
        return " x ".join(f"{name}={size}" for name, size in zip(self.axis_names, self.shape, strict=True))


def axes_of(dim: DimSpec) -> tuple[str, ...]:
    """The axes that one dimension is split over."""
    if dim is None:
        return ()
    return (dim,) if isinstance(dim, str) else dim


def used_axes(spec: Spec) -> tuple[str, ...]:
    """The axes that a tensor is split over."""
    return tuple(axis for dim in spec for axis in axes_of(dim))


def without(spec: Spec, axis: str) -> Spec:
    """The spec with one axis removed: nothing is split over it."""
    left = [tuple(item for item in axes_of(dim) if item != axis) for dim in spec]
    return tuple(None if not axes else axes[0] if len(axes) == 1 else axes for axes in left)


def replicated(rank: int) -> Spec:
    """The spec of a tensor of which every device holds a copy."""
    return (None,) * rank


def render(spec: Spec) -> str:
    """A spec as text: `(data, -, model+data)`."""
    return "(" + ", ".join("+".join(axes_of(dim)) or "-" for dim in spec) + ")"


def factorizations(devices: int, axes: int = 2) -> Iterator[tuple[int, ...]]:
    """All shapes of meshes with `axes` axes and `devices` devices, those with the longest first axis first."""
    if axes == 1:
        yield (devices,)
        return
    for first in sorted((n for n in range(1, devices + 1) if devices % n == 0), reverse=True):
        for rest in factorizations(devices // first, axes - 1):
            yield (first, *rest)


def as_spec(entries: Iterable[object]) -> Spec:
    """A spec from plain values (JSON, YAML): lists become tuples.

    Raises:
        ConfigError: an entry is neither None, a name nor a list of names, or there is no list of entries.
    """
    if isinstance(entries, str) or not isinstance(entries, Iterable):
        raise ConfigError(
            f"{entries!r} is no spec; a spec is a list with one entry per dimension, each None, an axis name or a list "
            "of them"
        )
    spec: list[DimSpec] = []
    for entry in entries:
        if entry is None or isinstance(entry, str):
            spec.append(entry)
        elif isinstance(entry, (list, tuple)) and all(isinstance(axis, str) for axis in entry):
            spec.append(None if not entry else entry[0] if len(entry) == 1 else tuple(entry))
        else:
            raise ConfigError(f"{entry!r} is no entry of a spec; an entry is None, an axis name or a list of them")
    return tuple(spec)


def tiles_of(mesh: Mesh, spec: Spec) -> TileAssignment:
    """The tile assignment of a tensor with this spec: number of tiles per dimension, and the device of each tile."""
    used = [mesh.axis_names.index(axis) for dim in spec for axis in axes_of(dim)]
    order = used + [index for index in range(len(mesh.shape)) if index not in used]
    strides = [math.prod(mesh.shape[index + 1 :]) for index in range(len(mesh.shape))]
    devices = [0]
    for index in order:
        devices = [start + step * strides[index] for start in devices for step in range(mesh.shape[index])]
    return TileAssignment(counts=tuple(mesh.parts(dim) for dim in spec), devices=tuple(devices))
