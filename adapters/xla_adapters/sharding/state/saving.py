"""`save_state`: a checkpoint of torch.distributed.checkpoint, written part by part.

torch_xla's own planner for it (2.9, `SPMDSavePlanner`) writes no part at all of a tensor that some devices of one
process hold copies of, and says nothing; it is not used here.
"""

from __future__ import annotations

import queue
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from xla_adapters.backend import Backend, Part, get_backend
from xla_adapters.errors import ConfigError, RuntimeOrderError

METADATA = ".metadata"
FILE_BYTES = 512 * 2**20


def save_state(
    state: Mapping[str, Any],
    folder: str | Path,
    *,
    process_group: dist.ProcessGroup | None = None,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Writes a state without putting it together: each process writes what its devices hold, copies once.

    On the host there is one tensor at a time, beside at most one file. torch.distributed.checkpoint reads the result;
    so do `load_state` (onto any mesh) and `consolidate`.

    Args:
        state: nested dicts of tensors, on devices or the host, and plain objects.
        folder: to write to; made if it does not exist.
        process_group: of the processes that hold parts (the default group if not given); one process needs none.
        file_bytes: a process begins a new file when the last one has this size.

    Raises:
        ConfigError: the folder holds a checkpoint already, or nothing would be written.
        RuntimeOrderError: other processes hold parts, and torch.distributed is not initialised.
    """
    if (Path(folder) / METADATA).exists():
        raise ConfigError(f"{folder} holds a checkpoint already: write to a folder of its own, or delete that one")
    planner = _Planner(get_backend())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        warnings.filterwarnings("ignore", "TypedStorage is deprecated")
        save(dict(state), storage_writer=_Writer(folder, file_bytes), planner=planner, process_group=process_group)


class _OnDevice:
    """A device tensor as torch.distributed.checkpoint sees it: what this process holds of it, each part once."""

    def __init__(self, tensor: torch.Tensor, backend: Backend) -> None:
        self._tensor, self._backend = tensor.detach(), backend
        self._places = backend.local_parts(tensor)
        whole = Part(offsets=(0,) * tensor.ndim, sizes=tuple(tensor.shape))
        self.parts = list(dict.fromkeys(self._places)) or [whole]

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self._tensor.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(part.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=torch.Size(part.offsets), sizes=torch.Size(part.sizes)),
                    properties=properties,
                    size=self._tensor.size(),
                ),
            )
            for part in self.parts
        ]

    def is_complete(self) -> bool:
        """Whether this process holds all of it."""
        return sum(torch.Size(part.sizes).numel() for part in self.parts) == self._tensor.numel()

    def to_host(self) -> dict[tuple[int, ...], torch.Tensor]:
        """Copies of the parts by their offsets."""
        if not self._places:
            return {self.parts[0].offsets: self._backend.to_host([self._tensor])[0]}
        copies = zip(self._places, self._backend.parts_to_host(self._tensor), strict=True)
        return {part.offsets: copy for part, copy in copies}


class _Planner(DefaultSavePlanner):
    """Brings a tensor to the host when its first part is written, and lets go of it with its last."""

    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self._backend = backend
        self._copied, self._copies = "", dict[tuple[int, ...], torch.Tensor]()

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        super().set_up_planner(*args, **kwargs)
        wrapped: dict[int, _OnDevice] = {}
        for name, value in self.state_dict.items():
            if isinstance(value, torch.Tensor) and self._backend.is_backend_tensor(value):
                self.state_dict[name] = wrapped.setdefault(id(value), _OnDevice(value, self._backend))
        if not dist.is_initialized() and not all(value.is_complete() for value in wrapped.values()):
            raise RuntimeOrderError(
                "other processes hold parts of the state, and they have to agree on who writes what: call "
                "torch.distributed.init_process_group('gloo', init_method='xla://') first, in every process"
            )

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self.state_dict[index.fqn]
        if not isinstance(value, _OnDevice):
            return super().lookup_object(index)
        assert index.offset is not None
        if self._copied != index.fqn:
            self._copied, self._copies = index.fqn, value.to_host()
        return self._copies.pop(tuple(index.offset))


class _Writer(FileSystemWriter):
    """Writes several files: torch's (2.9) keeps a part of each tensor in memory until the file is complete."""

    def __init__(self, folder: str | Path, file_bytes: int) -> None:
        super().__init__(folder)
        self._file_bytes = file_bytes

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        files: queue.Queue[Any] = queue.Queue()
        for number, items in enumerate(_in_files(plan.items, self._file_bytes)):
            name = f"{plan.storage_data.prefix}{number}.distcp"
            files.put((self.fs.concat_path(self.path, name), name, items))
        return self._write_data(planner, files)


def _in_files(items: Sequence[WriteItem], limit: int) -> Iterator[list[WriteItem]]:
    file: list[WriteItem] = []
    size = 0
    for item in items:
        file.append(item)
        size += item.tensor_storage_size() or 0
        if size >= limit:
            yield file
            file, size = [], 0
    if file:
        yield file
