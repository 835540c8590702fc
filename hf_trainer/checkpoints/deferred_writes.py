"""Defers what transformers writes into a checkpoint: keeps copies of the tensors on the host, to be written later."""

from __future__ import annotations

import copy
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers.trainer

from xla_adapters.checkpoint import snapshot
from xla_adapters.runtime import patches
from xla_adapters.sharding.state import write_safetensors
from xla_adapters.utils.nested_values import identity, tensors_in
from xla_adapters.utils.nested_values import replaced as with_leaves
from xla_adapters.utils.patching import replaced

# Modules in which safetensors' function is looked up, and its name there.
_SAFETENSORS_USERS = {
    "safetensors.torch": "save_file",
    "transformers.modeling_utils": "safe_save_file",
    "peft.peft_model": "safe_save_file",
}


class DeferredWrites:
    """A checkpoint that is not written yet: its small files are in a temporary folder, its tensors in memory.

    Args:
        name: of the checkpoint's folder.

    Attributes:
        folder: in the temporary folder, for the small files.
    """

    def __init__(self, name: str) -> None:
        self._temporary = Path(tempfile.mkdtemp(prefix="xla_adapters-"))
        self.folder = self._temporary / name
        self.folder.mkdir()
        self._later: list[Callable[[Path], None]] = []

    def later(self, file: str, write: Callable[[Path], None]) -> None:
        """Adds a file that `finish` writes.

        Args:
            file: its path in `folder`.
            write: writes it to the path that it is called with.
        """
        relative = os.path.relpath(file, self.folder)
        self._later.append(lambda target: write(target / relative))

    def finish(self, target: Path) -> None:
        """Writes all files of the checkpoint into the folder `target`, and removes the temporary folder."""
        try:
            shutil.copytree(self.folder, target, dirs_exist_ok=True)
            for write in self._later:
                write(target)
        finally:
            self.discard()

    def discard(self) -> None:
        """Removes the temporary folder."""
        shutil.rmtree(self._temporary, ignore_errors=True)

    def has(self, file: Any) -> bool:
        """Whether a path is inside `folder`."""
        return isinstance(file, (str, os.PathLike)) and Path(file).is_relative_to(self.folder)


@contextmanager
def deferring(writes: DeferredWrites) -> Iterator[None]:
    """Inside the context, what this thread writes into `writes.folder` by torch.save and safetensors is deferred.

    Files without tensors are written at once. A tensor is copied once: by torch_xla when it comes from the device, or
    here.
    """
    thread, save = threading.get_ident(), torch.save
    # Only there with torch_xla, which then copies what it saves to the host.
    xm: Any = vars(transformers.trainer).get("xm")
    # References, so that no new tensor gets the memory of one of these.
    arrived: dict[int, torch.Tensor] = {}

    def noting(convert: Callable[..., Any]) -> Callable[..., Any]:
        def converted(data: Any, *args: Any, **kwargs: Any) -> Any:
            given = {_memory(tensor) for tensor in tensors_in(data) if tensor.device.type == "cpu"}
            result = convert(data, *args, **kwargs)
            for tensor in tensors_in(result):
                if tensor.device.type == "cpu" and _memory(tensor) not in given:
                    arrived[_memory(tensor)] = tensor
            return result

        return converted

    def own(value: Any) -> Any:
        live = [tensor for tensor in tensors_in(value) if tensor.device.type != "cpu" or _memory(tensor) not in arrived]
        copies = {identity(tensor): copied for tensor, copied in zip(live, snapshot(live), strict=True)}
        return with_leaves(value, lambda tensor: copies.get(identity(tensor), tensor), copy.deepcopy)

    def save_later(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        if not writes.has(f) or threading.get_ident() != thread or next(tensors_in(obj), None) is None:
            save(obj, f, *args, **kwargs)
            return
        value = own(obj)
        writes.later(os.fspath(f), lambda path: save(value, path, *args, **kwargs))

    def save_file_later(
        tensors: Mapping[str, torch.Tensor], filename: Any, metadata: Mapping[str, str] | None = None
    ) -> None:
        if not writes.has(filename) or threading.get_ident() != thread:
            save_file(dict(tensors), filename, metadata=dict(metadata) if metadata is not None else None)
            return
        value = own(dict(tensors))
        shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in value.items()}
        # safetensors' own function holds the interpreter lock, so that training would wait for the disk.
        writes.later(
            os.fspath(filename),
            lambda path: write_safetensors(path, shapes, value.items(), metadata=metadata),
        )

    save_file = safetensors.torch.save_file
    with ExitStack() as stack:
        for owner, name in ((xm, "_maybe_convert_to_cpu"), (patches, "weights_on_host")):
            if owner is not None:
                stack.enter_context(replaced(owner, name, noting(getattr(owner, name))))
        stack.enter_context(replaced(torch, "save", save_later))
        for module, name in _SAFETENSORS_USERS.items():
            if module in sys.modules:
                stack.enter_context(replaced(sys.modules[module], name, save_file_later))
        yield


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
