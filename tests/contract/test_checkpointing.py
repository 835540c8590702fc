"""What checkpoints in parts stand on in torch and transformers."""

from __future__ import annotations

import gc
import inspect
import io
import weakref
from pathlib import Path

import torch
import transformers.modeling_utils
from safetensors.torch import save_file
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from tests.isolation import isolated


def test_private_names_of_torch_are_there() -> None:
    assert list(inspect.signature(filesystem._write_item).parameters) == [
        "transforms",
        "stream",
        "data",
        "write_item",
        "storage_key",
        "serialization_format",
    ]
    assert hasattr(filesystem.FileSystemReader, "_slice_file")
    assert hasattr(DefaultSavePlanner, "lookup_object")
    assert transformers.modeling_utils.safe_save_file is save_file
    assert transformers.modeling_utils.remove_tied_weights_from_state_dict


@isolated
def test_nested_state_is_named_by_its_keys() -> None:
    flat, paths = flatten_state_dict({"model": {"layer.weight": torch.ones(1)}, "epoch": 3})
    assert list(flat) == ["model.layer.weight", "epoch"]
    assert paths["model.layer.weight"] == ("model", "layer.weight")


@isolated
def test_a_saved_tensor_stays_in_memory_and_a_loaded_one_does_not(tmp_path: Path) -> None:
    """Why copies are freed when they are written, and not when they are read."""
    gc.disable()
    tensor, buffer = torch.ones(1000), io.BytesIO()
    saved = weakref.ref(tensor.untyped_storage())
    torch.save(tensor, buffer)
    del tensor
    assert saved() is not None
    buffer.seek(0)
    tensor = torch.load(buffer, weights_only=True)
    loaded = weakref.ref(tensor.untyped_storage())
    assert loaded() is not None
    del tensor
    assert loaded() is None
