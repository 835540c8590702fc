"""The events of a run as JSON lines: appended, whole, and never the end of a training."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.isolation import ChildFailed, run_in_child
from xla_adapters.insight.run_record import NAME, EventFile


def lines(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / NAME).read_text().splitlines()]


def test_it_is_made_with_the_first_event_and_added_to(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for number in range(2):
        file = EventFile(folder)
        assert folder.exists() == bool(number)
        file.write("compile", {"number": number})
        file.close()
    assert [(line["event"], line["number"]) for line in lines(folder)] == [("compile", 0), ("compile", 1)]


def test_nothing_is_written_without_a_folder() -> None:
    file = EventFile(None)
    file.write("compile", {})
    file.close()
    assert file.path is None


def test_a_killed_run_leaves_whole_lines(tmp_path: Path) -> None:
    def run() -> None:
        file = EventFile(tmp_path)
        for number in range(100):
            file.write("compile", {"number": number, "reason": "x" * 10_000})
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(ChildFailed):
        run_in_child(run)
    assert [line["number"] for line in lines(tmp_path)] == list(range(100))


def test_a_torn_line_of_an_earlier_run_does_not_spoil_the_next(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text('{"event": "comp')
    file = EventFile(tmp_path)
    file.write("end", {"steps": 3})
    file.close()
    assert json.loads((tmp_path / NAME).read_text().splitlines()[1])["steps"] == 3


def test_a_file_that_cannot_be_written_is_a_warning_once(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file where the folder should be")
    file = EventFile(tmp_path / "run")
    with pytest.warns(UserWarning, match="no further events are written"):
        file.write("compile", {})
    file.write("compile", {})
    file.close()
