"""`save_state`: a checkpoint of torch.distributed.checkpoint, written part by part.

torch_xla's own planner for it (2.9, `SPMDSavePlanner`) writes no part at all of a tensor that some devices of one
process hold copies of, and says nothing; it is not used here.
"""

from __future__ import annotations

import os
import uuid
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _write_item
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult

from xla_adapters.backend import Backend, Part, get_backend
from xla_adapters.errors import RuntimeOrderError

METADATA = ".metadata"


def save_state(
    state: Mapping[str, Any],
    folder: str | Path,
    *,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Writes a state without putting it together: each process writes what its devices hold, copies once.

    On the host there is one tensor at a time. torch.distributed.checkpoint reads the result; so do `load_state` (onto
    any mesh) and `consolidate`.

    Args:
        state: nested dicts of tensors, on devices or the host, and plain objects.
        folder: to write to; made if it does not exist. A checkpoint that it holds is replaced when the new one is
            complete.
        process_group: of the processes that hold parts (the default group if not given); one process needs none.

    Raises:
        RuntimeOrderError: other processes hold parts, and torch.distributed is not initialised.
    """
    planner = _Planner(get_backend())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        warnings.filterwarnings("ignore", "Detected an existing checkpoint")
        try:
            save(dict(state), storage_writer=_Writer(folder), planner=planner, process_group=process_group)
        except CheckpointException as error:
            # torch wraps what happened in something that is no `Exception`.
            happened, _ = next(iter(error.failures.values()))
            raise happened from error


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

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
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
        return self._copies[tuple(index.offset)]

    def release(self, item: WriteItem) -> None:
        """Frees the copy that was written."""
        if item.index.fqn == self._copied and item.index.offset is not None:
            self._copies.pop(tuple(item.index.offset)).untyped_storage().resize_(0)


class _Writer(FileSystemWriter):
    """Lets go of each copy when it is written: torch's (2.9) keeps some for the length of a file, or until a
    collection of garbage (`torch.save` leaves a cycle that holds what it saved).
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        assert isinstance(planner, _Planner)
        # A name of its own: the files of a former checkpoint are whole until this one is.
        name = f"{plan.storage_data.prefix}{uuid.uuid4().hex[:8]}.distcp"
        results: list[WriteResult] = []
        if plan.items:
            with self.fs.create_stream(self.fs.concat_path(self.path, name), "wb") as stream:
                for item in plan.items:
                    data = planner.resolve_data(item)
                    results.append(_write_item(self.transforms, stream, data, item, name, self.serialization_format))
                    planner.release(item)
                stream.flush()
                os.fsync(stream.fileno())
        written: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        written.set_result(results)
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        current = {result.storage_data.relative_path for written in results for result in written}
        for file in Path(self.path).glob("*.distcp"):
            if file.name not in current:
                file.unlink()
