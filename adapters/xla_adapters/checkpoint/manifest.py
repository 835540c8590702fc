"""`Manifest`: describes a checkpoint, with size and checksum of each file."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from xla_adapters.errors import CheckpointDamagedError

MANIFEST = "xla_adapters.manifest.json"
_FORMAT = 1
_ALGORITHM = "sha256"


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """Size in bytes and SHA-256 (hexadecimal) of a file."""

    size: int
    digest: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Describes a checkpoint and its files. It is written last, with a digest of itself.

    Attributes:
        step: number of optimizer steps done when the checkpoint was saved.
        created: time of the save, in UTC (ISO 8601).
        world: number of processes and devices of the run.
        versions: of Python and relevant packages, by name.
        settings: the run's configuration, as plain JSON values.
        settings_digest: SHA-256 of `settings`.
        files: records by path relative to the checkpoint. A single-file checkpoint has the one entry `.`, which covers
            all but the manifest at its end.
    """

    step: int
    created: str
    world: Mapping[str, int]
    versions: Mapping[str, str]
    settings: Mapping[str, Any]
    files: Mapping[str, FileRecord]
    settings_digest: str = field(default="")

    def __post_init__(self) -> None:
        object.__setattr__(self, "settings", plain(self.settings))
        # A zip comment is too short for large settings; then only their digest is stored, and passed in here.
        if not self.settings_digest:
            object.__setattr__(self, "settings_digest", _digest(self.settings))

    @property
    def size(self) -> int:
        """Total bytes of all files."""
        return sum(record.size for record in self.files.values())

    def encode(self, *, indent: int | None = 1) -> bytes:
        """The manifest as JSON with its own digest."""
        body = {"format": _FORMAT, "algorithm": _ALGORITHM, **asdict(self)}
        return (json.dumps({**body, "digest": _digest(body)}, sort_keys=True, indent=indent) + "\n").encode()

    @classmethod
    def decode(cls, data: bytes, *, indent: int | None = 1) -> Manifest:
        """Reads what `encode` wrote.

        Raises:
            CheckpointDamagedError: `data` differs in any bit.
        """
        try:
            values = json.loads(data)
            if values["format"] > _FORMAT:
                raise CheckpointDamagedError(
                    f"the manifest has format {values['format']}, and this version of xla-adapters knows {_FORMAT}: "
                    "use a newer one"
                )
            for extra in ("format", "algorithm", "digest"):
                del values[extra]
            files = {name: FileRecord(**record) for name, record in values.pop("files").items()}
            manifest = cls(files=files, **values)
            # Compared as bytes, so white space and order of keys must be the same, too.
            intact = manifest.encode(indent=indent) == data
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointDamagedError(f"the manifest cannot be read ({error})") from error
        if not intact:
            raise CheckpointDamagedError("the manifest does not have the digest it names")
        return manifest


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A committed checkpoint.

    Attributes:
        path: of the folder or file; in an object store the path within it.
        manifest: its manifest.
    """

    path: str
    manifest: Manifest

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rsplit("/", 1)[-1]

    @property
    def step(self) -> int:
        """Number of optimizer steps done when it was saved."""
        return self.manifest.step


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values as plain JSON values; others become their `str()`."""
    result: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return result


def versions(distributions: Iterable[str] = ()) -> dict[str, str]:
    """The versions of Python, torch, its runtime, numpy, this package, and `distributions`, as far as installed."""
    found = {"python": platform.python_version()}
    for name in ("torch", "torch_xla", "torch_tpu", "numpy", "xla-adapters", *distributions):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
