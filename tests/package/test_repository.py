"""What services and readers find beside the code: workflows, forms, the list of the pages, and the notes for agents."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = {path.stem: path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")}
_PYTHON = "Programming Language :: Python :: "
_CLASSIFIERS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
PYTHONS = [text.removeprefix(_PYTHON) for text in _CLASSIFIERS if text.startswith(f"{_PYTHON}3.")]
TARGETS = set(
    re.findall(r"(?m)^\.PHONY: ((?:.*\\\n)*.*)", (ROOT / "Makefile").read_text())[0].replace("\\", "").split()
)


def _loaded(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def _jobs(path: Path) -> dict[str, Any]:
    jobs: dict[str, Any] = _loaded(path)["jobs"]
    return jobs


def _commands(job: dict[str, Any]) -> list[str]:
    """The commands of a job, with each value of its matrix."""
    commands = [step["run"] for step in job["steps"] if "run" in step]
    for name, values in job.get("strategy", {}).get("matrix", {}).items():
        commands = [command.replace(f"${{{{ matrix.{name} }}}}", value) for command in commands for value in values]
    return commands


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_what_there_is(path: Path) -> None:
    # YAML reads the key `on` as true.
    assert {"name", True, "permissions", "jobs"} <= {*_loaded(path)}
    commands = [command for job in _jobs(path).values() for command in _commands(job)]
    assert commands
    assert {target for command in commands for target in re.findall(r"\bmake ([\w-]+)", command)} <= TARGETS
    files = {file for command in commands for file in re.findall(r"\b(?:tests|docs)/[\w/.]+|constraints\.txt", command)}
    assert [file for file in files if not (ROOT / file).exists()] == []
    assert not [command for command in commands if "${{" in command]
    needed = {job["needs"] for job in _jobs(path).values() if "needs" in job}
    assert needed <= {*_jobs(path)}


def test_each_python_is_tested() -> None:
    ci, release = (_jobs(ROOT / ".github" / "workflows" / f"{name}.yml") for name in ("ci", "release"))
    for job in (ci["test"], release["test"]):
        assert job["strategy"]["matrix"]["python"] == PYTHONS
    (many,) = (step["with"] for step in ci["package"]["steps"] if "setup-python" in step.get("uses", ""))
    assert sorted(many["python-version"].split()) == PYTHONS


def test_a_release_needs_no_secret() -> None:
    path = ROOT / ".github" / "workflows" / "release.yml"
    assert "secrets." not in path.read_text()
    jobs = _jobs(path)
    assert [name for name, job in jobs.items() if "id-token" in job.get("permissions", {})] == ["publish"]
    assert jobs["publish"]["needs"] == "test"
    assert jobs["test"]["needs"] == "build"


def test_ci_runs_what_must_pass_before_a_merge() -> None:
    here = {*re.findall(r"(?m)^make ([\w-]+)", (ROOT / ".ci" / "run").read_text())}
    jobs = _jobs(ROOT / ".github" / "workflows" / "ci.yml").values()
    assert here
    assert here <= {
        name for job in jobs for command in _commands(job) for name in re.findall(r"\bmake ([\w-]+)", command)
    }


def test_forms_ask_for_what_doctor_prints() -> None:
    assert set(FORMS) == {"bug", "question", "config"}
    assert _loaded(FORMS["config"]) == {"blank_issues_enabled": False}
    for name in ("bug", "question"):
        form = _loaded(FORMS[name])
        assert {"name", "description", "body"} <= {*form}
        fields = {field["id"]: field for field in form["body"] if field["type"] != "markdown"}
        assert "`xla-adapters doctor`" in fields["doctor"]["attributes"]["label"]
        assert all(field["attributes"]["label"] for field in fields.values())
        assert fields["doctor"].get("validations", {}).get("required", False) is (name == "bug")


def test_pre_commit_runs_what_lint_does() -> None:
    (repository,) = _loaded(ROOT / ".pre-commit-config.yaml")["repos"]
    makefile = (ROOT / "Makefile").read_text().replace("$(BIN)", ".venv/bin")
    lint = re.findall(r"(?m)^\t(.+)$", makefile[makefile.index("\nlint:") : makefile.index("# Offline;")])
    # pre-commit appends the files.
    assert [hook["entry"] for hook in repository["hooks"]] == [command.removesuffix(" .") for command in lint]


def test_the_site_is_built_from_what_there_is() -> None:
    found = _loaded(ROOT / ".readthedocs.yaml")
    assert (ROOT / found["sphinx"]["configuration"]).exists()
    assert found["sphinx"]["fail_on_warning"] is True
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (install,) = (line for line in found["build"]["jobs"]["install"] if "uv pip install" in line)
    assert {*re.findall(r"[\w-]+", re.findall(r"\.\[(.*)\]", install)[0])} <= {*extras}


def _title(path: Path) -> str:
    return re.findall(r"(?m)^# (.+)$", path.read_text(encoding="utf-8"))[0]


def test_the_list_of_pages_has_them_all() -> None:
    """In the order and under the captions of the site."""
    listed = (DOCS / "llms.txt").read_text(encoding="utf-8")
    assert re.match(r"# xla-adapters\n\n> .+\n\n\w.+\n\n## ", listed)
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    trees = re.findall(r"```\{toctree\}\n:caption: (\w+)\n:hidden:\n\n(.*?)```", index, re.DOTALL)
    expected = [f"## {caption}\n" + "".join(f"- {page}.md\n" for page in pages.split()) for caption, pages in trees]
    sections = re.findall(r"(?s)## .*?(?=\n\n## |\Z)", listed)
    assert [
        re.sub(r"(?m)^- \[.*?\]\(([^)]+)\): .+$", r"- \1", text).replace("\n\n", "\n").strip() for text in sections
    ] == [text.strip() for text in expected]
    for title, page in re.findall(r"(?m)^- \[(.*?)\]\(([^)]+)\)", listed):
        assert title == _title(DOCS / page)
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")} - {"index.md"}
    assert {page for _, page in re.findall(r"(?m)^- \[(.*?)\]\(([^)]+)\)", listed)} == pages


def test_what_agents_are_told_exists() -> None:
    text = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`make ([\w-]+)`", text)) <= TARGETS
    named = {*re.findall(r"`((?:adapters|hf_trainer|lightning_strategy|tests|docs|\.ci)/[\w/.]*)`", text)}
    named |= {*re.findall(r"\]\(([^)]+)\)", text), "CHANGELOG.md"}
    named |= {f"{module.replace('.', '/')}.py" for module in re.findall(r"python -m (tests\.\w+)", text)}
    assert [name for name in named if not (ROOT / name).exists()] == []
    limits = (ROOT / "tests" / "test_architecture.py").read_text()
    ((of_a_file, of_a_function),) = re.findall(r"(\d+) lines a file, (\d+) a function", text)
    assert f"_LINES_OF_A_FILE = {of_a_file}\n_LINES_OF_A_FUNCTION = {of_a_function}\n" in limits


def test_all_that_make_knows_is_there() -> None:
    for target in ("test-versions", "test-package"):
        done = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        paths = re.findall(r"\btests/[\w/.]+", done.stdout)
        assert paths
        assert [path for path in paths if not (ROOT / path).exists()] == []
