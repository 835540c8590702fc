"""`Manifest`: describes a checkpoint, with size and checksum of each file, so that it can be verified.

The manifest of a folder is a further file in it. The manifest of a single file (as `torch.save` writes it, a zip
archive) is the archive's comment, which `torch.load` and other readers ignore.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import struct
import uuid
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from os import cpu_count
from typing import Any

from xla_adapters.checkpoint.storage import LocalStorage, Storage, StoredEntry, join, walk
from xla_adapters.errors import CheckpointDamagedError, CheckpointWarning, CheckpointWriteError

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
        if (version := _version(name)) is not None:
            found[name] = version
    return found


# Each save writes them; finding them takes as long as writing a small file.
@functools.cache
def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


ONE_FILE = "."
_LONGEST_COMMENT = 0xFFFF
# The end-of-central-directory record of a zip archive; its last field is the length of the comment.
_END_OF_ARCHIVE = struct.Struct("<4s4H2LH")
_SIGNATURE = b"PK\x05\x06"

Describe = Callable[[Mapping[str, FileRecord]], Manifest]


def make_durable(storage: Storage, folder: str) -> None:
    """Flushes all files and subfolders of a folder to disk; the caller flushes the folder itself."""
    for relative, entry in walk(storage, folder):
        if entry.is_folder:
            storage.fsync_folder(join(folder, relative))
        else:
            storage.fsync(join(folder, relative))


def seal_folder(storage: Storage, folder: str, describe: Describe) -> Manifest:
    """Writes the manifest of a folder into it, and flushes everything to disk.

    Raises:
        CheckpointWriteError: a link is among the files.
    """
    # Before the flush, so that digests are of what was written (from the cache), not of what the disk stored.
    manifest = describe(records(storage, folder))
    make_durable(storage, folder)
    storage.write(join(folder, MANIFEST), manifest.encode())
    storage.fsync(join(folder, MANIFEST))
    storage.fsync_folder(folder)
    return manifest


def seal_file(storage: Storage, path: str, describe: Describe) -> Manifest:
    """Writes the manifest of a zip archive into its comment, and flushes the file to disk.

    Raises:
        CheckpointWriteError: the file is not a zip archive, or has a comment.
    """
    end = _end_of_archive(storage, path)
    size = _size(storage, path)
    if end != size:
        raise CheckpointWriteError(
            f"{path} is no zip archive without a comment, as torch.save writes one; save it in a folder of its own"
        )

    def manifest(digest: str) -> Manifest:
        made = describe({ONE_FILE: FileRecord(size=size, digest=digest)})
        return made if len(made.encode(indent=None)) <= _LONGEST_COMMENT else replace(made, settings={})

    # All digests have the same length, so the comment's length is known in advance; its field is digested, too.
    length = len(manifest("0" * 64).encode(indent=None))
    storage.write(path, struct.pack("<H", length), size - 2)
    sealed = manifest(storage.digest(path, size))
    storage.write(path, sealed.encode(indent=None), size)
    storage.fsync(path)
    return sealed


def records(storage: Storage, folder: str) -> dict[str, FileRecord]:
    """Size and digest of each file in a folder, except the manifest. Digests are computed in parallel.

    Raises:
        CheckpointWriteError: a link is among the files; its target could change.
    """
    everything = {relative: entry for relative, entry in walk(storage, folder) if not entry.is_folder}
    links = [relative for relative, entry in everything.items() if entry.is_link]
    if links:
        raise CheckpointWriteError(f"{join(folder, links[0])} is a link; write the file itself")
    # The prefix also excludes an unfinished manifest.
    found = {relative: entry for relative, entry in everything.items() if not relative.startswith(MANIFEST)}
    with ThreadPoolExecutor(max_workers=min(8, cpu_count() or 1)) as pool:
        digests = pool.map(lambda relative: storage.digest(join(folder, relative)), found)
        return {
            relative: FileRecord(size=entry.size, digest=digest)
            for (relative, entry), digest in zip(found.items(), digests, strict=True)
        }


def read_manifest(storage: Storage, path: str) -> Manifest | None:
    """The manifest of a checkpoint (a folder or a file); `None` if it has none.

    Raises:
        CheckpointDamagedError: the manifest is damaged.
        OSError: it cannot be read.
    """
    entry = storage.entry(path)
    if entry is None:
        return None
    if entry.is_folder:
        inside = join(path, MANIFEST)
        return Manifest.decode(storage.read(inside)) if storage.entry(inside) is not None else None
    end = _end_of_archive(storage, path)
    if end is None or end == entry.size:
        if b'"settings_digest"' in storage.read(path, -_LONGEST_COMMENT):
            raise CheckpointDamagedError("the end of the file, where its manifest is, is damaged")
        return None
    return Manifest.decode(storage.read(path, end), indent=None)


def problems(storage: Storage, path: str, manifest: Manifest) -> list[str]:
    """Compares the files of a checkpoint with its manifest.

    Returns:
        A message for each file that is missing or different. Files that the manifest does not name are ignored.
    """

    def check(name: str) -> str | None:
        record, file = manifest.files[name], path if name == ONE_FILE else join(path, name)
        try:
            entry = storage.entry(file)
            if entry is None:
                return f"{name} is missing"
            # A single file is longer: its manifest follows.
            if entry.size != record.size and name != ONE_FILE:
                return f"{name} has {entry.size} bytes and had {record.size}"
            if storage.digest(file, record.size) != record.digest:
                return f"{name} is not what was written: its SHA-256 differs"
        except OSError as error:
            return f"{name} cannot be read: {error}"
        return None

    with ThreadPoolExecutor(max_workers=min(8, cpu_count() or 1)) as pool:
        return [problem for problem in pool.map(check, manifest.files) if problem is not None]


def _size(storage: Storage, path: str) -> int:
    entry = storage.entry(path)
    return 0 if entry is None else entry.size


def _end_of_archive(storage: Storage, path: str) -> int | None:
    """The offset at which a zip archive's comment starts; `None` if it is not a zip archive."""
    size = _size(storage, path)
    tail = storage.read(path, -(_END_OF_ARCHIVE.size + _LONGEST_COMMENT))
    at = tail.rfind(_SIGNATURE)
    while at >= 0:
        end = at + _END_OF_ARCHIVE.size
        if end <= len(tail) and end + _END_OF_ARCHIVE.unpack_from(tail, at)[-1] == len(tail):
            return size - len(tail) + end
        at = tail.rfind(_SIGNATURE, 0, at)
    return None


