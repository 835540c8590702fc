"""`CheckpointStore`: a folder of checkpoints, at least one of them whole at any instant."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from xla_adapters.checkpoint.commit import Commit, Draft, MarkerCommit, RenameCommit, remove_checkpoint
from xla_adapters.checkpoint.group import Group, OneProcess, Watchdog
from xla_adapters.checkpoint.manifest import (
    ONE_FILE,
    Checkpoint,
    FileRecord,
    Found,
    Manifest,
    check,
    find,
    look_at,
    make_durable,
    problems,
    set_aside,
    versions,
    warn_of,
)
from xla_adapters.checkpoint.storage import LocalStorage, Storage, cause, is_failed_write, join, kept, room, storage_of
from xla_adapters.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointSaveError,
    CheckpointWarning,
    CheckpointWriteError,
    ConfigError,
)
from xla_adapters.open_step import in_step

_Result = TypeVar("_Result")


class CheckpointStore:
    """A folder of checkpoints.

    A checkpoint is whatever a callback writes into a folder (or one file that `torch.save` writes), and a
    manifest. It appears under its name at one instant, after everything was flushed and read back; it is checked
    when it is opened; and it goes only when a newer one was read back and found right.

    Args:
        root: the folder, or the URL of one in an object store (`gs://...`, whatever fsspec knows).
        prefix: names are this and the step, where no name is given.
        keep_last, keep_every: see `CheckpointConfig`; applied after each save.
        protected: names that stay whatever these say.
        distributions: whose versions a manifest names beside those of Python, torch, torch_xla and numpy.
        devices: how many devices the run uses, for the manifest.
        group: the processes that save together. They share the folder.
        watchdog: ends a save (and the barriers in it) that takes too long.
        trust_files: see `CheckpointConfig`.
        storage: in place of the one that `root` calls for.

    Raises:
        ConfigError: several processes and an object store.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        prefix: str = "checkpoint-",
        keep_last: int | None = None,
        keep_every: int | None = None,
        protected: Collection[str] = (),
        distributions: Collection[str] = (),
        devices: int = 1,
        group: Group | None = None,
        watchdog: Watchdog | None = None,
        trust_files: bool = False,
        storage: Storage | None = None,
    ) -> None:
        found, self.root = storage_of(root)
        self.prefix = prefix
        self.storage: Storage = storage if storage is not None else found
        self.group: Group = group if group is not None else OneProcess()
        self._watchdog = watchdog if watchdog is not None else Watchdog(None)
        self._trust_files = trust_files
        self._keep_last = keep_last
        self._keep_every = keep_every
        self._protected = frozenset(protected)
        self._distributions = tuple(distributions)
        self._devices = devices
        if self.group.size > 1 and not self.storage.can_rename:
            raise ConfigError(f"{root}: several processes need a file system they share, not an object store")
        self._commit: Commit = (RenameCommit if self.storage.can_rename else MarkerCommit)(self.storage, self.root)
        self._lock = threading.RLock()
        self._depth = 0

    # ---- saving ----------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        write: Callable[[Path], None],
        *,
        name: str | None = None,
        one_file: bool = False,
        settings: Mapping[str, Any] | None = None,
    ) -> Checkpoint:
        """Saves a checkpoint; one that has this name is replaced. All ranks take part.

        Args:
            step: optimizer steps done.
            write: writes the checkpoint into the folder (or to the file) it is given.
            name: of the checkpoint, `<prefix><step>` if not given.
            one_file: whether it is one file, written by `torch.save`, and no folder.
            settings: the run's configuration, to be compared when it is resumed.

        Raises:
            CheckpointWriteError: the storage refused, or does not hold what was written. What was there before
                still is.
            CheckpointSaveError: a step is open.
            StallError: it took longer than the watchdog's deadline.
        """
        with self.writing(step, name=name, one_file=one_file, settings=settings) as draft:
            write(draft.path)
        assert draft.checkpoint is not None
        return draft.checkpoint

    @contextmanager
    def writing(
        self,
        step: int,
        *,
        name: str | None = None,
        one_file: bool = False,
        settings: Mapping[str, Any] | None = None,
    ) -> Iterator[Draft]:
        """The form of `save` for a framework that writes by itself: into `draft.path`, in the body of `with`.

        The folder above `draft.path` is temporary, too, and the last part of `draft.path` is the name, so a
        framework that puts names together itself can be given `draft.path.parent`. An exception in the body
        discards the draft. After the body, `draft.checkpoint` is what became of it.
        """
        refuse_inside_step(step)
        called = _checked(name if name is not None else f"{self.prefix}{step}")

        def describe(files: Mapping[str, FileRecord]) -> Manifest:
            return self.manifest(step, files, settings)

        doing = f"checkpoint {called!r} was not saved to {self.root}"
        with self._watchdog.watch(f"the save of checkpoint {called!r}"), self.alone(doing, create=True):
            draft = self._on_first_rank(doing, lambda: self._commit.begin(called, one_file))
            failed: BaseException | None = None
            try:
                yield draft
            except BaseException as error:  # noqa: BLE001 (raised again, once the other ranks know)
                failed = error
            self._fail_together(doing, draft, failed)
            if self.group.size > 1:
                # What another machine has not sent yet, the first rank cannot flush. Not before all have written: files
                # of another rank may get other names until then.
                try:
                    make_durable(self.storage, str(draft.path))
                except OSError as error:
                    failed = error
                self._fail_together(doing, draft, failed)
            draft.checkpoint = self._on_first_rank(doing, lambda: self._finish(draft, describe))

    def _fail_together(self, doing: str, draft: Draft, failed: BaseException | None) -> None:
        """Discards a draft and raises on all ranks, if one of them has failed.

        Args:
            doing: in words, for messages.
            draft: of the checkpoint.
            failed: the error of this rank, if it has one.
        """
        said = cause(failed, draft.path.parent) if failed is not None and is_failed_write(failed) else None
        reasons = self.group.gather(None if failed is None else said or f"{type(failed).__name__}: {failed}")
        if any(reason is not None for reason in reasons):
            message = None if said is None else self._told(doing, said, draft)
            self._discard(draft)
            if message is not None:
                raise CheckpointWriteError(message) from failed
            if failed is not None:
                raise failed
            told = "; ".join(f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason is not None)
            raise CheckpointWriteError(f"{doing}: {told}")

    def manifest(
        self, step: int, files: Mapping[str, FileRecord], settings: Mapping[str, Any] | None = None
    ) -> Manifest:
        """The manifest of a checkpoint that this run takes now."""
        return Manifest(
            step=step,
            created=datetime.now(UTC).isoformat(timespec="milliseconds"),
            world={"processes": self.group.size, "devices": self._devices},
            versions=versions(self._distributions),
            settings=settings if settings is not None else {},
            files=files,
        )

    def _finish(self, draft: Draft, describe: Callable[[Mapping[str, FileRecord]], Manifest]) -> Checkpoint:
        with ExitStack() as undo:
            undo.callback(self._discard, draft)
            try:
                checkpoint = draft.checkpoint = self._commit.finish(draft, describe)
            except (OSError, CheckpointError) as error:
                doing = f"checkpoint {draft.name!r} was not saved to {self.root}"
                raise CheckpointWriteError(self._told(doing, str(error), draft)) from error
            undo.pop_all()
        try:
            self._commit.discard(draft)
            self._rotate(self._keep_last, self._keep_every, self._protected, valid=checkpoint)
        except OSError as error:
            warnings.warn(
                f"{checkpoint.path} is saved, but what it replaces is not all removed: {error}",
                CheckpointWarning,
                stacklevel=2,
            )
        return checkpoint

    def _told(self, doing: str, said: str, draft: Draft) -> str:
        """The message of a failed save, before its draft is discarded."""
        there: list[str] = []
        with contextlib.suppress(OSError):
            there = [checkpoint.name for checkpoint in self.checkpoints()]
        return "; ".join(filter(None, (f"{doing}: {said}", room(said, self.root, draft.path), kept(there))))

    def _discard(self, draft: Draft) -> None:
        if self.group.rank == 0:
            # A storage that refuses this too is left with what `recover` will find.
            with contextlib.suppress(OSError):
                self._commit.discard(draft)

    # ---- finding ---------------------------------------------------------------------------------

    def found(self) -> list[Found]:
        """All that is a checkpoint or should be, by step; files are not looked at."""
        return find(self.storage, self.root, self.prefix)

    def checkpoints(self) -> list[Checkpoint]:
        """Those with a readable manifest, by step; files are not looked at."""
        return [found.checkpoint for found in self.found() if found.checkpoint is not None]

    def newest_valid(self) -> Checkpoint | None:
        """The checkpoint to resume from: that of the highest step whose files are all what was written.

        Newer ones that are damaged get a name that begins with `_damaged-`, and a `CheckpointWarning` says what is
        wrong with them; where nothing can be renamed they are passed over. All ranks get the same answer.
        """
        return self._on_first_rank(f"no checkpoint was looked for in {self.root}", self._newest_valid)

    def _newest_valid(self) -> Checkpoint | None:
        with ExitStack() as stack:
            # A folder that may only be read, or that is not there yet, is not tidied.
            with contextlib.suppress(OSError):
                self._enter(stack)
            for found in reversed(self.found()):
                checked = self._check(found)
                if not checked.problems:
                    return checked.checkpoint
                if checked.is_sealed:
                    set_aside(self.storage, self.root, checked)
                else:
                    warn_of(join(self.root, found.name), "is passed over", checked)
        return None

    def each_valid(self) -> Iterator[Checkpoint]:
        """Those whose files are all what was written, newest first; a warning names each that is passed over.

        Nothing is renamed: for names that somebody else looks for, too.
        """
        for found in reversed(self.found()):
            checked = self._check(found)
            if checked.checkpoint is not None and not checked.problems:
                yield checked.checkpoint
            else:
                warn_of(join(self.root, found.name), "is passed over", checked)

    def load(self, which: int | str | os.PathLike[str]) -> Checkpoint:
        """The checkpoint that was asked for, checked.

        Args:
            which: a step, a name in the folder, or a path.

        Raises:
            CheckpointNotFoundError: there is none.
            CheckpointDamagedError: it is not what was written, or nobody can tell, for it has no manifest.
        """
        return self._on_first_rank(f"{which} was not loaded", lambda: self._load(which))

    def _load(self, which: int | str | os.PathLike[str]) -> Checkpoint:
        name = f"{self.prefix}{which}" if isinstance(which, int) else os.fspath(which).rstrip("/")
        path = name if "/" in name else join(self.root, name)
        entry = self.storage.entry(path)
        if entry is None:
            there = ", ".join(checkpoint.name for checkpoint in self.checkpoints()) or "none"
            raise CheckpointNotFoundError(f"{path}: there is no such checkpoint; there are: {there}")
        checked = self._check(look_at(self.storage, self.root, path, entry))
        if checked.problems or checked.checkpoint is None:
            raise CheckpointDamagedError(f"{path}: {'; '.join(checked.problems)}")
        return checked.checkpoint

    def _check(self, found: Found) -> Found:
        return check(self.storage, found, trust_files=self._trust_files)

    @contextmanager
    def local(self, checkpoint: Checkpoint) -> Iterator[Path]:
        """A checkpoint as files of this machine: itself, or a copy for the time of a `with` block.

        Raises:
            CheckpointDamagedError: what arrived here is not what was written.
        """
        if self.storage.can_rename:
            yield Path(checkpoint.path)
            return
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / checkpoint.name
            for name in checkpoint.manifest.files:
                file = target if name == ONE_FILE else target / name
                file.parent.mkdir(parents=True, exist_ok=True)
                self.storage.download(checkpoint.path if name == ONE_FILE else join(checkpoint.path, name), file)
            wrong = problems(LocalStorage(), str(target), checkpoint.manifest)
            if wrong and not self._trust_files:
                raise CheckpointDamagedError(f"{checkpoint.path} did not arrive as it was written: {'; '.join(wrong)}")
            yield target

    # ---- removing --------------------------------------------------------------------------------

    def rotate(
        self, *, keep_last: int | None, keep_every: int | None = None, protected: Collection[str] = ()
    ) -> list[str]:
        """Removes checkpoints (see `rotation.superfluous`); nothing if none is valid.

        Args:
            keep_last, keep_every: see `CheckpointConfig`.
            protected: names that stay, those a framework calls the best, say.

        Returns: the names of those removed.

        Raises:
            CheckpointWriteError: the storage refuses.
        """

        def rotate() -> list[str]:
            newest = self._newest_valid()
            return [] if newest is None else self._rotate(keep_last, keep_every, protected, valid=newest)

        doing = f"checkpoints were not removed from {self.root}"
        with self.alone(doing):
            return self._on_first_rank(doing, rotate)

    def _rotate(
        self, keep_last: int | None, keep_every: int | None, protected: Collection[str], *, valid: Checkpoint
    ) -> list[str]:
        others = [checkpoint for checkpoint in self.checkpoints() if checkpoint.name != valid.name]
        removed = superfluous([*others, valid], keep_last=keep_last, keep_every=keep_every, protected=protected)
        for checkpoint in removed:
            remove_checkpoint(self.storage, self.root, checkpoint.name)
        return [checkpoint.name for checkpoint in removed]

    def remove(self, name: str) -> None:
        """Removes a checkpoint, unless no other one is valid.

        Raises:
            CheckpointNotFoundError: there is none of this name.
            CheckpointWriteError: it is the only valid one, or the storage refuses.
        """

        def remove() -> None:
            if self.storage.entry(join(self.root, name)) is None:
                raise CheckpointNotFoundError(f"{join(self.root, name)}: there is no such checkpoint")
            others = [found for found in reversed(self.found()) if found.name != name]
            if all(self._check(other).problems for other in others):
                raise CheckpointWriteError(f"{join(self.root, name)} stays: no other checkpoint in the folder is valid")
            remove_checkpoint(self.storage, self.root, name)

        doing = f"checkpoint {name!r} was not removed from {self.root}"
        with self.alone(doing):
            self._on_first_rank(doing, remove)

    # ---- one at a time ---------------------------------------------------------------------------

    def recover(self) -> None:
        """Completes or removes what a process that is no more has left behind. Every save does so first.

        Raises:
            CheckpointWriteError: the storage refuses.
        """
        with self.alone(f"{self.root} was not tidied"):
            pass

    @contextmanager
    def alone(self, doing: str, *, create: bool = False) -> Iterator[None]:
        """Nobody else changes the folder meanwhile, and nothing in it is half done. May be nested.

        Args:
            doing: begins the message of an error.
            create: whether to make the folder if it does not exist.

        Raises:
            CheckpointWriteError: the storage refuses.
        """
        with self._lock, ExitStack() as stack:
            self._on_first_rank(doing, lambda: self._enter(stack, create=create))
            yield

    def _enter(self, stack: ExitStack, *, create: bool = False) -> None:
        """Holds the folder until `stack` is closed; what a dead process left half done is completed before.

        For code that runs on the first rank alone.

        Raises:
            OSError: the storage refuses.
        """
        stack.enter_context(self._lock)
        if self._depth == 0:
            if create:
                self._make(self.root)
            stack.enter_context(self.storage.locked(self.root))
            self._commit.recover()
        self._depth += 1
        stack.callback(self._leave)

    def _leave(self) -> None:
        self._depth -= 1

    def _make(self, path: str) -> None:
        if self.storage.entry(path) is None:
            parent = path.rpartition("/")[0] or "/"
            self._make(parent)
            self.storage.make_folder(path)
            self.storage.fsync_folder(parent)

    def _on_first_rank(self, doing: str, action: Callable[[], _Result]) -> _Result:
        """Runs an action on the first rank, which acts for all. All ranks call this, and return or raise what it did.

        Args:
            doing: begins the message of an error of the storage.
            action: returns a value that can be sent to the other ranks.

        Raises:
            CheckpointWriteError: the storage refuses.
            CheckpointError: (on the other ranks) the action raised on the first rank.
        """
        result: Any = None
        failed: BaseException | None = None
        if self.group.rank == 0:
            try:
                result = action()
            except BaseException as error:  # noqa: BLE001 (raised again, once the other ranks know)
                failed = error
        told, result = self.group.gather((None if failed is None else str(failed), result))[0]
        if isinstance(failed, OSError) and not isinstance(failed, CheckpointError):
            hint = room(str(failed), self.root)
            raise CheckpointWriteError(f"{doing}: {failed}{f'; {hint}' if hint else ''}") from failed
        if failed is not None:
            raise failed
        if told is not None:
            raise CheckpointError(f"rank 0: {told}")
        first: _Result = result
        return first


def refuse_inside_step(step: int) -> None:
    """Raises if a step is open in this thread.

    Raises:
        CheckpointSaveError: it is.
    """
    if in_step():
        raise CheckpointSaveError(
            f"a checkpoint of step {step} was to be saved inside a step, which is not executed yet: save it after"
        )


def _checked(name: str) -> str:
    if not name or "/" in name or name.startswith((".", "_")) or name == "replaced":
        raise ConfigError(f"{name!r} cannot be the name of a checkpoint: no '/', no '.' or '_' at its beginning")
    return name


def superfluous(
    checkpoints: Sequence[Checkpoint],
    *,
    keep_last: int | None,
    keep_every: int | None = None,
    protected: Collection[str] = (),
) -> list[Checkpoint]:
    """The checkpoints that can be deleted.

    Args:
        checkpoints: oldest first; the last one must be valid, and is always kept.
        keep_last: how many of the newest to keep; `None` keeps all.
        keep_every: keep those whose step is a multiple of this.
        protected: names to keep.
    """
    if keep_last is None:
        return []
    older = checkpoints[: -max(1, keep_last)]
    return [
        checkpoint
        for checkpoint in older
        if checkpoint.name not in protected and (keep_every is None or checkpoint.step % keep_every != 0)
    ]
