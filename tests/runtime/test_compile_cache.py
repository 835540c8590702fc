"""Programs that one process has compiled are loaded by the next one; whatever is wrong with them, it compiles again."""

from __future__ import annotations

import ctypes
import hashlib
import os
import random
import re
import resource
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import xla_adapters
from tests import children
from tests.isolation import isolated, run_in_child
from tests.private_apis import ROOT
from tests.runtime import xla_messages
from xla_adapters import ConfigError, RuntimeOrderError, UnsupportedOptionError, XLAConfig, get_runtime
from xla_adapters.cli import main
from xla_adapters.cpu import VARIABLE
from xla_adapters.cpu.process_options import LARGEST_PIECE
from xla_adapters.runtime import compile_cache
from xla_adapters.runtime.compile_cache import COMPILE_CACHE, CacheCounts, library

pytestmark = pytest.mark.skipif(library.why_missing() is not None, reason="there was no C compiler at the installation")

_ROOM = Path(compile_cache.__file__).parent
# The folder that is given to `initialize` is used, whatever the environment of the tests says.
_NONE: dict[str, str] = {"XLA_ADAPTERS_CACHE_DIR": ""}


@dataclass(frozen=True)
class Run:
    losses: list[float]
    compiles: int
    loads: int
    eager_compiles: int
    cache: CacheCounts
    warned: list[str]


