"""The README and each page of the documents: their code runs as a reader would paste it, and their links are right.

The blocks of a page run in order, in one process and one folder; those of the README each in an interpreter of its own.
A block that cannot be run here has a comment before it that says why; those are counted.
"""

from __future__ import annotations

import ast
import os
import re
import runpy
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import datasets
import pytest

import xla_adapters
from tests.isolation import outcome_of
from xla_adapters.errors import explained

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = {str(path.relative_to(ROOT)): path for path in (README, *sorted((ROOT / "docs").rglob("*.md")))}
_FENCE = re.compile(r"(?ms)^(?:<!-- not run: ([^\n]+) -->\n)?^```([^\n]*)\n(.*?)^```$")
# What Sphinx reads, and what is only looked at.
_NOT_CODE = {"{toctree}", "{eval-rst}"}
_NOT_RUN = {
    "README.md": 1,
    "docs/guides/check.md": 2,
    "docs/guides/notebooks.md": 1,
    "docs/guides/preflight.md": 2,
    "docs/guides/ranks.md": 4,
    "docs/guides/warm_start.md": 3,
    "docs/guides/which_slice.md": 1,
    "docs/install.md": 3,
    "docs/reference/cli.md": 3,
    "docs/results/performance.md": 1,
    "docs/results/preflight.md": 1,
    "docs/results/sharding.md": 1,
}
# What these pages import beside the packages of `dev`.
_NEEDS = {
    "docs/guides/after_training.md": "onnxscript",
    "docs/guides/diffusers.md": "diffusers",
    "docs/guides/peft.md": "peft",
    "docs/guides/recipes.md": "datasets",
    "docs/guides/sentence_transformers.md": "sentence_transformers",
    "docs/guides/timm.md": "timm",
    "docs/guides/trl.md": "trl",
}
# What these pages save, a second run of the same program resumes from.
_RESUMED = {"docs/quickstart/huggingface.md", "docs/quickstart/lightning.md", "docs/guides/checkpoints.md"}


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, its text, and why it is not run (None if it is)."""

    language: str
    text: str
    not_run: str | None


def _blocks(page: str) -> list[Block]:
    found = _FENCE.findall(PAGES[page].read_text())
    return [Block(language, text, why or None) for why, language, text in found if language not in _NOT_CODE]


def _program(page: str) -> str:
    """The blocks as one program; commands of a shell block are calls of the command line, and YAML is a file.

    Its first line is a comment with the name of the file.
    """
    parts = []
    for block in _blocks(page):
        if block.not_run is not None:
            continue
        if block.language == "python":
            parts.append(block.text)
        elif block.language == "yaml":
            file = block.text.partition("\n")[0].removeprefix("# ")
            parts.append(f"import pathlib\npathlib.Path({file!r}).write_text({block.text!r})")
        elif block.language == "sh":
            for line in block.text.splitlines():
                command, *arguments = shlex.split(line, comments=True)
                assert command == "xla-adapters", f"{page}: {line} is not run; say why in a comment before the block"
                parts.append(f"import xla_adapters.cli\nassert xla_adapters.cli.main({arguments!r}) == 0\n")
    return "\n\n".join(parts)


_WITH_PROGRAMS = [page for page in PAGES if page != "README.md" and _program(page)]
_OF_README = [block.text for block in _blocks("README.md") if block.language == "python"]


def test_pages_have_programs() -> None:
    assert len(_OF_README) == 3
    assert len(_WITH_PROGRAMS) >= 11


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(_OF_README[0], id="hf"),
        pytest.param(_OF_README[1], id="lightning", marks=pytest.mark.slow),
        pytest.param(_OF_README[2], id="own loop"),
    ],
)
def test_a_program_of_the_readme_runs(program: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(program)
    # pygal gives Python a finder of modules that is of an older kind, of which each later import would warn.
    command = [sys.executable, "-W", "default", "-W", "ignore::ImportWarning", "program.py"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    # Those of transformers' loggers do not have the word.
    assert not re.search(r"(?i)warning|\[transformers\]", ran.stderr), ran.stderr


def test_blocks_that_are_not_run_are_counted() -> None:
    counts = {page: sum(block.not_run is not None for block in _blocks(page)) for page in PAGES}
    assert {page: count for page, count in counts.items() if count} == _NOT_RUN


def test_every_block_is_of_a_kind_that_is_looked_at() -> None:
    for page, path in PAGES.items():
        assert {block.language for block in _blocks(page)} <= {"python", "sh", "diff", "yaml"}, page
        text = path.read_text()
        assert len(re.findall(r"(?m)^\s*```", text)) == 2 * len(_FENCE.findall(text)), page


def test_benchmarks_that_pages_name_are_there() -> None:
    for page, text in ((page, path.read_text()) for page, path in PAGES.items()):
        for module in re.findall(r"python -m ((?:benchmarks|examples|tests)\.\w+)", text):
            path = ROOT / module.replace(".", "/")
            assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), f"{page}: {module}"


def test_what_a_diff_adds_is_python() -> None:
    for page in PAGES:
        for block in _blocks(page):
            if block.language == "diff":
                ast.parse("\n".join(line[1:] for line in block.text.splitlines() if not line.startswith("-")))


@pytest.mark.parametrize("page", _WITH_PROGRAMS)
def test_the_code_of_a_page_runs(page: str, tmp_path: Path) -> None:
    if page in _NEEDS:
        pytest.importorskip(_NEEDS[page])
    program = tmp_path / "program.py"
    program.write_text(_program(page))
    said = re.search(r"<!-- environment: (.*) -->", PAGES[page].read_text())
    environment = dict(part.split("=") for part in said[1].split()) if said else {}

    def run() -> None:
        os.chdir(tmp_path)
        # Where what a page loads from files is kept.
        datasets.config.HF_DATASETS_CACHE = tmp_path / "cache"
        for _ in range(2 if page in _RESUMED else 1):
            runpy.run_path("program.py", run_name="__main__")

    ran = outcome_of(run, env=environment)
    assert ran.ok, f"{ran.error}\n{ran.output}"


def test_links_lead_to_files_and_headings() -> None:
    for page, path in PAGES.items():
        for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", path.read_text()):
            file = path.parent / target if target else path
            assert file.exists(), f"{page}: {target}"
            if anchor:
                headings = re.findall(r"(?m)^#+ (.*)$", file.read_text())
                assert anchor in [_anchor(heading) for heading in headings], f"{page}: {target}#{anchor}"


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_the_page_of_the_api_has_each_public_name() -> None:
    page = PAGES["docs/reference/api.md"].read_text()
    listed = set(re.findall(r":: xla_adapters\.(\w+)$", page, re.MULTILINE))
    assert {*xla_adapters.__all__} - {*explained()} <= listed


def test_the_readme_is_short() -> None:
    text = README.read_text()
    assert len(text.splitlines()) <= 150
    assert len(text.split()) <= 900
