"""Saves models that are on the device by the code that saves models on the CPU: the same calls, the same files."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
import transformers.modeling_utils
import transformers.trainer

from xla_adapters import get_runtime
from xla_adapters.runtime import patches
from xla_adapters.utils.nested_values import identity
from xla_adapters.utils.patching import replaced


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
