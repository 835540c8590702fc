"""How weights and optimizer states get from the device into the files of transformers, and back."""

from __future__ import annotations

import copy
import functools
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers
import transformers.modeling_utils
import transformers.trainer
from torch.utils import _pytree
from transformers import PreTrainedModel
from transformers.trainer import SCHEDULER_NAME

from hf_trainer.model import ModelSharding, innermost, model_of
from xla_adapters import get_runtime
from xla_adapters.checkpoint import snapshot
from xla_adapters.runtime import eager, patches
from xla_adapters.runtime.transfers import uploading
from xla_adapters.sharding import for_first_rank
from xla_adapters.sharding.state import load_optimizer, optimizer_state, save_state, write_safetensors
from xla_adapters.tracing.optimizers import keep_own_kernels
from xla_adapters.utils.nested_values import identity, tensors_in
from xla_adapters.utils.nested_values import replaced as with_leaves
from xla_adapters.utils.patching import replaced
from xla_adapters.utils.unpickling import load_values, only_values

# How many weights on the host are cached. Entries made from the same weight (the experts of a layer, which have an
# entry each in the file) are written one after the other.
_KEPT = 2


class DeferredWeight(torch.Tensor):
    """A weight that has only shape and dtype; its values are copied to the host when they are written.

    Operations of transformers on weights before it saves them (splitting, transposing) are applied to the values then.
    """

    _values: Callable[[], torch.Tensor]

    @staticmethod
    def __new__(cls, like: torch.Tensor, values: Callable[[], torch.Tensor]) -> DeferredWeight:
        """A tensor with the shape and dtype of `like`, and the values that `values` returns."""
        made: DeferredWeight = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=torch.device("meta")
        )
        made._values = values
        return made

    def __init__(self, like: torch.Tensor, values: Callable[[], torch.Tensor]) -> None: ...

    def on_host(self) -> torch.Tensor:
        """The values, on the host."""
        return self._values()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Applies the operation to shapes now, and to values in `on_host`."""
        given = (args, dict(kwargs or {}))

        def values(index: int) -> torch.Tensor:
            on_host_args, on_host_kwargs = _pytree.tree_map_only(DeferredWeight, DeferredWeight.on_host, given)
            leaf: torch.Tensor = _pytree.tree_leaves(func(*on_host_args, **on_host_kwargs))[index]
            return leaf

        shape_args, shape_kwargs = _pytree.tree_map_only(DeferredWeight, _shape_of, given)
        leaves, structure = _pytree.tree_flatten(func(*shape_args, **shape_kwargs))
        made = [
            cls(leaf, functools.partial(values, index)) if isinstance(leaf, torch.Tensor) else leaf
            for index, leaf in enumerate(leaves)
        ]
        return _pytree.tree_unflatten(made, structure)


def deferred_state_dict(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The weights of a model as `DeferredWeight`s, to pass to `save_pretrained`. Tied weights have one entry, under the
    name that transformers keeps."""
    weights = model.state_dict()
    shapes: dict[str, torch.Tensor] = {name: _shape_of(value) for name, value in weights.items()}
    kept = transformers.modeling_utils.remove_tied_weights_from_state_dict(shapes, model)

    @functools.lru_cache(maxsize=_KEPT)
    def values(name: str) -> torch.Tensor:
        return get_runtime().transfers.to_host([weights[name]])[0]

    return {name: DeferredWeight(weights[name], functools.partial(values, name)) for name in kept}


@contextmanager
def writing_deferred_weights() -> Iterator[None]:
    """Inside the context transformers can save the result of `deferred_state_dict`."""

    def save_file(
        tensors: dict[str, torch.Tensor], filename: str | os.PathLike[str], metadata: dict[str, str] | None = None
    ) -> None:
        shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
        values = (
            (name, tensor.on_host() if isinstance(tensor, DeferredWeight) else tensor)
            for name, tensor in tensors.items()
        )
        write_safetensors(os.fspath(filename), shapes, values, metadata=metadata)

    with replaced(transformers.modeling_utils, "safe_save_file", save_file):
        yield