def train(folder: Path | str | None, *, spmd: bool = False, width: int = 8) -> Run:
    """Five steps, two of them replays."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        xla_adapters.initialize(cache_dir=None if folder is None else str(folder), spmd=spmd)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, width), nn.Dropout(0.5), nn.ReLU(), nn.Linear(width, 1)).to("xla")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if spmd:
            xla_adapters.distribute_module(model, partition_fn="FSDP")
        counted = xla_adapters.CompiledStep(partial(_step, model, optimizer), seed=_seeds())
        losses = [counted(torch.randn(8, 4)).item() for _ in range(5)]
    metrics = get_runtime().counters.metrics()
    ours = [str(item.message) for item in said if "compiled programs are not kept" in str(item.message)]
    cache = get_runtime().counters.compile_cache()
    return Run(losses, metrics.compiles, metrics.loads, metrics.eager_compiles, cache, ours)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def _seeds() -> Callable[[], xla_adapters.StepSeed]:
    steps = iter(range(1000))
    return lambda: xla_adapters.StepSeed(seed=3, step=next(steps))


def in_process(folder: Path | None, env: dict[str, str] | None = None, **options: Any) -> Run:
    """The training in a process of its own."""
    run: Run = run_in_child(partial(train, folder, **options), env={**_NONE, **(env or {})})
    return run


def programs(folder: Path) -> list[Path]:
    """The entries, the largest first: that of the step."""
    return sorted((entry.path for entry in compile_cache.entries(folder)), key=lambda path: -path.stat().st_size)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """A folder that a process has filled, and what it did."""
    folder = tmp_path_factory.mktemp("cache") / "programs"
    return folder, in_process(folder)


@pytest.fixture
def folder(filled: tuple[Path, Run], tmp_path: Path) -> Path:
    """A copy of the folder."""
    copy = tmp_path / "programs"
    shutil.copytree(filled[0], copy)
    copy.chmod(0o700)
    return copy


# ---- loading --------------------------------------------------------------------------------------


def test_the_next_process_compiles_nothing(filled: tuple[Path, Run], folder: Path) -> None:
    first, again = filled[1], in_process(folder)
    assert first.compiles > 0
    assert first.eager_compiles > 0
    assert (first.loads, first.cache.written) == (0, first.compiles + first.eager_compiles)
    assert (again.compiles, again.eager_compiles, again.cache.written) == (0, 0, 0)
    assert again.loads == first.cache.written
    assert again.losses == first.losses
    assert {stat.S_IMODE(path.stat().st_mode) for path in programs(folder)} == {0o600}


def test_losses_are_those_of_a_process_without_it(filled: tuple[Path, Run]) -> None:
    assert in_process(None, {"XLA_ADAPTERS_CACHE_DIR": "off"}).losses == pytest.approx(filled[1].losses, rel=1e-5)


def test_on_eight_devices(tmp_path: Path) -> None:
    first, again = (in_process(tmp_path, {"CPU_NUM_DEVICES": "8"}, spmd=True) for _ in range(2))
    assert first.compiles > 0
    assert (again.compiles, again.eager_compiles, again.losses) == (0, 0, first.losses)


def test_another_step_is_compiled(folder: Path) -> None:
    other = in_process(folder, width=16)
    assert other.compiles > 0
    assert other.cache.written > 0


def test_the_variable_says_where(filled: tuple[Path, Run], folder: Path) -> None:
    run = in_process(None, {"XLA_ADAPTERS_CACHE_DIR": str(folder)})
    assert (run.compiles, run.losses) == (0, filled[1].losses)


def _events(folder: Path) -> list[str]:
    xla_adapters.initialize(cache_dir=str(folder))
    torch.manual_seed(0)
    model = nn.Linear(4, 1).to("xla")
    step = xla_adapters.CompiledStep(partial(_step, model, torch.optim.SGD(model.parameters(), lr=0.1)))
    step(torch.ones(2, 4))
    return [str(event).partition(" (")[0] for event in step.events]


def test_a_loaded_graph_is_told_as_one(tmp_path: Path) -> None:
    (compiled,), (loaded,) = (run_in_child(partial(_events, tmp_path), env=_NONE) for _ in range(2))
    assert re.fullmatch(r"step: graph 1, \d+\.\d\d s", compiled)
    assert "graph 1, loaded in " in loaded


def _mixed(folder: Path, *, with_operations: bool) -> xla_adapters.StepCounters:
    xla_adapters.initialize(cache_dir=str(folder))
    torch.manual_seed(0)
    model = nn.Linear(4, 1).to("xla")
    step = xla_adapters.CompiledStep(partial(_step, model, torch.optim.SGD(model.parameters(), lr=0.1)))
    value = torch.ones(7, device="xla")
    with xla_adapters.count() as counted:
        if with_operations:
            (value.cosh() + 1).tanh().cpu()
        step(torch.ones(2, 4))
        if with_operations:
            value.atan().cpu()
    return counted


def test_loads_are_told_from_compiles_between_them(tmp_path: Path) -> None:
    first = run_in_child(partial(_mixed, tmp_path, with_operations=False), env=_NONE)
    assert first.compiles > 0
    assert (first.eager_compiles, first.loads) == (0, 0)
    mixed = run_in_child(partial(_mixed, tmp_path, with_operations=True), env=_NONE)
    assert (mixed.compiles, mixed.loads) == (0, first.compiles)
    assert mixed.eager_compiles >= 3


def _large(folder: Path) -> CacheCounts:
    """A step whose temporary values need 64 MB."""
    xla_adapters.initialize(cache_dir=str(folder))
    tall, wide = torch.ones(4000, 8, device="xla"), torch.ones(8, 4000, device="xla")
    with xla_adapters.step():
        result = (tall @ wide).sin() @ tall @ (wide @ tall)
    assert result.isfinite().all().item()
    return COMPILE_CACHE.counts()


@pytest.mark.skipif(os.environ.get(VARIABLE, "1") == "0", reason="the tuning for CPU devices takes the flag back")
def test_programs_with_large_temporary_values_are_kept(tmp_path: Path) -> None:
    """The flag by which `import hf_trainer` has them cut in pieces is taken back; one that the user has set stays."""
    name = "--xla_multiheap_size_constraint_per_heap"
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if not flag.startswith(name)]
    ours, users = (" ".join([*flags, f"{name}={size}"]) for size in (LARGEST_PIECE, 1_000_000))
    whole = run_in_child(partial(_large, tmp_path / "whole"), env={**_NONE, "XLA_FLAGS": ours})
    assert (whole.written, whole.problem) == (whole.compiled, "")
    cut = run_in_child(partial(_large, tmp_path / "cut"), env={**_NONE, "XLA_FLAGS": users})
    assert "Multiple temp buffer allocations" in cut.problem


# ---- what another program, or another machine, has written ---------------------------------------


@pytest.mark.parametrize("what", ["flags", "build", "processor"])
def test_programs_made_otherwise_are_not_loaded(folder: Path, what: str) -> None:
    def other() -> Run:
        with pytest.MonkeyPatch.context() as patch:
            if what == "build":
                patch.setattr(library, "_build_of", lambda plugin: "another version")
            if what == "processor":
                patch.setattr(library, "_processor", lambda: "another processor")
            return train(folder)

    env = {"XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_cpu_enable_fast_math=true"} if what == "flags" else {}
    run: Run = run_in_child(other, env={**_NONE, **env})
    assert run.loads == 0
    assert run.compiles > 0


# ---- damage ---------------------------------------------------------------------------------------


def _flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(data)


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _exchange(path: Path) -> None:
    other = min(path.parent.iterdir(), key=lambda item: item.stat().st_size)
    path.write_bytes(other.read_bytes())


def _foreign(path: Path) -> None:
    """With a right checksum, of what the device cannot load."""
    data = b"no program" * 50
    head = bytearray(path.read_bytes()[:80])
    digest = hashlib.sha256(data).digest()
    head[40:80] = len(data).to_bytes(8, "little") + digest
    path.write_bytes(bytes(head) + data)


def _link(path: Path) -> None:
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))


_DAMAGE: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "cut": _cut,
    "head": lambda path: _flip(path, 3),
    "key": lambda path: _flip(path, 20),
    "size": lambda path: _flip(path, 41),
    "checksum": lambda path: _flip(path, 60),
    "another program's": _exchange,
    "no program": _foreign,
    "writable by others": lambda path: path.chmod(0o622),
    "a link": _link,
}


@pytest.mark.parametrize("damage", list(_DAMAGE))
def test_a_damaged_program_is_compiled_again_and_replaced(filled: tuple[Path, Run], folder: Path, damage: str) -> None:
    step = programs(folder)[0]
    _DAMAGE[damage](step)
    run = in_process(folder)
    assert run.losses == filled[1].losses
    assert run.compiles == 1
    assert run.cache.rejected == 1
    assert run.cache.problem.startswith(step.name)
    again = in_process(folder)
    assert (again.compiles, again.cache.rejected, again.losses) == (0, 0, filled[1].losses)


def test_no_byte_can_be_changed_unseen(folder: Path) -> None:
    """Sampled: the ends, and places between."""
    step = programs(folder)[0]
    whole = step.read_bytes()
    (entry,) = (entry for entry in compile_cache.entries(folder) if entry.path == step)
    assert entry.problem() is None
    draw = random.Random(0)
    for position in {0, len(whole) - 1, *range(0, 80, 3), *(draw.randrange(len(whole)) for _ in range(60))}:
        _flip(step, position)
        assert entry.problem() is not None, position
        step.write_bytes(whole)


# ---- folders --------------------------------------------------------------------------------------


def test_a_folder_to_which_others_can_write_is_not_used(filled: tuple[Path, Run], folder: Path) -> None:
    folder.chmod(0o777)
    run = in_process(folder)
    assert (run.loads, run.losses) == (0, filled[1].losses)
    assert "that others can write to are not executed" in run.warned[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_what_belongs_to_another_user_is_not_used(filled: tuple[Path, Run], folder: Path) -> None:
    os.chown(programs(folder)[0], 12345, 12345)
    assert in_process(folder).compiles == 1
    os.chown(folder, 12345, 12345)
    run = in_process(folder)
    assert (run.loads, run.losses) == (0, filled[1].losses)
    assert "belongs to user 12345" in run.warned[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="what root may not write nobody may")
def test_a_folder_without_rights_is_read(folder: Path) -> None:
    """Of root, used by somebody else."""
    plugin = Path(str(files("xla_plugins.xla_cpu_pjrt"))) / "xla_cpu_pjrt.so"
    if not all(parent.stat().st_mode & stat.S_IXOTH for path in (library.LIBRARY, plugin) for parent in path.parents):
        pytest.skip("somebody else cannot read the libraries here")
    for path in (folder, *folder.parents[:1], *folder.iterdir()):
        path.chmod(0o755)
    for parent in folder.parents:
        parent.chmod(parent.stat().st_mode | 0o111)

    def as_nobody() -> Run:
        os.seteuid(65534)
        try:
            return train(folder, width=12)
        finally:
            os.seteuid(0)

    run: Run = run_in_child(as_nobody, env=_NONE)
    assert run.loads > 0
    assert run.compiles > 0
    assert (run.cache.written, run.warned) == (0, [])
    assert run.cache.problem == "what is compiled is not kept: the folder can only be read"


def test_a_folder_that_cannot_be_made_is_a_warning(filled: tuple[Path, Run], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    run = in_process(tmp_path / "file" / "programs")
    assert run.losses == pytest.approx(filled[1].losses, rel=1e-5)
    assert "cannot be used" in run.warned[0]


def test_what_is_no_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "absent")
    for name in ("file", "link"):
        with pytest.raises(compile_cache.FolderProblem, match="it is no folder, or a link to nothing"):
            compile_cache.open_folder(tmp_path / name)


def test_a_relative_folder_in_one_that_was_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert compile_cache.folder_of("programs") == tmp_path / "programs"
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(compile_cache.FolderProblem, match="programs cannot be used"):
        compile_cache.folder_of("programs")


def test_a_warning_names_the_folder(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    def said() -> str:
        _link(programs(folder)[0])
        train(folder)
        return caplog.text

    assert re.search(
        rf"compile cache in {folder}: \w+ is not loaded: it is a symbolic link", run_in_child(said, env=_NONE)
    )


def test_a_full_disk(filled: tuple[Path, Run], tmp_path: Path) -> None:
    def without_room() -> Run:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        return train(tmp_path)

    run: Run = run_in_child(without_room, env=_NONE)
    assert run.losses == filled[1].losses
    assert "compiled programs are not kept: File too large" in run.cache.problem
    assert [path for path in tmp_path.iterdir() if path.suffix == ".tmp"] == []
    assert all(entry.problem() is None for entry in compile_cache.entries(tmp_path))
    assert in_process(tmp_path).losses == filled[1].losses


def test_what_was_not_used_for_longest_is_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = compile_cache.entries(folder)
    for age, entry in enumerate(entries):
        os.utime(entry.path, (age, 10_000_000 - age))
    interrupted = folder / ".0123456789abcdef.12.0.1700000000.5.tmp"
    interrupted.write_bytes(b"half")
    other = folder / ".somebody.else.tmp"
    other.write_bytes(b"")
    os.utime(other, (0, 0))
    os.utime(interrupted, (0, 0))
    kept = entries[:2]
    removed = compile_cache.prune(folder, sum(entry.size for entry in kept))
    assert [entry.path for entry in removed] == [entry.path for entry in entries[2:]]
    assert sorted(folder.iterdir()) == sorted([other, *(entry.path for entry in kept)])


def test_one_program_that_is_too_large_goes_alone(folder: Path) -> None:
    others = compile_cache.entries(folder)
    large = folder / ("0" * 64)
    with large.open("wb") as file:
        file.truncate(1 << 40)
    assert [entry.path for entry in compile_cache.prune(folder, 1 << 30)] == [large]
    assert len(compile_cache.entries(folder)) == len(others)


def test_a_program_that_is_loaded_counts_as_used(folder: Path) -> None:
    for path in folder.iterdir():
        os.utime(path, (1, 1))
    in_process(folder)
    assert all(entry.used > time.time() - 600 for entry in compile_cache.entries(folder))


@pytest.mark.parametrize("kind", ["another", "this"])
def test_a_folder_of_an_object_store(filled: tuple[Path, Run], tmp_path: Path, kind: str) -> None:
    """Copied before, and back afterwards; another machine finds it."""
    url = f"local://{tmp_path}/bucket/programs"

    def with_url() -> Run:
        before = len(threading._threading_atexits)  # type: ignore[attr-defined]
        run = train(url)
        # As when the process ends, which a forked child does not do.
        for call in threading._threading_atexits[before:]:  # type: ignore[attr-defined]
            call()
        return run

    first: Run = run_in_child(with_url, env={**_NONE, "XDG_CACHE_HOME": str(tmp_path / "one")})
    kept = sorted(path.name for path in (tmp_path / "bucket" / "programs").iterdir())
    assert len(kept) == first.cache.written > 0
    home = tmp_path / ("one" if kind == "this" else "two")
    again: Run = run_in_child(with_url, env={**_NONE, "XDG_CACHE_HOME": str(home)})
    assert (again.compiles, again.losses) == (0, filled[1].losses)
    assert sorted(path.name for path in (tmp_path / "bucket" / "programs").iterdir()) == kept


def test_a_store_that_nobody_knows_is_a_warning() -> None:
    run: Run = run_in_child(partial(train, "nowhere://bucket/programs"), env=_NONE)
    assert run.compiles > 0
    assert "nowhere" in run.warned[0]


# ---- several processes, and processes that die ----------------------------------------------------


def test_two_processes_at_once(filled: tuple[Path, Run], tmp_path: Path) -> None:
    outcomes = children.run_in_children([partial(train, tmp_path)] * 2, timeout=200, env=_NONE)
    assert [outcome.value.losses for outcome in outcomes] == [filled[1].losses] * 2
    assert in_process(tmp_path).compiles == 0


def _write_for_ever(path: Path) -> None:
    """Compiles other programs until the process is killed."""
    xla_adapters.initialize(cache_dir=str(path))
    value = torch.ones(3, device="xla")
    for number in range(10**6):
        with xla_adapters.step():
            result = torch.tile(value, (1 + number % 50,)) * (value.sum() + 1)
            for _ in range(number // 50):
                result = result + 1
        del result


@pytest.mark.slow
def test_killed_while_it_writes(tmp_path: Path) -> None:
    """What is there is whole, and is used by the next one."""
    kill_while_writing(tmp_path, times=12)


@pytest.mark.long
def test_killed_while_it_writes_a_hundred_times(tmp_path: Path) -> None:
    kill_while_writing(tmp_path, times=100)


def kill_while_writing(folder: Path, times: int) -> None:
    draw = random.Random(1)
    for _ in range(times):
        child = os.fork()
        if child == 0:
            os.environ.update(_NONE)
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            try:
                _write_for_ever(folder)
            finally:
                os._exit(1)
        before = len(list(folder.iterdir())) if folder.exists() else 0
        while not folder.exists() or len(list(folder.iterdir())) < before + 2:
            assert os.waitpid(child, os.WNOHANG) == (0, 0)
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 0.3))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert all(entry.problem() is None for entry in compile_cache.entries(folder))
    assert in_process(folder).cache.rejected == 0


# ---- options --------------------------------------------------------------------------------------


@isolated(env=_NONE)
def test_too_late_is_an_error(tmp_path: Path) -> None:
    xla_adapters.initialize()
    with pytest.raises(RuntimeOrderError, match=r"start Python with XLA_ADAPTERS_CACHE_DIR="):
        xla_adapters.initialize(cache_dir=str(tmp_path))
    with (
        pytest.raises(RuntimeOrderError, match="after the runtime had started"),
        xla_adapters.step(cache_dir=str(tmp_path)),
    ):
        pass
    xla_adapters.initialize(cache_dir=False)


@isolated(env=_NONE)
def test_the_folder_can_change_and_be_left(tmp_path: Path) -> None:
    xla_adapters.initialize(cache_dir=str(tmp_path / "one"))
    xla_adapters.initialize()
    assert COMPILE_CACHE.folder == tmp_path / "one"
    xla_adapters.initialize(cache_dir=str(tmp_path / "other"))
    (torch.ones(2, device="xla") + 1).cpu()
    written = len(programs(tmp_path / "other"))
    assert written > 0
    xla_adapters.initialize(cache_dir=False)
    (torch.ones(3, device="xla") + 1).cpu()
    assert len(programs(tmp_path / "other")) == written


@isolated
def test_what_the_program_says_goes_before_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_ADAPTERS_CACHE_DIR", str(tmp_path / "variable"))
    xla_adapters.initialize(cache_dir=str(tmp_path / "argument"))
    (torch.ones(2, device="xla") + 1).cpu()
    xla_adapters.initialize()
    assert COMPILE_CACHE.folder == tmp_path / "argument"
    xla_adapters.initialize(cache_dir=False)
    xla_adapters.initialize()
    assert COMPILE_CACHE.folder is None
    assert [path.name for path in tmp_path.iterdir()] == ["argument"]


@isolated(env=_NONE)
def test_a_folder_that_was_removed_is_made_again(tmp_path: Path) -> None:
    xla_adapters.initialize(cache_dir=str(tmp_path / "one"))
    (torch.ones(2, device="xla") + 1).cpu()
    shutil.rmtree(tmp_path / "one")
    (torch.ones(3, device="xla") + 1).cpu()
    assert "compiled programs are not kept" in COMPILE_CACHE.counts().problem
    xla_adapters.initialize(cache_dir=str(tmp_path / "one"))
    (torch.ones(4, device="xla") + 1).cpu()
    assert programs(tmp_path / "one")


@isolated(env=_NONE)
def test_a_profile_is_refused_where_it_would_end_the_process(tmp_path: Path) -> None:
    xla_adapters.initialize(cache_dir=str(tmp_path))
    with pytest.raises(UnsupportedOptionError, match="have no profiler"), xla_adapters.step(profile_steps=(1, 1)):
        pass


@isolated(env={"XLA_ADAPTERS_CACHE_DIR": "off"})
def test_a_variable_that_comes_too_late_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    xla_adapters.initialize()
    monkeypatch.setenv("XLA_ADAPTERS_CACHE_DIR", str(tmp_path))
    with pytest.warns(UserWarning, match="the runtime had started before"):
        xla_adapters.initialize()


def test_no_cpu_device_uses_it_unless_it_is_asked_for(tmp_path: Path) -> None:
    run = in_process(None, {"XLA_ADAPTERS_CACHE_DIR": "", "XDG_CACHE_HOME": str(tmp_path)})
    assert run.cache == CacheCounts()
    assert list(tmp_path.iterdir()) == []


@isolated(env=_NONE)
def test_without_what_it_needs_it_says_so_and_all_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "LIBRARY", tmp_path / "none.so")
    with pytest.warns(UserWarning, match="install a C compiler") as said:
        xla_adapters.initialize(cache_dir=str(tmp_path))
    assert said[0].filename == __file__
    assert (torch.ones(2, device="xla") + 1).tolist() == [2, 2]


@pytest.mark.parametrize("value", [True, 3, "", "a\0b"])
def test_values_that_are_none(value: object) -> None:
    with pytest.raises(ConfigError, match="valid values: the path of a folder, False"):
        XLAConfig(cache_dir=value)  # type: ignore[arg-type]


def test_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    count = len(programs(folder))

    def run(*arguments: str) -> tuple[int, str]:
        return main(["cache", *arguments]), capsys.readouterr().out

    assert run("info", str(folder))[1].startswith(f"{folder}: {count} programs, ")
    assert len(run("list", str(folder))[1].splitlines()) == count
    assert run("verify", str(folder)) == (0, f"{count} programs, 0 of them would not be loaded\n")
    _flip(programs(folder)[0], -1)
    status, said = run("verify", str(folder))
    assert status == 1
    assert "it is damaged" in said
    assert run("prune", str(folder), "--size", "0K")[1].startswith(f"removed {count} programs")
    assert programs(folder) == []
    assert main(["cache", "list", str(folder / "absent")]) == 2


def test_the_command_knows_what_a_run_would_do(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    count = len(programs(folder))
    folder.chmod(0o770)
    assert main(["cache", "verify", str(folder)]) == 1
    said = capsys.readouterr().out
    assert "others can write to are not executed" in said
    assert f"{count} programs, {count} of them would not be loaded" in said
    main(["cache", "info", str(folder)])
    assert "cannot use it: " in capsys.readouterr().out
    folder.chmod(0o700)
    # Of a URL it is the copy on this machine; "off" is no folder.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for said, where in (("gs://bucket/programs", compile_cache.folder_of("gs://bucket/programs")), ("off", None)):
        place = compile_cache.default_folder() if where is None else where
        assert place.is_relative_to(tmp_path / "xla_adapters")
        shutil.copytree(folder, place)
        monkeypatch.setenv("XLA_ADAPTERS_CACHE_DIR", said)
        assert main(["cache", "info"]) == 0
        assert f"{place}: {count} programs" in capsys.readouterr().out


def test_the_command_does_not_load_torch(folder: Path) -> None:
    code = "import sys; from xla_adapters.cli import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    for command in (["list"], ["info"], ["verify"], ["prune", "--size", "0K"]):
        subprocess.run([sys.executable, "-c", code, "cache", *command, str(folder)], cwd=ROOT, check=True)


# ---- the plugin -----------------------------------------------------------------------------------


_STRUCTS = {
    "destroy_args": ("PJRT_Error_Destroy_Args", {"object": "error"}),
    "text_args": (
        "PJRT_TopologyDescription_PlatformVersion_Args",
        {"object": "topology", "text": "platform_version", "length": "platform_version_size"},
    ),
    "initialize_args": ("PJRT_Plugin_Initialize_Args", {}),
    "option": (
        "PJRT_NamedValue",
        {"name": "name", "name_size": "name_size", "kind": "type", "value": "int64_value", "count": "value_size"},
    ),
    "create_client_args": (
        "PJRT_Client_Create_Args",
        {"options": "create_options", "option_count": "num_options", "client": "client"},
    ),
    "create_topology_args": (
        "PJRT_TopologyDescription_Create_Args",
        {
            "name": "topology_name",
            "name_size": "topology_name_size",
            "options": "create_options",
            "option_count": "num_options",
            "topology": "topology",
        },
    ),
    "compile_ahead_args": (
        "PJRT_Compile_Args",
        {
            "topology": "topology",
            "program": "program",
            "options": "compile_options",
            "options_size": "compile_options_size",
            "client": "client",
            "executable": "executable",
        },
    ),
    "topology_args": ("PJRT_Client_TopologyDescription_Args", {"client": "client", "topology": "topology"}),
    "descriptions_args": (
        "PJRT_TopologyDescription_GetDeviceDescriptions_Args",
        {"topology": "topology", "descriptions": "descriptions", "count": "num_descriptions"},
    ),
    "program": (
        "PJRT_Program",
        {"code": "code", "code_size": "code_size", "format": "format", "format_size": "format_size"},
    ),
    "compile_args": (
        "PJRT_Client_Compile_Args",
        {
            "client": "client",
            "program": "program",
            "options": "compile_options",
            "options_size": "compile_options_size",
            "executable": "executable",
        },
    ),
    "get_executable_args": (
        "PJRT_LoadedExecutable_GetExecutable_Args",
        {"loaded": "loaded_executable", "executable": "executable"},
    ),
    "serialize_args": (
        "PJRT_Executable_Serialize_Args",
        {
            "executable": "executable",
            "bytes": "serialized_bytes",
            "length": "serialized_bytes_size",
            "owner": "serialized_executable",
            "free_owner": "serialized_executable_deleter",
        },
    ),
    "load_args": (
        "PJRT_Executable_DeserializeAndLoad_Args",
        {
            "client": "client",
            "bytes": "serialized_executable",
            "length": "serialized_executable_size",
            "executable": "loaded_executable",
            "options": "overridden_serialized_compile_options",
            "options_size": "overridden_serialized_compile_options_size",
        },
    ),
    "execute_args": (
        "PJRT_LoadedExecutable_Execute_Args",
        {"executable": "executable", "options": "options", "outputs": "output_lists", "device": "execute_device"},
    ),
}
_FUNCTIONS = {
    "ERROR_DESTROY": "Error_Destroy",
    "ERROR_MESSAGE": "Error_Message",
    "PLUGIN_INITIALIZE": "Plugin_Initialize",
    "CLIENT_CREATE": "Client_Create",
    "CLIENT_PLATFORM_NAME": "Client_PlatformName",
    "CLIENT_COMPILE": "Client_Compile",
    "DEVICE_DESCRIPTION_KIND": "DeviceDescription_Kind",
    "DEVICE_DESCRIPTION_TO_STRING": "DeviceDescription_ToString",
    "EXECUTABLE_DESTROY": "Executable_Destroy",
    "EXECUTABLE_SERIALIZE": "Executable_Serialize",
    "LOADED_EXECUTABLE_GET_EXECUTABLE": "LoadedExecutable_GetExecutable",
    "LOADED_EXECUTABLE_EXECUTE": "LoadedExecutable_Execute",
    "EXECUTABLE_DESERIALIZE_AND_LOAD": "Executable_DeserializeAndLoad",
    "TOPOLOGY_CREATE": "TopologyDescription_Create",
    "TOPOLOGY_PLATFORM_NAME": "TopologyDescription_PlatformName",
    "TOPOLOGY_PLATFORM_VERSION": "TopologyDescription_PlatformVersion",
    "TOPOLOGY_DEVICE_DESCRIPTIONS": "TopologyDescription_GetDeviceDescriptions",
    "COMPILE_AHEAD": "Compile",
    "CLIENT_TOPOLOGY": "Client_TopologyDescription",
}
_KINDS = {
    "TEXT": "PJRT_NamedValue_kString",
    "NUMBER": "PJRT_NamedValue_kInt64",
    "NUMBERS": "PJRT_NamedValue_kInt64List",
}
_SAME_LAYOUT = (
    ("PJRT_Executable_Destroy_Args", "destroy_args", "executable", "object"),
    ("PJRT_Error_Message_Args", "text_args", "message_size", "length"),
    ("PJRT_TopologyDescription_PlatformName_Args", "text_args", "platform_name_size", "length"),
    ("PJRT_Client_PlatformName_Args", "text_args", "platform_name_size", "length"),
    ("PJRT_DeviceDescription_Kind_Args", "text_args", "device_kind_size", "length"),
    ("PJRT_DeviceDescription_ToString_Args", "text_args", "to_string_size", "length"),
    ("PJRT_Api", "api", "pjrt_api_version.major_version", "major"),
)


def _compile(code: str, output: Path, *options: str) -> None:
    compiler = shutil.which("cc") or pytest.skip("no C compiler")
    source = output.with_suffix(".c")
    source.write_text(f'#include "{_ROOM / "plugin.c"}"\n{code}')
    header = Path(str(files("xla_plugins.xla_cpu_pjrt"))) / "include"
    subprocess.run([compiler, *options, f"-I{header}", str(source), "-o", str(output), "-ldl"], check=True)


def test_layouts_are_those_of_the_header(tmp_path: Path) -> None:
    same = [
        *(
            f"offsetof(struct {own}, {field}) == offsetof({theirs}, {name})"
            for own, (theirs, pairs) in _STRUCTS.items()
            for field, name in pairs.items()
        ),
        *(f"sizeof(struct {own}) == sizeof({theirs})" for own, (theirs, _) in _STRUCTS.items()),
        *(
            f"offsetof(PJRT_Api, PJRT_{name}) == sizeof(struct api) + sizeof(void*) * {number}"
            for number, name in _FUNCTIONS.items()
        ),
        *(
            f"offsetof({theirs}, {name}) == offsetof(struct {own}, {field})"
            for theirs, own, name, field in _SAME_LAYOUT
        ),
        *(f"(int){own} == (int){theirs}" for own, theirs in _KINDS.items()),
    ]
    used = set(re.findall(r"^  ([A-Z_]+) = \d+,$", (_ROOM / "plugin.c").read_text(), re.MULTILINE))
    assert used == set(_FUNCTIONS)
    checks = "\n".join(f'_Static_assert({item}, "{item}");' for item in same)
    _compile(f'#include "pjrt_c_api.h"\n#include <stddef.h>\n{checks}', tmp_path / "layouts.so", "-shared", "-fPIC")


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The plugin with its inner functions."""
    code = """
    int test_canonical(char* bytes, size_t size, int is_program) {
      return make_canonical(bytes, size, is_program ? MODULE : OPTIONS);
    }
    void test_digest(const char* bytes, size_t size, uint8_t* digest) { digest_of(bytes, size, digest); }
    """
    output = tmp_path_factory.mktemp("plugin") / "opened.so"
    _compile(code, output, "-shared", "-fPIC", "-fsanitize=undefined", "-fno-sanitize-recover=all")
    return ctypes.CDLL(str(output))