DAMAGED = "_damaged-"
# What to do with a folder that somebody changed.
IF_ON_PURPOSE = (
    "If you changed its files on purpose, say so by CheckpointConfig(trust_files=True), or remove "
    f"{MANIFEST} from it, and it is loaded as it is, unchecked"
)
_TRUSTED = "differs from its manifest, and is loaded under trust_files=True"
_ONE_FILE = ".ckpt"


@dataclass(frozen=True, kw_only=True)
class Found:
    """A file or folder that is a checkpoint, or has the name of one.

    Attributes:
        name: in the folder.
        step: from the manifest; without one, the number at the end of the name, if any.
        checkpoint: the checkpoint; None without a readable manifest.
        problems: why it is not a valid checkpoint. Files are only compared by `check`.
        is_sealed: whether it has a manifest, even a damaged one.
    """

    name: str
    step: int | None
    checkpoint: Checkpoint | None
    problems: tuple[str, ...]
    is_sealed: bool


def find(storage: Storage, root: str, prefix: str) -> list[Found]:
    """The checkpoints in a folder by step, and what has the name of one (`prefix` and a number, or `.ckpt`).

    Only manifests are read.
    """
    names = re.compile(rf"{re.escape(prefix)}\d+(\.r\d+)?|.*{re.escape(_ONE_FILE)}")
    found = []
    for entry in storage.entries(root):
        if entry.name.startswith((".", "_")) or (not entry.is_folder and not entry.name.endswith(_ONE_FILE)):
            continue
        item = look_at(storage, root, join(root, entry.name), entry)
        if item.is_sealed or names.fullmatch(entry.name):
            found.append(item)
    return sorted(found, key=_age)


