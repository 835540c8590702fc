"""Compares the run that saved a checkpoint with the run that resumes from it."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from xla_adapters.checkpoint.manifest import Checkpoint, Manifest, plain, versions
from xla_adapters.errors import CheckpointMismatchWarning


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