@pytest.mark.parametrize("size", [0, 1, 55, 56, 63, 64, 65, 119, 120, 128, 100_003])
def test_checksums_are_sha256(opened: ctypes.CDLL, size: int) -> None:
    data = random.Random(size).randbytes(size)
    digest = ctypes.create_string_buffer(32)
    opened.test_digest(data, ctypes.c_size_t(size), digest)
    assert digest.raw == hashlib.sha256(data).digest()


def _canonical(opened: ctypes.CDLL, message: bytes, *, is_program: bool) -> bytes | None:
    buffer = ctypes.create_string_buffer(message, max(len(message), 1))
    fine = opened.test_canonical(buffer, ctypes.c_size_t(len(message)), int(is_program))
    return buffer.raw[: len(message)] if fine else None


@pytest.mark.parametrize(("name", "count"), [("xla.HloModuleProto", 3), ("xla.CompileOptionsProto", 5)])
def test_every_map_of_programs_and_options_is_sorted(opened: ctypes.CDLL, name: str, count: int) -> None:
    messages = xla_messages.described()
    assert len(list(xla_messages.map_paths(messages, name))) == count
    made = {xla_messages.filled(messages, name, order) for order in range(6)}
    assert len(made) > 1
    sorted_ = {_canonical(opened, message, is_program="Module" in name) for message in made}
    assert len(sorted_) == 1
    assert None not in sorted_


