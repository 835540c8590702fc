"""What a resumed run continues from: random states and positions, copies of its state, a comparison of the runs."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy
import torch

from xla_adapters.checkpoint.manifest import Checkpoint, Manifest, plain, versions
from xla_adapters.errors import CheckpointDamagedError, CheckpointMismatchWarning, CheckpointSaveError
from xla_adapters.open_step import in_step
from xla_adapters.runtime import get_runtime
from xla_adapters.runtime.rng import resume_random_algorithm
from xla_adapters.utils.host_random import HostRandom
from xla_adapters.utils.nested_values import Identity, identity, replaced, tensors_in
from xla_adapters.utils.unpickling import load_values

_FILE = "xla_adapters.training_state-{rank}.pt"


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """The random states of one process, and the positions of its samplers, loaders and callbacks.

    Attributes:
        python, numpy, torch: the states of their global generators.
        device: the seed of the device's random stream.
        algorithm: of the device's random numbers; an empty string if not known.
        positions: state dicts by name; only types that `torch.load(weights_only=True)` reads.
    """

    python: tuple[Any, ...]
    numpy: tuple[Any, ...]
    torch: torch.Tensor
    device: int
    algorithm: str = ""
    positions: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def capture(cls, positions: Mapping[str, Any] | None = None) -> TrainingState:
        """The current state; nothing is drawn, and nothing is executed on the device."""
        return cls(
            **HostRandom.now().to_save(),
            device=get_runtime().random.seed(),
            algorithm=get_runtime().random.algorithm(),
            positions=dict(positions) if positions is not None else {},
        )

    def restore(self) -> None:
        """Sets all generators; warns if the device uses another algorithm, which draws other numbers."""
        HostRandom.of_saved(vars(self)).restore()
        get_runtime().random.set_seed(self.device)
        if self.algorithm:
            resume_random_algorithm(self.algorithm)

    def save(self, folder: Path, *, rank: int = 0) -> None:
        """Writes the state into a checkpoint folder, one file per rank."""
        torch.save(vars(self), folder / _FILE.format(rank=rank))

    @classmethod
    def load(cls, folder: Path, *, rank: int = 0) -> TrainingState | None:
        """Reads what `save` wrote for this rank; `None` if the checkpoint has none (it was saved by fewer ranks, say).

        Raises:
            CheckpointDamagedError: the file has other content.
            CheckpointUnsafeError: the file names code.
        """
        path = folder / _FILE.format(rank=rank)
        if not path.is_file():
            return None
        values = load_values(path)
        try:
            return cls(**values)
        except TypeError as error:
            raise CheckpointDamagedError(f"{path} holds no TrainingState: {error}") from error


_State = TypeVar("_State")


def snapshot(state: _State) -> _State:
    """Deep-copies a nested state to the host.

    All device tensors come in one transfer, and the copy does not keep their buffers alive, so the next step may reuse
    them (donation). Tied weights are one tensor in the copy, too.

    Args:
        state: tensors and anything else in mappings, lists and tuples.

    Raises:
        CheckpointSaveError: it is called inside a step.
    """
    if in_step():
        raise CheckpointSaveError(
            "a checkpoint was to be taken inside a step, whose values do not exist yet: save after it"
        )
    found: dict[Identity, torch.Tensor] = {}
    for tensor in tensors_in(state):
        found.setdefault(identity(tensor), tensor)
    runtime = get_runtime()
    on_device = {key: tensor for key, tensor in found.items() if runtime.device.owns(tensor)}
    copies = dict(zip(on_device, runtime.transfers.to_host(list(on_device.values())), strict=True))
    for key, tensor in found.items():
        if key not in copies:
            # Without values (`meta`) are those that another rank writes.
            copies[key] = tensor if tensor.is_meta else tensor.detach().to("cpu", copy=True)
    result: _State = replaced(state, lambda tensor: copies[identity(tensor)], _copied)
    return result


def _copied(leaf: Any) -> Any:
    return leaf.copy() if isinstance(leaf, numpy.ndarray) else copy.deepcopy(leaf)


def differences(
    manifest: Manifest,
    *,
    settings: Mapping[str, Any] | None = None,
    distributions: Collection[str] = (),
    world: Mapping[str, int] | None = None,
    ignore: Collection[str] = (),
) -> list[str]:
    """A diff with one line per value: `-` as saved, `+` as now. Empty if nothing differs.

    Args:
        manifest: of the checkpoint.
        settings: the configuration of this run; not compared if not given.
        distributions: names of the installed packages whose versions are compared.
        world: number of processes and devices of this run; not compared if not given.
        ignore: dotted names of settings that may differ (the number of steps, say).
    """
    pairs: list[tuple[str, Mapping[str, Any], Mapping[str, Any]]] = [
        ("versions.", manifest.versions, versions(distributions))
    ]
    if world is not None:
        pairs.append(("world.", manifest.world, world))
    if settings is not None:
        saved, now = dict(_flat(manifest.settings)), dict(_flat(plain(settings)))
        kept = [{name: value for name, value in side.items() if name not in ignore} for side in (saved, now)]
        pairs.append(("", kept[0], kept[1]))
    lines = []
    for prefix, old, new in pairs:
        for name in sorted({*old, *new}):
            if old.get(name, _ABSENT) == new.get(name, _ABSENT):
                continue
            if name in old:
                lines.append(f"- {prefix}{name}: {old[name]!r}")
            if name in new:
                lines.append(f"+ {prefix}{name}: {new[name]!r}")
    return lines


def warn_of_differences(checkpoint: Checkpoint, lines: list[str]) -> None:
    """Warns with a diff, unless it is empty."""
    if lines:
        warnings.warn(
            f"{checkpoint.path} was saved by another run than this; its losses may not go on bit for bit "
            "(- as saved, + now):\n  " + "\n  ".join(lines),
            CheckpointMismatchWarning,
            stacklevel=2,
        )


_ABSENT = object()


def _flat(values: Mapping[str, Any], below: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{below}{name}.")
        else:
            yield f"{below}{name}", value
