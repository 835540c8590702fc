"""Pickled files are read as plain values; what would run code is refused before anything runs."""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import io
import pickle
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from transformers.trainer_pt_utils import safe_globals

from tests.planted import plants, saved
from xla_adapters.cli import main
from xla_adapters.errors import CheckpointUnsafeError
from xla_adapters.sharding.state.loading import load_state, load_whole, read_metadata
from xla_adapters.utils.unpickling import load_values, only_values, unpickle

pytestmark = pytest.mark.isolated


def importable(folder: Path) -> None:
    """Imports find what is planted in a folder."""
    sys.path.insert(0, str(folder))


def test_what_is_planted_runs_when_anybody_reads_it(tmp_path: Path) -> None:
    """Else the tests below would show nothing."""
    importable(tmp_path)
    for name, data in plants(tmp_path / "ran").items():
        (tmp_path / "ran").unlink(missing_ok=True)
        sys.modules.pop("planted_module", None)
        torch.load(io.BytesIO(data), weights_only=False) if "torch.save" in name else pickle.loads(data)
        assert (tmp_path / "ran").exists(), name


def test_what_is_planted_is_refused_with_its_name(tmp_path: Path) -> None:
    importable(tmp_path)
    for name, data in plants(tmp_path / "ran").items():
        file = tmp_path / "state.pt"
        file.write_bytes(data)
        with pytest.raises(CheckpointUnsafeError, match=r"state\.pt .*nothing of it was run; if you trust") as raised:
            load_values(file)
        # Files without zip begin with a pickle of a number.
        with contextlib.suppress(CheckpointUnsafeError), file.open("rb") as stream:
            assert type(unpickle(stream, {"torch.float32": torch.float32}, file)) is int
        assert not (tmp_path / "ran").exists(), name
        if name.startswith("torch.save"):
            assert any(named in str(raised.value) for named in ("posix.system", "eval", "planted_module.value"))


def test_attributes_of_an_allowed_class_are_not_set() -> None:
    allowed = {"torch.distributed.checkpoint.metadata.StorageMeta": dcp.metadata.StorageMeta}
    data = b"ctorch.distributed.checkpoint.metadata\nStorageMeta\n(N}S'checkpoint_id'\nI1\nstb."
    before = dcp.metadata.StorageMeta.checkpoint_id
    with pytest.raises(CheckpointUnsafeError, match="sets attributes of a class"):
        unpickle(io.BytesIO(data), allowed, "file")
    assert dcp.metadata.StorageMeta.checkpoint_id is before
    pickle.loads(data)
    assert dcp.metadata.StorageMeta.checkpoint_id == 1  # type: ignore[comparison-overlap]


