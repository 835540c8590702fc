"""`load_state`: reads a checkpoint onto any mesh; each device gets only its shards."""

from __future__ import annotations

import functools
import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PosixPath
from typing import Any

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from xla_adapters.errors import CheckpointUnsafeError, ConfigError
from xla_adapters.runtime import Part, Runtime, get_runtime
from xla_adapters.sharding.state.saving import METADATA
from xla_adapters.utils.unpickling import load_values, unpickle

BUCKET_BYTES = 512 * 2**20
# What torch.distributed.checkpoint writes into `.metadata`, which is a pickle.
_OF_METADATA = (
    *(Metadata, TensorStorageMetadata, ChunkStorageMetadata, MetadataIndex, _StorageInfo, torch.Size),
    *(dcp_metadata.BytesStorageMetadata, dcp_metadata.TensorProperties, dcp_metadata.StorageMeta),
    *(dcp_metadata._MEM_FORMAT_ENCODING, torch.serialization._get_layout),
)


def read_metadata(path: Path) -> Metadata:
    """The description of a sharded checkpoint.

    Raises:
        CheckpointUnsafeError: it names something else than the types of such a description.
    """
    allowed: dict[str, Any] = {f"{kind.__module__}.{kind.__qualname__}": kind for kind in _OF_METADATA}
    # Its module has this name up to Python 3.12, and another one from then on.
    allowed |= {f"{module}.PosixPath": PosixPath for module in ("pathlib", "pathlib._local")}
    allowed |= {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
    with open(path, "rb") as file:
        found = unpickle(file, allowed, path)
    if not isinstance(found, Metadata):
        raise CheckpointUnsafeError(f"{path} holds no description of a sharded checkpoint, but {type(found).__name__}")
    return found


class Destination:
    """A tensor that is read: its buffers on the host, and what is made of them. This class makes a new host tensor.

    Args:
        shape, dtype: of the whole tensor.
    """

    def __init__(self, shape: torch.Size, dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype
        self._buffer: torch.Tensor | None = None

    @property
    def bytes(self) -> int:
        """Size of the whole tensor in bytes."""
        return self.shape.numel() * self.dtype.itemsize

    def parts(self) -> list[Part]:
        """The parts of the tensor that this process needs, each once."""
        return [Part(offsets=(0,) * len(self.shape), sizes=tuple(self.shape))]

    def buffer(self, offsets: tuple[int, ...]) -> torch.Tensor:
        """The host buffer for the part at these offsets."""
        if self._buffer is None:
            self._buffer = torch.empty(self.shape, dtype=self.dtype)
        return self._buffer

    def finish(self) -> torch.Tensor:
        """The tensor, after all parts were read; the buffers are released."""
        result, self._buffer = self.buffer(()), None
        return result


class OnHost(Destination):
    """Reads into an existing host tensor, in place."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.shape, tensor.dtype)
        self._tensor = tensor.detach()

    def buffer(self, offsets: tuple[int, ...]) -> torch.Tensor:
        """The tensor itself."""
        return self._tensor

    def finish(self) -> torch.Tensor:
        """The tensor itself."""
        return self._tensor


class OnDevice(Destination):
    """Makes a new tensor on the devices from its shards.

    Args:
        shape, dtype: of the whole tensor.
        like: a tensor of the same shape whose sharding the new one gets; None replicates it.
        runtime: the runtime.
    """

    def __init__(self, shape: torch.Size, dtype: torch.dtype, *, like: torch.Tensor | None, runtime: Runtime) -> None:
        super().__init__(shape, dtype)
        self._like, self._runtime = like, runtime
        self._places = [] if like is None else runtime.spmd.local_parts(like)
        self._distinct = list(dict.fromkeys(self._places)) or super().parts()
        self._buffers: dict[tuple[int, ...], torch.Tensor] = {}

    def parts(self) -> list[Part]:
        """The parts that this process's devices hold."""
        return self._distinct

    def buffer(self, offsets: tuple[int, ...]) -> torch.Tensor:
        """The host buffer for the part at these offsets."""
        if not self._buffers:
            self._buffers = {part.offsets: torch.empty(part.sizes, dtype=self.dtype) for part in self._distinct}
        return self._buffers[offsets]

    def finish(self) -> torch.Tensor:
        """The tensor on the devices."""
        buffers = {part.offsets: self.buffer(part.offsets) for part in self._distinct}
        self._buffers = {}
        if self._like is None or not self._places:
            return self._runtime.transfers.to_device(buffers[self._distinct[0].offsets])
        return self._runtime.spmd.upload_parts([buffers[part.offsets] for part in self._places], self._like)


class Reader:
    """Reads a sharded checkpoint.

    Args:
        folder: written by `save_state` or by torch.distributed.checkpoint.

    Raises:
        ConfigError: the folder has no checkpoint.
        CheckpointUnsafeError: its description names code.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not (self.folder / METADATA).is_file():
            raise ConfigError(f"{folder} holds no checkpoint of torch.distributed.checkpoint: there is no {METADATA}")
        self._reader = FileSystemReader(folder)
        self.metadata = read_metadata(self.folder / METADATA)
        self._reader.set_up_storage_reader(self.metadata, True)

    @functools.cached_property
    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """Shape and dtype of each tensor by name."""
        entries = self.metadata.state_dict_metadata.items()
        return {name: entry for name, entry in entries if isinstance(entry, TensorStorageMetadata)}

    def path(self, name: str) -> tuple[str | int, ...]:
        """The keys of an entry in the nested dicts of the saved state."""
        planned: Mapping[str, Any] = self.metadata.planner_data or {}
        return tuple(planned.get(name, (name,)))

    def under(self, key: str) -> dict[str, tuple[str | int, ...]]:
        """The entries under a key of the state, with their keys below it; from the names if no keys were saved."""
        found = {}
        for name in self.metadata.state_dict_metadata:
            path = self.path(name)
            if len(path) > 1 and path[0] == key:
                found[name] = path[1:]
            elif len(path) == 1 and name.startswith(f"{key}."):
                found[name] = (name.removeprefix(f"{key}."),)
        return found

    def check(self, name: str, shape: torch.Size) -> None:
        """Raises if a tensor cannot be read.

        Raises:
            ConfigError: the checkpoint does not have it, or in another shape.
        """
        entry = self.metadata.state_dict_metadata.get(name)
        if not isinstance(entry, TensorStorageMetadata):
            raise ConfigError(f"{self.folder} has no tensor {name!r}: it is a checkpoint of another model or optimizer")
        if entry.size != shape:
            raise ConfigError(
                f"{self.folder}: {name} has the shape {tuple(entry.size)} in the checkpoint and {tuple(shape)} here: "
                "it is a checkpoint of another model"
            )

    def objects(self, names: list[str]) -> dict[str, Any]:
        """Reads entries that are not tensors."""
        objects = _Objects(self.folder)
        origin = torch.Size((0,))
        items = [
            ReadItem(LoadItemType.BYTE_IO, MetadataIndex(name), origin, MetadataIndex(name), origin, origin)
            for name in names
        ]
        self._reader.read_data(LoadPlan(items), objects)
        return objects.found

    def read(
        self, destinations: Mapping[str, Destination], *, bucket_bytes: int = BUCKET_BYTES
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Reads tensors; yields (name, tensor) in the order of `destinations`.

        Args:
            destinations: what to read, by name.
            bucket_bytes: how much may be on the host at a time.

        Raises:
            ConfigError: the checkpoint lacks a tensor, or has it in another shape.
        """
        for name, destination in destinations.items():
            self.check(name, destination.shape)
        for bucket in _buckets(destinations, bucket_bytes):
            for name, destination in bucket.items():
                self._fill(name, destination)
            for name, destination in bucket.items():
                yield name, destination.finish()

    def on_host(self, names: list[str]) -> Iterator[tuple[str, Any]]:
        """Reads entries of either kind; tensors are on the host."""
        yield from self.objects([name for name in names if name not in self.tensors]).items()
        entries = {name: self.tensors[name] for name in names if name in self.tensors}
        yield from self.read({name: Destination(entry.size, entry.properties.dtype) for name, entry in entries.items()})

    def _fill(self, name: str, destination: Destination) -> None:
        """Reads the needed chunks from disk, each once, and copies them to the buffers."""
        wanted = [
            ChunkStorageMetadata(offsets=torch.Size(part.offsets), sizes=torch.Size(part.sizes))
            for part in destination.parts()
        ]
        of_chunk: dict[MetadataIndex, list[ReadItem]] = {}
        for item in create_read_items_for_chunk_list(name, self.tensors[name], wanted):
            of_chunk.setdefault(item.storage_index, []).append(item)
        for index, items in of_chunk.items():
            with self._open(index, items[0]) as stream:
                chunk = load_values(stream, f"{self.folder} ({name})")
            for item in items:
                assert item.dest_index.offset is not None
                buffer = destination.buffer(tuple(item.dest_index.offset))
                values = narrow_tensor_by_index(chunk, item.storage_offsets, item.lengths)
                narrow_tensor_by_index(buffer, item.dest_offsets, item.lengths).copy_(values)
            del chunk, values

    @contextmanager
    def _open(self, index: MetadataIndex, item: ReadItem) -> Iterator[Any]:
        """Opens a stored chunk as torch's reader does."""
        place = self._reader.storage_data[index]
        with open(self.folder / place.relative_path, "rb") as file:
            part = self._reader._slice_file(file, place)
            stream = self._reader.transforms.transform_load_stream(item, place.transform_descriptors or (), part)
            yield stream if stream.seekable() else io.BytesIO(stream.read())


def load_state(state: dict[str, Any], folder: str | Path) -> None:
    """Reads a checkpoint into a state, in place.

    The checkpoint may come from another mesh or plan, or from an unsharded run: tensors keep their present sharding.

    Args:
        state: nested dicts as they were saved, or a part of them; tensors are overwritten, other entries replaced.
        folder: the checkpoint.

    Raises:
        ConfigError: the folder has no checkpoint, lacks an entry, or has a tensor in another shape.
    """
    runtime, reader = get_runtime(), Reader(folder)
    flat, paths = flatten_state_dict(state)
    tensors = {name: value for name, value in flat.items() if isinstance(value, torch.Tensor)}
    others = [name for name in flat if name not in tensors]
    missing = [name for name in flat if name not in reader.metadata.state_dict_metadata]
    if missing:
        raise ConfigError(f"{folder} lacks {', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}")
    for name, value in reader.objects(others).items():
        set_element(state, paths[name], value)
    for name, value in reader.read({name: destination_of(tensor) for name, tensor in tensors.items()}):
        if runtime.device.owns(tensors[name]):
            runtime.values.restore(tensors[name], runtime.values.snapshot(value))


def load_whole(folder: str | Path) -> dict[str, Any]:
    """The whole state of a checkpoint as nested dicts and lists, on the host.

    Args:
        folder: the checkpoint.

    Raises:
        ConfigError: the folder has no checkpoint.
        CheckpointUnsafeError: a file names code.
    """
    reader, state = Reader(folder), dict[str, Any]()
    for name, value in reader.on_host(list(reader.metadata.state_dict_metadata)):
        set_element(state, reader.path(name), value)
    return state


def destination_of(tensor: torch.Tensor) -> Destination:
    """The destination for values that will be copied into a tensor, on its device."""
    runtime = get_runtime()
    if runtime.device.owns(tensor):
        return OnDevice(tensor.shape, tensor.dtype, like=tensor, runtime=runtime)
    return OnHost(tensor)


class _Objects(DefaultLoadPlanner):
    """Collects entries that are not tensors."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self.found: dict[str, Any] = {}

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        self.found[name] = load_values(value, f"{self._folder} ({name})")


def _buckets(destinations: Mapping[str, Destination], limit: int) -> Iterator[dict[str, Destination]]:
    bucket: dict[str, Destination] = {}
    size = 0
    for name, destination in destinations.items():
        if bucket and size + destination.bytes > limit:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = destination
        size += destination.bytes
    if bucket:
        yield bucket
