"""Runs the tests of a peer on the plain CPU, then with the trainers of this package, and lists what fails and why."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

_WHERE = """
where the tests come from (git archive COMMIT tests | tar x):
  lightning     Lightning-AI/pytorch-lightning at 44fd142673: tests/tests_pytorch and tests/tests_fabric
  transformers  huggingface/transformers, as kaixuanliu/transformers at 3cd1a23: tests/trainer and tests/fixtures
"""


def _run(
    suite: str, mode: str, options: argparse.Namespace, folder: Path, tests: list[str]
) -> dict[str, dict[str, Any]]:
    """The last result of each test, by its name. What fails is run again, alone."""
    log, wanted = folder / f"{mode}.jsonl", folder / f"{mode}.tests"
    # The environment of a trainer on the CPU must not know of XLA before anything is imported.
    command = [sys.executable, "-m", "tests.peer_suites.session", suite, mode, options.sources, str(log)]
    command += ["--limit", str(options.limit)]
    wanted.write_text("\n".join(tests))
    subprocess.run([*command, "--tests", str(wanted)], check=True)
    failed = [name for name, result in _read(log) if result["outcome"] == "failed"]
    if failed and mode == "ours":
        wanted.write_text("\n".join(failed))
        subprocess.run([*command, "--tests", str(wanted), "--alone"], check=True)
    return dict(_read(log))


def _read(log: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for line in log.read_text().splitlines():
        result = json.loads(line)
        yield result["test"], result


def _reason(test: str, why: str, known: list[dict[str, Any]]) -> dict[str, Any] | None:
    for each in known:
        if any(fnmatch(test, f"*{pattern}*") for pattern in each.get("tests", ())):
            return each
        if any(text in why for text in each.get("errors", ())):
            return each
    return None


def _files(sources: Path, suite: str, only: str) -> list[str]:
    roots = ("tests_pytorch", "tests_fabric") if suite == "lightning" else ("trainer",)
    found = [
        str(path.relative_to(sources / "tests"))
        for root in roots
        for path in (sources / "tests" / root).rglob("test_*.py")
    ]
    # Tests of several processes: each would start its own.
    return sorted(file for file in found if only in file and "/distributed/" not in file)


def main() -> int:
    parser = argparse.ArgumentParser("tests.peer_suites", description=__doc__, epilog=_WHERE)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("suite", choices=("lightning", "transformers"))
    parser.add_argument("sources", help="a folder in which tests/ has the peer's tests")
    parser.add_argument("--only", default="", help="files whose path has this in it")
    parser.add_argument("--limit", type=float, default=300, help="seconds for one test")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    sources = Path(options.sources).resolve()
    if not (sources / "tests").is_dir():
        parser.error(f"{sources} has no folder tests{_WHERE}")
    options.sources = str(sources)
    os.environ["PYTHONPATH"] = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        # Models of the hub that both passes use.
        os.environ["HF_HOME"] = f"{folder}/hub"
        files = _files(sources, options.suite, options.only)
        stock = _run(options.suite, "cpu", options, Path(folder), files)
        counted = [test for test, result in stock.items() if result["outcome"] == "passed" and result["replaceable"]]
        ours = _run(options.suite, "ours", options, Path(folder), counted)
    known = tomllib.loads((Path(__file__).parent / "misses.toml").read_text())[options.suite]
    return _tell(options, counted, ours, known)


def _tell(options: argparse.Namespace, counted: list[str], ours: dict[str, Any], known: list[dict[str, Any]]) -> int:
    missed = {test: ours.get(test, {"why": "it was not run"}) for test in counted}
    missed = {test: result for test, result in missed.items() if result.get("outcome") != "passed"}
    reasons = {test: _reason(test, result["why"], known) for test, result in missed.items()}
    kinds = Counter(reason["why"] for reason in reasons.values() if reason)
    tied = sum(bool(reason and reason.get("tied")) for reason in reasons.values())
    unknown = [test for test, reason in reasons.items() if reason is None]
    for why, tests in kinds.most_common():
        print(f"{tests:5} {why}")
    for test in unknown:
        print(
            f"      not listed: {test}\n"
            + "\n".join(f"          {line}" for line in missed[test]["why"].splitlines()[-12:])
        )
    passed = len(counted) - len(missed)
    print(f"{passed} of {len(counted)} passed ({passed / max(len(counted), 1):.1%})", end="")
    print(f"; without {tied} that are tied to the CPU, {passed / max(len(counted) - tied, 1):.1%}")
    if options.json:
        report = {"counted": len(counted), "passed": passed, "tied": tied, "reasons": kinds, "not listed": unknown}
        Path(options.json).write_text(json.dumps(report | {"missed": missed}, indent=1))
    return 1 if unknown or not counted else 0


if __name__ == "__main__":
    sys.exit(main())
