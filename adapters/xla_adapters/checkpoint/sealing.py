"""Sealing: adds a manifest with checksums to written files, so that they can be verified later.

The manifest of a folder is a further file in it. The manifest of a single file (as `torch.save` writes it, a zip
archive) is the archive's comment, which `torch.load` and other readers ignore.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from os import cpu_count

from xla_adapters.checkpoint.manifest import MANIFEST, FileRecord, Manifest
from xla_adapters.checkpoint.storage import Storage, join, walk
from xla_adapters.errors import CheckpointDamagedError, CheckpointWriteError

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