def test_what_is_no_map_keeps_its_order(opened: ctypes.CDLL) -> None:
    # Two computations, of which the second would come first.
    message = b"\x1a\x02\x0a\x00" + b"\x1a\x00"
    assert _canonical(opened, message, is_program=True) == message


def test_what_is_no_message_is_left(opened: ctypes.CDLL) -> None:
    draw = random.Random(0)
    for size in range(300):
        data = draw.randbytes(size)
        for is_program in (True, False):
            result = _canonical(opened, data, is_program=is_program)
            assert result is None or sorted(result) == sorted(data)


def test_the_library_is_built_from_this_source() -> None:
    """Otherwise: `make` installs the package again, which builds it."""
    assert library.LIBRARY.stat().st_mtime >= (_ROOM / "plugin.c").stat().st_mtime


_WITHOUT_US = "import torch, torch_xla; print(torch.ones(2, device=torch_xla.device()).tolist())"


def test_processes_started_by_one_that_uses_it_work_without_it(tmp_path: Path) -> None:
    def parent() -> str:
        train(tmp_path)
        done = subprocess.run([sys.executable, "-c", _WITHOUT_US], capture_output=True, text=True, cwd=ROOT, check=True)
        return done.stdout

    assert run_in_child(parent, env=_NONE).strip() == "[1.0, 1.0]"