def look_at(storage: Storage, root: str, path: str, entry: StoredEntry) -> Found:
    """Reads the manifest of what is at a path; files are not read."""
    number = re.search(r"(\d+)(\.r\d+)?$", entry.name.removesuffix(_ONE_FILE))
    step, is_sealed = int(number[1]) if number else None, True
    try:
        manifest = read_manifest(storage, path)
        if manifest is not None:
            checkpoint = Checkpoint(path=path, manifest=manifest)
            return Found(name=entry.name, step=manifest.step, checkpoint=checkpoint, problems=(), is_sealed=True)
        is_sealed = False
        problem = (
            f"it has no manifest ({MANIFEST}): somebody else wrote it, or the manifest is lost. If you trust it: "
            f"xla-adapters checkpoint repair {root} --adopt {entry.name}"
        )
    except CheckpointDamagedError as error:
        problem = str(error)
    except OSError as error:
        problem = f"the manifest cannot be read: {error}"
    return Found(name=entry.name, step=step, checkpoint=None, problems=(problem,), is_sealed=is_sealed)


def check(storage: Storage, found: Found, *, trust_files: bool = False) -> Found:
    """The same, with its files compared with the manifest.

    Args:
        storage: where it is.
        found: what `look_at` found.
        trust_files: warn of files that differ, and call them right.
    """
    if found.checkpoint is None:
        return found
    wrong = tuple(problems(storage, found.checkpoint.path, found.checkpoint.manifest))
    differing = dataclasses.replace(found, problems=wrong)
    if wrong and trust_files:
        warn_of(found.checkpoint.path, _TRUSTED, differing)
        return found
    return differing


def verify(path: str | os.PathLike[str], *, trust_files: bool = False) -> Manifest | None:
    """Compares a checkpoint on this machine (a folder or a file) with its manifest.

    Args:
        path: of the checkpoint.
        trust_files: warn of files that differ, and do not raise.

    Returns:
        The manifest; `None` if there is none, so that the checkpoint cannot be verified.

    Raises:
        CheckpointDamagedError: the checkpoint is not what was written.
    """
    storage, real = LocalStorage(), os.path.realpath(path)
    try:
        manifest = read_manifest(storage, real)
        wrong = [] if manifest is None else problems(storage, real, manifest)
    except CheckpointDamagedError as error:
        raise CheckpointDamagedError(f"{os.fspath(path)} is damaged: {error}") from error
    if wrong and trust_files:
        warnings.warn(f"checkpoint {os.fspath(path)} {_TRUSTED}: {'; '.join(wrong)}", CheckpointWarning, stacklevel=2)
    elif wrong:
        hint = f". {IF_ON_PURPOSE}" if os.path.isdir(real) else ""
        raise CheckpointDamagedError(f"{os.fspath(path)} is damaged: {'; '.join(wrong)}{hint}")
    return manifest


def set_aside(storage: Storage, root: str, damaged: Found) -> str | None:
    """Renames a damaged checkpoint so that nothing resumes from it, and warns; `None` if it cannot be renamed."""
    path, target = join(root, damaged.name), f"{DAMAGED}{damaged.name}"
    if storage.entry(join(root, target)) is not None:
        target = f"{target}-{uuid.uuid4().hex[:8]}"
    aside: str | None = None
    if storage.can_rename:
        with contextlib.suppress(OSError):
            storage.rename(path, join(root, target))
            aside = target
            storage.fsync_folder(root)
    warn_of(path, f"is damaged and was {f'renamed to {target}' if aside else 'passed over'}", damaged)
    return aside


def warn_of(path: str, what: str, found: Found) -> None:
    """Warns why a checkpoint is skipped."""
    warnings.warn(f"checkpoint {path} {what}: {'; '.join(found.problems)}", CheckpointWarning, stacklevel=2)


def _age(found: Found) -> tuple[bool, int, str, str]:
    created = found.checkpoint.manifest.created if found.checkpoint is not None else ""
    # A checkpoint without a known step may be the newest: it sorts last, so that a resume looks at it first and warns.
    return found.step is None, found.step or 0, created, found.name
