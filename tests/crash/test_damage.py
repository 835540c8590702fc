"""Whatever happens to a file of a checkpoint is seen, and something older is resumed from."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed import checkpoint as dcp

from tests.crash import history
from tests.crash.history import Form
from tests.crash.storages import Quick
from tests.isolation import isolated
from xla_adapters.checkpoint import CheckpointStore, CheckpointWarning, manifest
from xla_adapters.errors import CheckpointDamagedError, CheckpointNotFoundError

FORMS = {"folders": Form(), "one file": Form(one_file=True)}


def flips(data: bytes, every: int = 1) -> Iterator[bytes]:
    """The data with one bit flipped, another one each time."""
    chosen = random.Random(len(data))
    for position in range(0, len(data), every):
        changed = bytearray(data)
        changed[position] ^= 1 << chosen.randrange(8)
        yield bytes(changed)


def two_checkpoints(form: Form, root: Path) -> tuple[CheckpointStore, Path]:
    """A store, and the newer checkpoint in it."""
    store = CheckpointStore(root, storage=Quick())
    form.save(store, 0)
    if form.one_file:
        # Under two names: the older one is what is left.
        (root / "last.ckpt").rename(root / "first.ckpt")
    form.save(store, 1)
    newest = store.newest_valid()
    assert newest is not None
    return store, Path(newest.path)


def files_of(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())


def assert_seen(store: CheckpointStore, newest: Path, file: Path) -> None:
    """The damage is refused when asked for, named when not, and the older checkpoint is what is left."""
    with pytest.raises((CheckpointDamagedError, CheckpointNotFoundError)):
        store.load(newest)
    with pytest.warns(CheckpointWarning) as said:
        older = store.newest_valid()
    assert older is not None
    assert older.step == 1
    text = str(said[0].message)
    assert newest.name in text
    assert file.name in text or "manifest" in text or newest == file
    again = store.newest_valid()
    assert again is not None
    assert again.name == older.name


def every_damage(file: Path) -> Iterator[Callable[[], object]]:
    data = file.read_bytes()
    for changed in flips(data):
        yield lambda changed=changed: file.write_bytes(changed)
    for length in {0, 1, len(data) // 2, len(data) - 1}:
        yield lambda length=length: file.write_bytes(data[:length])
    yield file.unlink


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.filterwarnings("ignore::xla_adapters.checkpoint.CheckpointWarning")
def test_every_bit_flip_truncation_and_loss_is_seen(name: str, tmp_path: Path) -> None:
    form = FORMS[name]
    store, newest = two_checkpoints(form, tmp_path / "run")
    checked = 0
    for file in files_of(newest):
        intact = file.read_bytes()
        for damage in every_damage(file):
            damage()
            found = [item for item in store.found() if item.name == newest.name]
            assert not found or store_check(store, found[0])
            file.write_bytes(intact)
            checked += 1
    assert checked > 600
    assert store.load(newest).step == 2


def store_check(store: CheckpointStore, found: object) -> tuple[str, ...]:
    from xla_adapters.checkpoint.manifest import Found, check

    assert isinstance(found, Found)
    return check(store.storage, found).problems


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("damage", ["flip", "truncate", "delete"])
def test_the_damaged_one_is_named_and_set_aside(name: str, damage: str, tmp_path: Path) -> None:
    form = FORMS[name]
    store, newest = two_checkpoints(form, tmp_path / "run")
    intact = tmp_path / "intact"
    shutil.copytree(tmp_path / "run", intact)
    for file in files_of(newest):
        data = file.read_bytes()
        if damage == "flip":
            file.write_bytes(next(flips(data)))
        elif damage == "truncate":
            file.write_bytes(data[:-1])
        else:
            file.unlink()
        if file == newest and damage == "delete":
            continue
        assert_seen(store, newest, file)
        shutil.rmtree(tmp_path / "run")
        shutil.copytree(intact, tmp_path / "run")


def test_what_somebody_added_is_no_damage(tmp_path: Path) -> None:
    store, newest = two_checkpoints(Form(), tmp_path)
    (newest / "README.md").write_text("mine")
    assert store.load(2).name == newest.name


def test_when_all_are_damaged_nothing_is_resumed_from(tmp_path: Path) -> None:
    store, _ = two_checkpoints(Form(), tmp_path)
    for step in (1, 2):
        (tmp_path / f"checkpoint-{step}" / "weights.bin").unlink()
    with pytest.warns(CheckpointWarning, match="checkpoint-1 is damaged .* weights.bin is missing"):
        assert store.newest_valid() is None
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == [
        "_damaged-checkpoint-1",
        "_damaged-checkpoint-2",
    ]


@isolated
def test_the_formats_of_the_ecosystem(tmp_path: Path) -> None:
    """Their own readers return altered weights for most of these flips, and say nothing."""
    state = {"weight": torch.arange(256.0), "bias": torch.ones(64)}

    def write(folder: Path) -> None:
        save_file(state, folder / "model.safetensors")
        torch.save(state, folder / "model.pt")
        dcp.save(state, checkpoint_id=folder / "sharded", no_dist=True)

    store = CheckpointStore(tmp_path / "run", storage=Quick())
    newest = Path(store.save(7, write).path)
    files = files_of(newest)
    assert {file.suffix for file in files} >= {".safetensors", ".pt", ".distcp", ".metadata", ".json"} - {".metadata"}
    for file in files:
        data = file.read_bytes()
        for changed in flips(data, every=max(1, len(data) // 50)):
            file.write_bytes(changed)
            with pytest.raises(CheckpointDamagedError):
                store.load(7)
        file.write_bytes(data)
    assert store.load(7).step == 7
    one = store.save(8, lambda path: torch.save(state, path), name="last.ckpt", one_file=True)
    assert torch.equal(torch.load(one.path, mmap=True)["weight"], state["weight"])
    assert torch.equal(torch.load(one.path)["bias"], state["bias"])


def test_without_verification_damage_would_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above see it when nobody verifies any more."""
    store, newest = two_checkpoints(Form(), tmp_path / "run")
    (newest / "weights.bin").write_bytes(b"other")
    for module in ("commit", "manifest", "store"):
        monkeypatch.setattr(f"xla_adapters.checkpoint.{module}.problems", lambda *_: [])
    assert manifest.problems(store.storage, str(newest), store.checkpoints()[-1].manifest) == []
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        assert_seen(store, newest, newest / "weights.bin")


def test_number_at_tells_saves_apart(tmp_path: Path) -> None:
    """The check that the crash tests stand on."""
    for form in FORMS.values():
        _, newest = two_checkpoints(form, tmp_path / str(form.one_file))
        assert form.number_at(newest) == 1
        file = newest if form.one_file else newest / "weights.bin"
        file.write_bytes(file.read_bytes().replace(b"B", b"C", 1))
        assert form.number_at(newest) is None
    assert history.content(0) != history.content(1)
