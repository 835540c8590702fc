"""Several processes save one checkpoint together."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch.distributed

from tests.isolation import run_in_child
from xla_adapters.checkpoint import CheckpointStore, TorchGroup
from xla_adapters.errors import CheckpointDamagedError, CheckpointError, CheckpointWriteError, ConfigError


def _rank(rank: int, folder: Path) -> list[str]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    root, said = folder / "run", []
    store = CheckpointStore(root, keep_last=2, group=TorchGroup())

    def write(path: Path) -> None:
        (path / f"rank-{rank}").write_text(str(rank))

    for step in (1, 2, 2, 3):
        said.append(store.save(step, write).name)

    def fail(path: Path) -> None:
        write(path)
        if rank == 1:
            raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointWriteError) as failed:
        store.save(4, fail)
    said.append(str(failed.value))
    if rank == 0:
        (root / "checkpoint-3" / "rank-1").unlink()
    said += [f"{found.name}" if (found := store.newest_valid()) else "none"]
    with pytest.raises(CheckpointError) as missing:
        store.load(3)
    said.append(str(missing.value))
    (root / "checkpoint-2" / "rank-0").write_text("9") if rank == 0 else None
    with pytest.raises((CheckpointDamagedError, CheckpointError)) as damaged:
        store.load(2)
    said.append(str(damaged.value))
    torch.distributed.destroy_process_group()
    return said


def test_two_processes(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda rank: run_in_child(partial(_rank, rank, tmp_path)), range(2))
    for said in (first, second):
        assert said[:4] == ["checkpoint-1", "checkpoint-2", "checkpoint-2", "checkpoint-3"]
        assert "No space left on device" in said[4]
        assert said[5] == "checkpoint-2"
        assert "there is no such checkpoint" in said[6]
        assert "rank-0 is not what was written" in said[7]
    assert "rank 1: [Errno 28]" in first[4]
    root = tmp_path / "run"
    assert sorted(path.name for path in root.iterdir()) == ["_damaged-checkpoint-3", "checkpoint-2"]
    assert {path.name for path in (root / "checkpoint-2").iterdir()} >= {"rank-0", "rank-1"}


def test_several_processes_and_an_object_store() -> None:
    class Two:
        rank, size = 0, 2

        def gather(self, value: object) -> list[object]:
            return [value, value]

    with pytest.raises(ConfigError, match="file system they share"):
        CheckpointStore("memory://x", group=Two())
