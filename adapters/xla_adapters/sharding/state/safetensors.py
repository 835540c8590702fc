"""Writes safetensors files tensor by tensor; the library's own writer needs all tensors of a file in memory.

Source of the format: https://huggingface.co/docs/safetensors (8 bytes length, a JSON header, then the data).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from xla_adapters.errors import ConfigError

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