def _shape_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


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


def save_pretrained_from_device() -> None:
    """From now on `PreTrainedModel.save_pretrained` saves a model that is on the device, for the rest of the process.

    transformers finds tied weights by the addresses of their memory, which only tensors on the host have.
    """
    library: Any = transformers.modeling_utils
    find = library.remove_tied_weights_from_state_dict
    if hasattr(find, "of_xla_adapters"):
        return

    @functools.wraps(find)
    def without_tied(state_dict: dict[str, torch.Tensor], model: Any) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = find(patches.weights_on_host(state_dict, get_runtime()), model)
        return found

    without_tied.of_xla_adapters = True  # type: ignore[attr-defined]
    library.remove_tied_weights_from_state_dict = without_tied


@contextmanager
def saving_as_on_the_cpu(trainer: transformers.Trainer) -> Iterator[None]:
    """Inside the context `Trainer.save_model` calls the trainer's `_save`, as it does on the CPU.

    On XLA devices transformers calls a function of its own instead: an override of `_save` is ignored, a plain module
    becomes a pickle, and the tokenizer of the collator is not saved.

    Args:
        trainer: the trainer. With several processes nothing changes.
    """
    if trainer.args.world_size > 1:
        yield
        return

    def save(model: Any, args: Any, accelerator: Any, processing: Any, fsdp: bool, output_dir: str) -> None:
        weights = _with_tied_copied(trainer.model)
        if weights is None:
            trainer._save(output_dir)
        else:
            trainer._save(output_dir, weights)

    with replaced(transformers.trainer, "save_tpu_checkpoint", save):
        yield


def _with_tied_copied(model: Any) -> dict[str, torch.Tensor] | None:
    """The weights of a plain module that has tied ones, with a copy for each name; None for other models.

    safetensors refuses tensors that share memory, and transformers leaves names out of its own models only. On the CPU
    such a training ends with that error at its first save.
    """
    if isinstance(model, transformers.PreTrainedModel) or hasattr(model, "save_pretrained"):
        return None
    weights = model.state_dict()
    if len(set(map(identity, weights.values()))) == len(weights):
        return None
    copied: dict[str, torch.Tensor] = {}
    for name, value in patches.weights_on_host(weights, get_runtime()).items():
        copied[name] = value.clone() if any(value is other for other in copied.values()) else value
    return copied


class WeightLoading:
    """Loads weights in one execution, and repairs what transformers' Trainer does not load.

    Args:
        trainer: the trainer.
        base: the methods that the mixin overrides.
    """

    def __init__(self, trainer: transformers.Trainer, base: Any) -> None:
        self._trainer = trainer
        self._base = base
        self._checkpoint: str | None = None

    @contextmanager
    def loading(self, checkpoint: str | None) -> Iterator[None]:
        """Around the loading of a checkpoint's weights.

        Args:
            checkpoint: its folder.
        """
        self._checkpoint = checkpoint
        try:
            # One execution instead of one per weight. A weight that is overwritten eagerly would lose its sharding.
            with uploading(), only_values(checkpoint):
                yield
            get_runtime().tracing.flush()
        finally:
            self._checkpoint = None

    def after_load(self, load_result: Any) -> None:
        """As `Trainer._issue_warnings_after_load`. If names did not match, it loads by `load_renamed_weights`."""
        model = self._trainer.model
        if load_result.unexpected_keys and self._checkpoint and isinstance(model, PreTrainedModel):
            load_renamed_weights(model, self._checkpoint)
        else:
            self._base._issue_warnings_after_load(load_result)


