"""`consolidate`: writes the weights of a sharded checkpoint as safetensors files, which `from_pretrained` reads.

Needs neither devices nor torch_xla. Files are written tensor by tensor (`write_safetensors`); the library's own writer
needs all tensors of a file in memory. Source of the format: https://huggingface.co/docs/safetensors (8 bytes length, a
JSON header, then the data).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from xla_adapters.errors import ConfigError
from xla_adapters.sharding.state.loading import Destination, Reader
from xla_adapters.sharding.state.training import MODEL

_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


def write_safetensors(
    path: str | Path,
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes a file with only one tensor at a time in memory.

    Args:
        path: of the file.
        shapes: shape and dtype of each tensor by name.
        tensors: (name, host tensor) in the order of `shapes`; each is requested after the previous one is written.
        metadata: of the file; readers expect `{"format": "pt"}`, the default.

    Raises:
        ConfigError: the format does not support a dtype.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata) if metadata is not None else {"format": "pt"}}
    end = 0
    for name, (shape, dtype) in shapes.items():
        if dtype not in _NAMES:
            raise ConfigError(f"{name} is of {dtype}, which safetensors files do not have")
        start, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    # The data must begin at a multiple of 8 bytes.
    encoded += b" " * (-len(encoded) % 8)
    with open(path, "wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for (name, (shape, dtype)), (given, tensor) in zip(shapes.items(), tensors, strict=True):
            assert (given, tuple(tensor.shape), tensor.dtype) == (name, tuple(shape), dtype)
            file.write(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)


WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def consolidate(
    folder: str | Path, output: str | Path, *, key: str = MODEL, max_shard_size: int | str = "5GB"
) -> list[Path]:
    """Writes the weights of a checkpoint to `model.safetensors`, or to several files and an index.

    Only one tensor at a time is in memory. A tied weight is written once, as usual in these files. For
    `from_pretrained`, put a `config.json` into the folder.

    Args:
        folder: written by `save_state({"model": model_state(model)}, folder)`.
        output: a folder; created if it does not exist.
        key: the key of the model's state in the checkpoint; `""` takes all tensors.
        max_shard_size: bytes per file, as a number or like `"5GB"`; a larger tensor gets a file of its own.

    Returns:
        The files.

    Raises:
        ConfigError: there is no checkpoint, it has no tensor under this key, or the size is not valid.
    """
    reader, limit = Reader(folder), _bytes(max_shard_size)
    prefix = f"{key}." if key else ""
    tensors = {name.removeprefix(prefix): entry for name, entry in reader.tensors.items() if name.startswith(prefix)}
    if not tensors:
        found = sorted({str(reader.path(name)[0]) for name in reader.tensors})
        raise ConfigError(f"{folder} has no tensors under {key!r}; there are {', '.join(found) or 'none at all'}")
    output = Path(output)
    output.mkdir(parents=True, exist_ok=True)
    files = list(_in_files(tensors, limit))
    names = (
        [WEIGHTS]
        if len(files) == 1
        else [f"model-{n:05}-of-{len(files):05}.safetensors" for n in range(1, len(files) + 1)]
    )
    for name, members in zip(names, files, strict=True):
        shapes = {member: (tuple(entry.size), entry.properties.dtype) for member, entry in members.items()}
        destinations = {
            prefix + member: Destination(entry.size, entry.properties.dtype) for member, entry in members.items()
        }
        values = reader.read(destinations, bucket_bytes=0)
        write_safetensors(output / name, shapes, ((full.removeprefix(prefix), value) for full, value in values))
    if len(files) > 1:
        placed = {member: name for name, members in zip(names, files, strict=True) for member in members}
        index = {"metadata": {"total_size": sum(map(_size_of, tensors.values()))}, "weight_map": placed}
        (output / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        names.append(INDEX)
    return [output / name for name in names]


def _in_files(tensors: dict[str, TensorStorageMetadata], limit: int) -> Iterator[dict[str, TensorStorageMetadata]]:
    file: dict[str, TensorStorageMetadata] = {}
    size = 0
    for name, entry in tensors.items():
        if file and size + _size_of(entry) > limit:
            yield file
            file, size = {}, 0
        file[name] = entry
        size += _size_of(entry)
    yield file


def _size_of(entry: TensorStorageMetadata) -> int:
    return entry.size.numel() * entry.properties.dtype.itemsize


def _bytes(size: int | str) -> int:
    match = re.fullmatch(r"(\d+)\s*([KMG]I?B)?", str(size).upper())
    if match is None or int(match[1]) == 0:
        raise ConfigError(f"max_shard_size={size!r} is not a valid value; valid values: bytes, '500MB', '5GB', '4GiB'")
    return int(match[1]) * _UNITS[match[2] or ""]
