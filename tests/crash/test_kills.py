"""Processes that are killed: before every change of the storage, and at random moments of a training."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from benchmarks import crash
from tests.crash import history, kills
from tests.crash.history import Form
from tests.crash.killed_trainings import OURS, RUNS
from tests.crash.storages import Operation, Quick, WithoutExchange, dying, recording
from tests.isolation import outcome_of
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

        outcome = outcome_of(child)
        assert outcome.error == "the process died with signal 9", f"{number}: {log[number]}: {outcome.error}"
        saved = int(progress.read_text()) if progress.exists() else 0
        try:
            history.check(form, root, saved, _storage(kind))
        except AssertionError as error:
            raise AssertionError(f"killed before change {number}, {log[number]}: {error}") from error


def test_every_change_goes_through_the_storage() -> None:
    """Else a kill between two of them would not be tried."""
    changing = {
        "mkdir",
        "makedirs",
        "unlink",
        "rename",
        "rmdir",
        "rmtree",
        "write_text",
        "write_bytes",
        "fsync",
        "open",
    }
    behind_it = {"storage.py", "object_storage.py"}
    found = set()
    for path in Path(storage_module.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if path.name in behind_it or not isinstance(node, ast.Call):
                continue
            owner, _, called = ast.unparse(node.func).rpartition(".")
            moves = called == "replace" and (owner == "os" or (len(node.args) == 1 and not node.keywords))
            if (called in changing or moves) and not owner.lower().endswith("storage"):
                found.add((path.name, called))
    # Drafts for object stores and copies out of them lie in folders of this machine, where nobody looks for them.
    assert found == {("commit.py", "mkdir"), ("commit.py", "rmtree"), ("store.py", "mkdir")}


IN_SHORT = {
    "hf_trainer, async": None,
    "XLAEagerStrategy, async": None,
    "hf_trainer, fsdp, in parts": "0.5",
    "XLAEagerStrategy, fsdp, in parts": "0.5",
}


_DEFAULT = "hf_trainer, async"


@pytest.mark.parametrize(
    "name", [_DEFAULT, *(pytest.param(name, marks=pytest.mark.long) for name in IN_SHORT if name != _DEFAULT)]
)
def test_a_kill_and_a_few_bits(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, grace = tmp_path / "crash.json", IN_SHORT[name]
    command = ["--kills", "1", "--bits", "4", "--seed", "1", "--runs", name, "--json", str(path), "--check"]
    assert crash.main([*command, *(["--grace", grace] if grace else [])]) == 0
    (row,) = json.loads(path.read_text())["results"]["rows"]
    assert (row["kills"], row["identical"], row["bits"], row["caught"]) == (1, 1, 4, 4)
    assert name in capsys.readouterr().out


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long if name.startswith("hf_trainer") else pytest.mark.slow)
        for name in OURS
    ],
)
def test_two_kills(name: str, tmp_path: Path) -> None:
    """Of each way to save; `benchmarks.crash` kills more often."""
    result = kills.kill(name, 2, 3, tmp_path)
    assert (result.kills, result.resumed, result.identical, result.errors) == (2, 2, 2, [])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long if name.startswith("XLAEagerStrategy") else pytest.mark.slow)
        for name in OURS
        if "parts" in name or "async" in name
    ],
)
def test_terminated_and_killed_after_a_grace_period(name: str, tmp_path: Path) -> None:
    result = kills.kill(name, 2, 4, tmp_path, 1.0)
    assert (result.kills, result.resumed, result.identical, result.errors) == (2, 2, 2, [])


def test_a_peer_does_not_notice_bits(tmp_path: Path) -> None:
    """If that were not counted, nothing would be."""
    name = "Lightning's Trainer"
    kills.whole(RUNS[name], tmp_path)
    caught, silent = kills.flip(name, 6, 1, tmp_path)
    assert caught + len(silent) == 6
    assert silent
