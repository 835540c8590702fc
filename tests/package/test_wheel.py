"""What is built has what it promises, and trains in a fresh environment for each Python version that it promises."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = ROOT / "constraints.txt"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# As the workflow of releases sets it.
REPOSITORY, ADDRESS = "XLA_ADAPTERS_REPOSITORY", "https://example.org/somebody/xla-adapters"
PACKAGES = {"xla_adapters", "hf_trainer", "lightning_strategy"}
_PYTHON = "Programming Language :: Python :: "
VERSIONS = [text.removeprefix(_PYTHON) for text in PROJECT["classifiers"] if text.startswith(f"{_PYTHON}3.")]
_EXTRAS = {"hf_trainer": "xla-adapters[hf]", "lightning_strategy": "xla-adapters[lightning]"}


def _uv(*arguments: object, check: bool = True, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "uv", *map(str, arguments)]
    given = {**os.environ, **(env or {})}
    done = subprocess.run(command, cwd=ROOT.parent, capture_output=True, text=True, timeout=800, env=given)
    assert not check or done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done


def _interpreter(version: str) -> str | None:
    """The path of an interpreter of this version that is there already, installed by itself or by pyenv."""
    if version == ".".join(map(str, sys.version_info[:2])):
        return sys.executable
    found = _uv("python", "find", "--no-project", "--no-python-downloads", version, check=False)
    if found.returncode == 0:
        return found.stdout.strip()
    if pyenv := shutil.which("pyenv"):
        root = Path(subprocess.run([pyenv, "root"], capture_output=True, text=True, check=True).stdout.strip())
        return next((str(path) for path in sorted(root.glob(f"versions/{version}.*/bin/python"))), None)
    return None


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel, built from the sdist; and the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    _uv("build", "--build-constraint", CONSTRAINTS, "--out-dir", folder, ROOT, env={REPOSITORY: ADDRESS})
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


def test_versions_that_may_install_are_those_that_are_tested() -> None:
    allowed = SpecifierSet(PROJECT["requires-python"])
    assert [f"3.{minor}" for minor in range(40) if allowed.contains(f"3.{minor}.0")] == VERSIONS


def test_the_wheel_has_the_packages_and_nothing_else(built: tuple[Path, Path]) -> None:
    names = zipfile.ZipFile(built[0]).namelist()
    info = f"xla_adapters-{PROJECT['version']}.dist-info"
    assert {name.partition("/")[0] for name in names} == {*PACKAGES, info}
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(names)
    assert f"{info}/licenses/LICENSE" in names
    # Beside Python files only what says that they are typed, templates of pages, and the cache's plugin.
    others = {name for name in names if not name.endswith((".py", "/py.typed")) and not name.startswith(info)}
    cache = {f"xla_adapters/runtime/compile_cache/plugin.{kind}" for kind in ("c", "so.1")}
    pages = {
        f"xla_adapters/{page}.html" for page in ("insight/report", "sharding/plan", "tools/check", "tools/preflight")
    }
    assert others == {*pages, *cache}
    assert built[0].name.endswith(f"-py3-none-{sysconfig.get_platform().replace('-', '_')}.whl")


def test_without_a_compiler_there_is_a_wheel_for_each_platform(tmp_path: Path) -> None:
    _uv("build", "--wheel", "--build-constraint", CONSTRAINTS, "--out-dir", tmp_path, ROOT, env={"CC": "none"})
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if ".so" in name]


def test_the_sdist_has_what_git_has(built: tuple[Path, Path]) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("not a clone of the repository")
    with tarfile.open(built[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    kept = {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}
    assert names == {*kept, "PKG-INFO"}


def test_the_page_of_an_index_has_absolute_links(built: tuple[Path, Path]) -> None:
    metadata = message_from_bytes(
        zipfile.ZipFile(built[0]).read(f"xla_adapters-{PROJECT['version']}.dist-info/METADATA")
    )
    urls = dict(url.split(", ") for url in metadata.get_all("Project-URL", []))
    assert {"Repository", "Documentation", "Changelog", "Issues"} == {*urls}
    text, tag = metadata.get_payload(), f"v{PROJECT['version']}"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert isinstance(text, str)
    targets = [*re.findall(r"\]\(([^)]+)\)", text), *re.findall(r'src="([^"]+)"', text)]
    of_ours = re.compile(f"{re.escape(ADDRESS)}/(?:blob|raw)/{re.escape(tag)}/([^#]+)")
    files = [found[1] for target in (*targets, *urls.values()) if (found := of_ours.match(target))]
    assert len(files) > 20
    assert [name for name in files if not (ROOT / name).exists()] == []
    assert [target for target in targets if not target.startswith("https://")] == []


def test_links_stay_as_they_are_where_nobody_says_where_the_repository_is(tmp_path: Path) -> None:
    _uv("build", "--sdist", "--build-constraint", CONSTRAINTS, "--out-dir", tmp_path, ROOT, env={REPOSITORY: ""})
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        file = archive.extractfile(f"{sdist.name.removesuffix('.tar.gz')}/PKG-INFO")
        assert file is not None
        metadata = message_from_bytes(file.read())
    assert metadata.get_all("Project-URL") is None
    assert metadata.get_payload().strip() == (ROOT / "README.md").read_text(encoding="utf-8").strip()  # type: ignore[union-attr]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "version", [pytest.param(name, marks=pytest.mark.long if name in VERSIONS[:-1] else ()) for name in VERSIONS]
)
def test_a_fresh_environment_trains(version: str, built: tuple[Path, Path], tmp_path: Path) -> None:
    """All dependencies are installed afresh; those of `constraints.txt`, which the other tests have."""
    interpreter = _interpreter(version)
    if interpreter is None:
        pytest.skip(f"no Python {version} on this machine")
    environment = tmp_path / "environment"
    python = environment / "bin" / "python"
    _uv("venv", "--python", interpreter, environment)
    try:
        _install(python, f"xla-adapters @ {built[0].as_uri()}")
        for package, extra in _EXTRAS.items():
            failed = _run(python, tmp_path, "-c", f"import {package}")
            assert failed.returncode == 1
            assert f"pip install '{extra}'" in failed.stderr.splitlines()[-1]
        _install(python, f"xla-adapters[xla,hf,lightning] @ {built[0].as_uri()}")
        shutil.copy(Path(__file__).with_name("one_step.py"), tmp_path)
        trained = _run(python, tmp_path, tmp_path / "one_step.py", tmp_path / "out")
        assert trained.returncode == 0, trained.stderr
        _check(json.loads(trained.stdout.splitlines()[-1]), environment, version)
    finally:
        # Several GB, where the file system has no hard links to the cache.
        shutil.rmtree(environment)


def _install(python: Path, requirement: str) -> None:
    _uv("pip", "install", "--link-mode", "hardlink", "--python", python, "--constraint", CONSTRAINTS, requirement)


def _run(python: Path, folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """A program without this repository, nor anything that PYTHONPATH names, on its path."""
    # Not what the tests set for themselves.
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"PJRT_DEVICE": "CPU"}
    command = [str(python), "-I", *map(str, arguments)]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=600)


def _check(printed: dict[str, object], environment: Path, version: str) -> None:
    changes, files, path, python = (printed[name] for name in ("changes", "files", "path", "python"))
    assert isinstance(changes, dict)
    assert isinstance(files, list)
    assert isinstance(path, list)
    assert isinstance(python, list)
    assert ".".join(map(str, python)) == version
    assert sorted(changes) == ["core", "hf", "lightning"]
    assert all(0 < change < math.inf for change in changes.values()), changes
    assert printed["executions"] == {"core": 1, "hf": 1, "lightning": 1}
    assert [file for file in files if not Path(file).is_relative_to(environment)] == []
    assert [entry for entry in path if Path(entry).is_relative_to(ROOT)] == []
