"""One pass over a peer's tests: each file, or each test, in a child of a process that has imported everything."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

_AT_ONCE = 2
# After the limit of a test, until its process is killed.
_GRACE = 30.0


class Recorder:
    """A plugin of pytest that appends one line of JSON for each test to a file, and one when it begins.

    Args:
        log: the file.
        peer: counts what a test does.
        wanted: names of the tests to run; None: all.
    """

    def __init__(self, log: Path, peer: Any, wanted: set[str] | None) -> None:
        self._log, self._peer, self._wanted = log, peer, wanted
        self._began = 0.0

    def pytest_configure(self, config: Any) -> None:
        for marker in (
            "slow",
            "is_staging_test",
            "torch_compile_test",
            "not_device_test",
            "run_first",
            "order",
            "cloud",
            "flaky",
        ):
            config.addinivalue_line("markers", marker)

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        if self._wanted is not None:
            items[:] = [item for item in items if item.nodeid in self._wanted]
        self._write({"collected": [item.nodeid for item in items]})

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._peer.counts.update(trainers=0, replaceable=0)
        self._began = time.time()
        self._write({"began": nodeid})

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or not report.passed:
            outcome = "failed" if report.failed else report.outcome
            why = "" if report.passed else "\n".join(str(report.longrepr).splitlines()[-40:])
            took = round(time.time() - self._began, 1)
            self._write({"test": report.nodeid, "outcome": outcome, "why": why, "seconds": took, **self._peer.counts})

    def _write(self, line: dict[str, Any]) -> None:
        with self._log.open("a") as log:
            log.write(json.dumps(line) + "\n")


class Job:
    """Tests of one file, in a child.

    Args:
        peer: the module of the suite.
        sources: has the tests.
        file: of `tests`.
        wanted: names of the tests to run; None: all.
        limit: seconds for one test.
    """

    def __init__(self, peer: Any, sources: Path, file: str, wanted: set[str] | None, limit: float) -> None:
        self.file, self.wanted, self._limit = file, wanted, limit
        self._folder = tempfile.TemporaryDirectory()
        self._log = Path(self._folder.name) / "results"
        self._log.touch()
        # Imported here, in the parent.
        children = importlib.import_module("tests.children")
        self.child = children.Child(lambda: self._run(peer, sources))

    def _run(self, peer: Any, sources: Path) -> int:
        import pytest

        work = Path(self._folder.name) / "work"
        work.mkdir()
        os.chdir(work)
        peer.begin()
        tests = sources / "tests"
        settings = work / "pytest.ini"
        settings.write_text("[pytest]\n")
        arguments = [
            "-c",
            str(settings),
            "--rootdir",
            str(tests),
            "-p",
            "no:cacheprovider",
            "-q",
            str(tests / self.file),
        ]
        arguments += ["--basetemp", f"{work}/pytest", "--timeout", str(self._limit), "--disable-pytest-warnings"]
        return int(pytest.main(arguments, plugins=[Recorder(self._log, peer, self.wanted)]))

    def finished(self) -> bool:
        """Whether the child has ended; one that does not come on is killed."""
        if not self.child.ended() and time.time() - self._log.stat().st_mtime > self._limit + _GRACE:
            self.child.kill("a test is over its limit")
        return bool(self.child.ended())

    def results(self) -> tuple[list[dict[str, Any]], set[str]]:
        """What was recorded, and which tests are to be run again since the child died before they were."""
        lines = [json.loads(line) for line in self._log.read_text().splitlines()]
        outcome = self.child.outcome()
        done = {line["test"]: line for line in lines if "test" in line}
        begun = [line["began"] for line in lines if "began" in line]
        collected = {test for line in lines for test in line.get("collected", ())}
        self._folder.cleanup()
        if not outcome.ok and begun and begun[-1] not in done:
            why = f"{outcome.error}\n{outcome.output}"
            done[begun[-1]] = {
                "test": begun[-1],
                "outcome": "failed",
                "why": why,
                "seconds": outcome.seconds,
                "replaceable": 1,
            }
        elif not collected:
            print(f"{self.file}: no test ran\n{outcome.error or ''}\n{outcome.output[-1500:]}", flush=True)
        left = collected - set(done)
        return list(done.values()), left if done and not outcome.ok else set()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("suite")
    parser.add_argument("mode", choices=("cpu", "ours"))
    parser.add_argument("sources", type=Path)
    parser.add_argument("log", type=Path)
    parser.add_argument("--tests", type=Path, required=True, help="names of files or of tests, one a line")
    parser.add_argument("--alone", action="store_true", help="each test in a process of its own")
    parser.add_argument("--limit", type=float, required=True)
    options = parser.parse_args()
    peer = importlib.import_module(f"tests.peer_suites.{options.suite}_suite")
    peer.prepare(options.mode, options.sources)
    by_file: dict[str, set[str] | None] = {}
    queue: deque[tuple[str, set[str] | None]] = deque()
    for name in options.tests.read_text().splitlines():
        file, _, test = name.partition("::")
        if options.alone:
            queue.append((file, {name}))
        elif test:
            by_file.setdefault(file, set()).add(name)  # type: ignore[union-attr]
        else:
            by_file[file] = None
    queue.extend(by_file.items())
    running: list[Job] = []
    parent = os.getppid()
    while queue or running:
        if os.getppid() != parent:
            for job in running:
                job.child.kill("the command has ended")
            return
        while queue and len(running) < _AT_ONCE:
            file, wanted = queue.popleft()
            running.append(Job(peer, options.sources, file, wanted, options.limit))
        time.sleep(0.05)
        for job in [job for job in running if job.finished()]:
            running.remove(job)
            results, left = job.results()
            with options.log.open("a") as log:
                log.writelines(json.dumps(result) + "\n" for result in results)
            failed = sum(result["outcome"] == "failed" for result in results)
            print(f"{options.mode} {job.file}: {len(results)} tests, {failed} failed", file=sys.stderr, flush=True)
            if left:
                queue.appendleft((job.file, left))


if __name__ == "__main__":
    main()
