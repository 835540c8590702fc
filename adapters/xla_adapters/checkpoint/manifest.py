"""The manifest: what a checkpoint is, and what each of its files must be."""

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
    """A file as it was written: its size in bytes and the hexadecimal digits of its SHA-256."""

    size: int
    digest: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Written last into a checkpoint; the digest over itself protects it as its entries do the files.

    Attributes:
        step: the optimizer step the checkpoint was taken after.
        created: when, in UTC (ISO 8601).
        world: processes and devices of the run that wrote it.
        versions: of Python and of the distributions that matter, by name.
        settings: the run's configuration, as JSON holds it.
        settings_digest: SHA-256 over `settings`; equal for equal configurations.
        files: by their path relative to the checkpoint. A checkpoint that is one file has the entry `.`, for all
            but its seal.
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
        # A seal of one file has room for the digest only, not for large settings: it is given then.
        if not self.settings_digest:
            object.__setattr__(self, "settings_digest", _digest(self.settings))

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(record.size for record in self.files.values())

    def encode(self, *, indent: int | None = 1) -> bytes:
        """The manifest as it is written."""
        body = {"format": _FORMAT, "algorithm": _ALGORITHM, **asdict(self)}
        return (json.dumps({**body, "digest": _digest(body)}, sort_keys=True, indent=indent) + "\n").encode()

    @classmethod
    def decode(cls, data: bytes, *, indent: int | None = 1) -> Manifest:
        """Reads what `encode` wrote.

        Raises:
            CheckpointDamagedError: it is not, to the last bit.
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
            # Whatever the JSON leaves open (white space, order, case of escapes) must be as it was written, too.
            intact = manifest.encode(indent=indent) == data
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointDamagedError(f"the manifest cannot be read ({error})") from error
        if not intact:
            raise CheckpointDamagedError("the manifest does not have the digest it names")
        return manifest


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint under its name.

    Attributes:
        path: a folder, or one file; for an object store the path within it.
    """

    path: str
    manifest: Manifest

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rsplit("/", 1)[-1]

    @property
    def step(self) -> int:
        """The optimizer step it was taken after."""
        return self.manifest.step


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values as JSON holds them; what it does not know as its text."""
    result: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return result


def versions(distributions: Iterable[str] = ()) -> dict[str, str]:
    """The versions of Python and of what is installed of these distributions, torch, torch_xla and numpy."""
    found = {"python": platform.python_version()}
    for name in ("torch", "torch_xla", "numpy", "xla-adapters", *distributions):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
