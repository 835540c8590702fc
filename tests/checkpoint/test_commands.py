"""The command `xla-adapters checkpoint`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import checkpoint as dcp

from tests.crash.storages import Quick, Watched, WithoutExchange
from tests.isolation import isolated, outcome_of
from xla_adapters.checkpoint import CheckpointStore
from xla_adapters.cli import main


def fill(root: Path, *steps: int) -> CheckpointStore:
    store = CheckpointStore(root, storage=Quick())
    for step in steps:
        store.save(step, lambda folder: (folder / "weights").write_text("w" * 2000) and None)
    return store


def test_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path, 5, 10)
    (tmp_path / "checkpoint-11").mkdir()
    (tmp_path / "_damaged-checkpoint-3").mkdir()
    (tmp_path / "_tmp-00000000").mkdir()
    assert main(["checkpoint", "list", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["NAME", "STEP", "CREATED", "FILES", "SIZE"]
    assert [line.split()[:2] for line in lines[1:4]] == [
        ["checkpoint-5", "5"],
        ["checkpoint-10", "10"],
        ["checkpoint-11", "11"],
    ]
    assert lines[1].endswith("1      2.0 KiB")
    assert lines[3].endswith("it has no manifest (xla_adapters.manifest.json)")
    assert lines[4] == "_damaged-checkpoint-3: set aside"
    assert lines[5].startswith("_tmp-00000000: of a save that is running")


def test_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path, 5, 10)
    assert main(["checkpoint", "verify", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "checkpoint-5: ok\ncheckpoint-10: ok\n"
    (tmp_path / "checkpoint-5" / "weights").write_text("v" * 2000)
    assert main(["checkpoint", "verify", str(tmp_path)]) == 1
    assert "checkpoint-5: NOT OK: weights is not what was written" in capsys.readouterr().out
    assert main(["checkpoint", "verify", str(tmp_path / "checkpoint-10")]) == 0
    assert main(["checkpoint", "verify", str(tmp_path / "checkpoint-5")]) == 1
    assert main(["checkpoint", "verify", str(tmp_path / "nowhere")]) == 2
    assert "there is no such folder" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["checkpoint", "verify", str(tmp_path / "empty")]) == 1


def test_repair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path, 5, 10, 15)
    (tmp_path / "checkpoint-10" / "weights").unlink()
    # Somebody set it aside for a reason that is no more.
    (tmp_path / "checkpoint-15").rename(tmp_path / "_damaged-checkpoint-15-0123abcd")
    (tmp_path / "_tmp-00000000").mkdir()
    assert main(["checkpoint", "repair", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "removed _tmp-00000000, which was never finished",
        "set checkpoint-10 aside as _damaged-checkpoint-10",
        "put checkpoint-15 back, whose files are all right",
    ]
    assert main(["checkpoint", "repair", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "nothing to do\n"


def test_repair_completes_an_interrupted_swap(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Between the two renames of a file system that cannot exchange."""
    fill(tmp_path, 5)

    def child() -> None:
        def die(name: str, arguments: tuple[object, ...]) -> None:
            if name == "rename" and not (tmp_path / "checkpoint-5").exists():
                os.kill(os.getpid(), signal.SIGKILL)

        store = CheckpointStore(tmp_path, storage=Watched(WithoutExchange(), die))  # type: ignore[arg-type]
        store.save(5, lambda folder: (folder / "weights").write_text("new") and None)

    outcome = outcome_of(child)
    assert outcome.error == "the process died with signal 9"
    assert not list(tmp_path.glob("checkpoint-*"))
    assert main(["checkpoint", "repair", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "completed checkpoint-5"
    assert (tmp_path / "checkpoint-5" / "weights").read_text() == "new"


def test_adopt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "checkpoint-7").mkdir()
    (tmp_path / "checkpoint-7" / "weights").write_text("theirs")
    (tmp_path / "mine").mkdir()
    assert main(["checkpoint", "repair", str(tmp_path), "--adopt", "checkpoint-7"]) == 0
    assert capsys.readouterr().out == "adopted checkpoint-7 as step 7\n"
    assert main(["checkpoint", "verify", str(tmp_path)]) == 0
    assert main(["checkpoint", "repair", str(tmp_path), "--adopt", "mine"]) == 2
    assert "say --step" in capsys.readouterr().err
    assert main(["checkpoint", "repair", str(tmp_path), "--adopt", "mine", "--step", "9"]) == 0
    assert CheckpointStore(tmp_path).load("mine").step == 9
    assert main(["checkpoint", "repair", str(tmp_path), "--adopt", "nowhere"]) == 2


@isolated
def test_consolidate(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    state = {"model": {"weight": torch.arange(12.0).view(3, 4)}, "step": 3}

    def write(folder: Path) -> None:
        dcp.save(state, checkpoint_id=folder / "sharded", no_dist=True)

    path = CheckpointStore(tmp_path).save(3, write).path
    for target in ("all.pt", "weights"):
        assert main(["checkpoint", "consolidate", path, str(tmp_path / target)]) == 0
    assert torch.equal(load_file(tmp_path / "weights" / "model.safetensors")["weight"], state["model"]["weight"])
    assert torch.load(tmp_path / "all.pt")["step"] == 3
    assert main(["checkpoint", "consolidate", path, str(tmp_path / "weights.xyz")]) == 2
    assert main(["checkpoint", "consolidate", str(tmp_path), str(tmp_path / "a.pt")]) == 0
    shards = next((Path(path) / "sharded").glob("*.distcp"))
    shards.write_bytes(shards.read_bytes()[:-3])
    assert main(["checkpoint", "consolidate", path, str(tmp_path / "b.pt")]) == 2
    assert "sharded/__0_0.distcp has" in capfd.readouterr().err
    assert not (tmp_path / "b.pt").exists()


def test_checkpoints_are_listed_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys, xla_adapters, xla_adapters.cli; xla_adapters.__version__; "
        f"xla_adapters.cli.main(['checkpoint', 'list', {str(tmp_path)!r}]); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=120, env={"PYTHONPATH": ":".join(sys.path)})
    assert done.returncode == 0