def test_what_trainings_save_is_read(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    values = {
        "arrays": [np.arange(6.0).reshape(2, 3), np.array([True]), np.zeros(0, np.int8)],
        "numbers": [np.float64(0.1), np.int64(3), np.float32(2), 1 + 2j, 10**30, None, True, b"bytes"],
        "random": (np.random.get_state(), np.random.get_state(legacy=False), generator.bit_generator.state),
        "tensors": [
            torch.ones(2, dtype=torch.bfloat16),
            torch.nn.Parameter(torch.zeros(3)),
            torch.Size([2]),
            torch.int8,
        ],
        "groups": [{"lr": np.float64(1e-3), "betas": (0.9, 0.999), "params": [0, 1], "foreach": None}],
        "containers": [{1, 2}, frozenset("a"), collections.OrderedDict(a=1), collections.Counter("aab"), range(3)],
        "options": argparse.Namespace(path=Path("a/b"), since=datetime.timedelta(seconds=3)),
        "at": datetime.datetime(2024, 1, 2, 3),
        "slice": slice(1, 2),
    }
    torch.save(values, tmp_path / "state.pt")
    with (tmp_path / "state.pt").open("rb") as stream:
        for found in (load_values(tmp_path / "state.pt"), load_values(stream, "state")):
            assert repr(found) == repr(values)
            np.random.set_state(found["random"][0])


def test_arrays_of_another_machine_and_an_older_numpy() -> None:
    assert load_values(io.BytesIO(saved(np.arange(3, dtype=">i4"))), "other").tolist() == [0, 1, 2]
    data = saved(np.arange(3), _use_new_zipfile_serialization=False)
    old = data.replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")
    assert old != data
    assert load_values(io.BytesIO(old), "old").tolist() == [0, 1, 2]


class Forged:
    """Pickles an array of numbers that says that they are objects."""

    def __init__(self, **changed: Any) -> None:
        self._changed = changed

    def __reduce__(self) -> Any:
        make, arguments, state = np.zeros(2).__reduce__()
        return make, arguments, (*state[:2], _ForgedDtype(**self._changed), *state[3:])


class _ForgedDtype(Forged):
    def __reduce__(self) -> Any:
        make, arguments, state = np.dtype("f8").__reduce__()
        place = {"subdtype": 2, "names": 3, "fields": 4, "flags": 7}
        changed = list(state)
        for name, value in self._changed.items():
            changed[place[name]] = value
        return make, arguments, tuple(changed)


class _Objects:
    """Pickles the dtype of objects."""

    def __reduce__(self) -> Any:
        return np.dtype, ("O",)


@pytest.mark.parametrize(
    "changed",
    [
        {"names": ("a",), "fields": {"a": (_Objects(), 0)}},
        {"subdtype": (_Objects(), (1,))},
        {"flags": 63},
    ],
)
def test_an_array_whose_numbers_would_be_addresses(changed: dict[str, Any]) -> None:
    assert type(pickle.loads(pickle.dumps(Forged()))) is np.ndarray
    for value in (Forged(**changed), {"a": [(1, argparse.Namespace(b={2: Forged(**changed)}))]}):
        with pytest.raises(CheckpointUnsafeError, match=r"file holds .*\((it has an array that|object pickle)"):
            load_values(io.BytesIO(saved(value)), "file")
    # transformers allows the same where it reads random states.
    with safe_globals(), pytest.raises(CheckpointUnsafeError), only_values("file"):
        torch.load(io.BytesIO(saved(Forged(**changed))), weights_only=True)


class Own:
    """A class of the user's."""

    def __init__(self) -> None:
        self.value = 3


def test_what_the_user_allowed_is_read_and_stays_allowed() -> None:
    data = saved(Own())
    with pytest.raises(CheckpointUnsafeError, match=r"names tests\.utils\.test_unpickling\.Own"):
        load_values(io.BytesIO(data), "own")
    assert load_values(io.BytesIO(data), "own", weights_only=False).value == 3
    torch.serialization.add_safe_globals([Own, np.ndarray])
    allowed = set(torch.serialization.get_safe_globals())
    assert load_values(io.BytesIO(data), "own").value == 3
    assert set(torch.serialization.get_safe_globals()) == allowed >= {Own, np.ndarray}


def test_threads_read_at_once() -> None:
    data, failed = saved([np.arange(3)] * 50), list[Exception]()

    def read() -> None:
        try:
            for _ in range(30):
                load_values(io.BytesIO(data), "arrays")
        except CheckpointUnsafeError as error:
            failed.append(error)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


# ---- sharded checkpoints ----------------------------------------------------------------------------


def sharded(folder: Path) -> dict[str, Any]:
    """Saves a state by torch.distributed.checkpoint."""
    state = {
        "model": {"weight": torch.arange(12.0).view(3, 4), "half": torch.ones(2, dtype=torch.bfloat16)},
        "random": np.random.get_state(legacy=False),
        "path": folder,
        "epochs": [1, 2],
    }
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return state


def test_a_sharded_checkpoint_is_read_as_torch_reads_it(tmp_path: Path) -> None:
    state = sharded(tmp_path)
    with (tmp_path / ".metadata").open("rb") as file:
        expected = pickle.load(file)
    found = read_metadata(tmp_path / ".metadata")
    for name in ("state_dict_metadata", "planner_data", "storage_data", "version"):
        assert getattr(found, name) == getattr(expected, name), name
    assert in_order(load_whole(tmp_path)) == in_order(state)


def in_order(state: dict[str, Any]) -> str:
    """A state to compare, whatever the order of its keys."""
    return repr(sorted((key, repr(value)) for key, value in state.items() if key != "random")) + repr(
        sorted((key, repr(value)) for key, value in state["random"]["state"].items())
    )


def test_every_file_of_a_sharded_checkpoint(tmp_path: Path) -> None:
    importable(tmp_path)
    folder, ran = tmp_path / "checkpoint", tmp_path / "ran"
    state = sharded(folder)
    files = sorted(folder.iterdir())
    assert {file.suffix or file.name for file in files} == {".metadata", ".distcp"}
    for file in files:
        intact = file.read_bytes()
        for name, data in plants(ran).items():
            # In the place of the first entry of a file with several.
            file.write_bytes(data if file.name == ".metadata" else data + intact[len(data) :])
            with pytest.raises((CheckpointUnsafeError, RuntimeError, EOFError)) as raised:
                load_whole(folder)
            for target in ("weights", "all.pt"):
                with contextlib.suppress(RuntimeError, EOFError):
                    status = main(["checkpoint", "consolidate", str(folder), str(tmp_path / target)])
                    assert file.name != ".metadata" or status == 2
            assert file.name != ".metadata" or raised.type is CheckpointUnsafeError
            assert not ran.exists(), (file.name, name)
        file.write_bytes(intact)
    assert in_order(load_whole(folder)) == in_order(state)


def test_objects_of_a_sharded_checkpoint(tmp_path: Path) -> None:
    """Entries that are not tensors, as `dcp.save` writes them."""
    from tests.planted import touching

    dcp.save(
        {"model": {"w": torch.ones(2)}, "more": [touching(tmp_path / "ran")]},
        checkpoint_id=tmp_path / "a",
        no_dist=True,
    )
    with pytest.raises(CheckpointUnsafeError, match=r"names posix\.system"):
        load_whole(tmp_path / "a")
    with pytest.raises(CheckpointUnsafeError, match=r"names posix\.system"):
        load_state({"more": [None]}, tmp_path / "a")
    assert main(["checkpoint", "consolidate", str(tmp_path / "a"), str(tmp_path / "all.pt")]) == 2
    # The weights alone do not need it.
    assert main(["checkpoint", "consolidate", str(tmp_path / "a"), str(tmp_path / "weights")]) == 0
    assert not (tmp_path / "ran").exists()


def test_commands_that_look_at_checkpoints_read_no_pickle(tmp_path: Path) -> None:
    importable(tmp_path)
    ran = tmp_path / "ran"
    for number, data in enumerate(plants(ran).values()):
        folder = tmp_path / "run" / f"checkpoint-{number}"
        folder.mkdir(parents=True)
        for name in ("optimizer.pt", "training_args.bin", ".metadata", "model.safetensors", "trainer_state.json"):
            (folder / name).write_bytes(data)
        (tmp_path / "run" / f"{number}.ckpt").write_bytes(data)
    run = str(tmp_path / "run")
    for command in ("list", "verify", "repair"):
        main(["checkpoint", command, run])
    assert main(["checkpoint", "repair", run, "--adopt", "checkpoint-1"]) == 0
    assert main(["checkpoint", "verify", run]) == 1
    assert not ran.exists()