def load_renamed_weights(model: PreTrainedModel, folder: str | Path) -> None:
    """Loads the weights of a checkpoint that `save_pretrained` wrote.

    Some models are saved under the names of their published checkpoints (ViT: `attention.attention.key` for
    `attention.k_proj`). transformers' Trainer (5.23) loads the file as it is, matches none of these names and
    continues with a warning: resume and best model are silently not loaded, on any device. `from_pretrained` knows
    the renaming.

    Args:
        model: gets the weights, in place.
        folder: the checkpoint.

    Raises:
        RuntimeError: the checkpoint belongs to another model.
    """
    loaded: Any = type(model).from_pretrained(folder, dtype=model.dtype)
    model.load_state_dict(loaded.state_dict())


# Other than the name of transformers' file: its own Trainer then refuses the checkpoint with a message.
OPTIMIZER_FOLDER = "optimizer"


class ShardedCheckpoints:
    """Under `ShardingConfig(checkpoints="sharded")` the host never holds the whole state while it is saved.

    Weights are ordinary safetensors files, which `from_pretrained` reads. Models that are not a `PreTrainedModel`
    (adapters of PEFT, plain modules) have their weights saved as without the option.

    Args:
        trainer: the trainer.
        base: the methods that the mixin overrides.
        sharding: says whether the option is on.
    """

    def __init__(self, trainer: transformers.Trainer, base: Any, sharding: ModelSharding) -> None:
        self._trainer = trainer
        self._base = base
        self._sharding = sharding

    def save_model(self, output_dir: str | None, _internal_call: bool) -> None:
        """As `Trainer.save_model`."""
        trainer, model = self._trainer, model_of(self._trainer)
        if self._sharding.holds_shards:
            with for_first_rank():
                weights = model.state_dict()
            trainer._save(output_dir, weights)
        elif not self._sharding.saves_shards or not isinstance(model, PreTrainedModel):
            # An override need not know the argument.
            internal = {"_internal_call": True} if _internal_call else {}
            with saving_as_on_the_cpu(trainer):
                self._base.save_model(output_dir, **internal)
            return
        else:
            get_runtime().tracing.flush()
            with writing_deferred_weights():
                trainer._save(output_dir, deferred_state_dict(model))
        if trainer.args.push_to_hub and not _internal_call:
            trainer.push_to_hub(commit_message="Model save", revision=trainer.args.hub_revision)

    def save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """As `Trainer._save_optimizer_and_scheduler`."""
        if not self._sharding.saves_shards:
            with for_first_rank() if self._sharding.holds_shards else nullcontext():
                if self._sharding.holds_shards and not self._trainer.args.should_save:
                    # The rank that saves asks for this rank's shards.
                    self._optimizer.state_dict()
                self._base._save_optimizer_and_scheduler(output_dir)
            return
        state = optimizer_state(model_of(self._trainer), self._optimizer)
        save_state({OPTIMIZER_FOLDER: state}, Path(output_dir) / OPTIMIZER_FOLDER)
        scheduler: Any = self._trainer.lr_scheduler
        torch.save(scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """As `Trainer._load_optimizer_and_scheduler`. Sharded state is loaded with or without the option, on any number
        of devices."""
        if self._sharding.ranks is not None:
            self._sharding.ranks.share_state(self._optimizer)
        if checkpoint is None or not (Path(checkpoint) / OPTIMIZER_FOLDER).is_dir():
            if checkpoint is not None and (optimizer := innermost(self._trainer.optimizer)) is not None:
                keep_own_kernels(optimizer)
            with eager(False), only_values(checkpoint):
                self._base._load_optimizer_and_scheduler(checkpoint)
            return
        load_optimizer(model_of(self._trainer), self._optimizer, Path(checkpoint) / OPTIMIZER_FOLDER)
        scheduler: Any = self._trainer.lr_scheduler
        scheduler.load_state_dict(load_values(Path(checkpoint) / SCHEDULER_NAME))

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        optimizer = innermost(self._trainer.optimizer)
        assert isinstance(optimizer, torch.optim.Optimizer)
        return optimizer
