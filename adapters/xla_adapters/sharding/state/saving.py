"""`save_state`: writes a sharded checkpoint in the format of torch.distributed.checkpoint.

torch_xla's own planner for this (2.9, `SPMDSavePlanner`) is not used: it silently omits tensors that are partly
replicated among the devices of one process.
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

from xla_adapters.errors import RuntimeOrderError
from xla_adapters.runtime import Part, Runtime, get_runtime

METADATA = ".metadata"


def save_state(
    state: Mapping[str, Any],
    folder: str | Path,
    *,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Writes a state without gathering it: each process writes the shards on its devices, each shard once.

    Only one tensor at a time is on the host. torch.distributed.checkpoint, `load_state` (onto any mesh) and
    `consolidate` can read the result.

    Args:
        state: nested dicts of tensors, on devices or the host, and plain objects.
        folder: to write to; created if it does not exist. A checkpoint in it is replaced once the new one is complete.
        process_group: the processes that hold shards (the default group if not given); not needed for one process.

    Raises:
        RuntimeOrderError: other processes hold shards, and torch.distributed is not initialised.
    """
    planner = _Planner(get_runtime())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        warnings.filterwarnings("ignore", "Detected an existing checkpoint")
        try:
            save(dict(state), storage_writer=_Writer(folder), planner=planner, process_group=process_group)
        except CheckpointException as error:
            # torch wraps the error in a class that does not derive from `Exception`.
            happened, _ = next(iter(error.failures.values()))
            raise happened from error


class _OnDevice:
    """Presents a device tensor to torch.distributed.checkpoint: the parts that this process holds, each once."""

    def __init__(self, tensor: torch.Tensor, runtime: Runtime) -> None:
        self._tensor, self._runtime = tensor.detach(), runtime
        self._places = runtime.spmd.local_parts(tensor)
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
        """Whether this process holds all of the tensor."""
        return sum(torch.Size(part.sizes).numel() for part in self.parts) == self._tensor.numel()

    def to_host(self) -> dict[tuple[int, ...], torch.Tensor]:
        """Copies of the parts on the host, by their offsets."""
        if not self._places:
            return {self.parts[0].offsets: self._runtime.transfers.to_host([self._tensor])[0]}
        copies = zip(self._places, self._runtime.spmd.parts_to_host(self._tensor), strict=True)
        return {part.offsets: copy for part, copy in copies}


class _Planner(DefaultSavePlanner):
    """Copies a tensor to the host when its first part is written, and frees each part after it was written."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__()
        self._runtime = runtime
        self._copied, self._copies = "", dict[tuple[int, ...], torch.Tensor]()

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        wrapped: dict[int, _OnDevice] = {}
        for name, value in self.state_dict.items():
            if isinstance(value, torch.Tensor) and self._runtime.device.owns(value):
                self.state_dict[name] = wrapped.setdefault(id(value), _OnDevice(value, self._runtime))
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
    """Frees each host copy once it is written.

    torch's writer (2.9) keeps copies until a file is complete, or until garbage collection (`torch.save` leaves a
    reference cycle).
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        assert isinstance(planner, _Planner)
        # A new name, so that the files of the previous checkpoint stay intact until this one is complete.
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
