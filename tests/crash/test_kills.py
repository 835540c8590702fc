"""The process is killed before every single change of the storage, for real."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from benchmarks.children import run_in_child
from tests.crash import history
from tests.crash.history import Form
from tests.crash.storages import Operation, Quick, WithoutExchange, dying, recording
from xla_adapters.checkpoint import storage as storage_module
from xla_adapters.checkpoint.storage import Storage

FORMS: dict[str, tuple[Form, type[Storage] | None]] = {
    "folders": (Form(), Quick),
    "folders, no exchange": (Form(), WithoutExchange),
    "one file": (Form(one_file=True), Quick),
    "objects": (Form(objects=True), None),
}


def _storage(kind: type[Storage] | None) -> Storage:
    storage: Storage = kind() if kind is not None else history.object_storage()
    return storage


@pytest.mark.parametrize("torn", [False, True], ids=["between", "within"])
@pytest.mark.parametrize("name", FORMS)
def test_killed_before_every_change(name: str, torn: bool, tmp_path: Path) -> None:
    form, kind = FORMS[name]
    log: list[Operation] = []
    history.run(form, tmp_path / "recorded", recording(_storage(kind), log), lambda saved: None)
    assert {"exchange", "rename"} & {operation for operation, _ in log} or form.objects
    wanted = range(len(log)) if not torn else [n for n, (op, _) in enumerate(log) if op in ("write", "upload")]
    assert len(wanted) > 10
    for number in wanted:
        root, progress = tmp_path / f"run-{number}", tmp_path / f"saved-{number}"

        def child(root: Path = root, progress: Path = progress, number: int = number) -> None:
            storage = dying(_storage(kind), number, torn=torn)
            history.run(form, root, storage, lambda done: progress.write_text(str(done)) and None)

        outcome = run_in_child(child, timeout=60)
        assert outcome.error == "the process died with signal 9", f"{number}: {log[number]}: {outcome.error}"
        saved = int(progress.read_text()) if progress.exists() else 0
        try:
            history.check(form, root, saved, _storage(kind))
        except AssertionError as error:
            raise AssertionError(f"killed before change {number}, {log[number]}: {error}") from error


def test_every_change_goes_through_the_storage() -> None:
    """Else a kill between two of them would not be tried."""
    folder = Path(storage_module.__file__).parent
    changing = {"mkdir", "makedirs", "unlink", "rename", "replace", "rmdir", "write_text", "write_bytes", "fsync"}
    behind_it = {"storage.py", "object_storage.py"}
    # `MarkerCommit` writes its drafts to a folder of this machine, which is no storage.
    local_drafts = {("commit.py", "mkdir"), ("commit.py", "rmtree")}
    found = set()
    for path in folder.glob("*.py"):
        if path.name in behind_it:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, (ast.Attribute, ast.Name)):
                called = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
                owner = node.func.value if isinstance(node.func, ast.Attribute) else None
                through = "storage" in ast.dump(owner) if owner is not None else False
                if called in {*changing, "open", "rmtree"} and not through and not _is_dataclass_replace(node):
                    found.add((path.name, called))
    assert found - local_drafts == ALLOWED


def _is_dataclass_replace(node: ast.Call) -> bool:
    called = ast.unparse(node.func)
    return called in ("replace", "dataclasses.replace")


# Nothing else writes to a disk.
ALLOWED: set[tuple[str, str]] = set()
