"""How what a program is told is judged, and a few of the programs."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.explain import __main__ as explain
from benchmarks.explain.measure import Program, Row, Told, judge, measure

PROGRAMS = {program.name: program for program in explain.programs()}


def _with_line() -> None:
    pass  # planted: a fault


def _judged(reports: list[str], *, cause: str | None = r"in topk: 3 -> 2$", graphs: int = 2) -> Row:
    program = Program(name="a fault", loop="step()", run=_with_line, cause=cause, remedy="make it a tensor")
    row = Row("a fault", "step()", harmless=cause is None)
    judge(program, Told(reports, {"step": graphs}), row)
    return row


def _report(
    cause: str = "in topk: 3 -> 2", line: int = _with_line.__code__.co_firstlineno + 1, remedy: str = "make it a tensor"
) -> str:
    return f"step: compiled graph 2 in 1.0 s: {cause}\n  where: {__file__}:{line}: the text\n  what to do: {remedy}"


def test_what_is_right_is_told_from_what_is_wrong() -> None:
    def marks(row: Row) -> tuple[bool, bool, bool, int]:
        return row.cause, row.line, row.remedy, len(row.others)

    assert marks(_judged([_report()])) == (True, True, True, 0)
    assert marks(_judged([_report(), _report()])) == (True, True, True, 0)
    assert marks(_judged([_report(), "another one"])) == (True, True, True, 1)
    assert marks(_judged([_report(line=3)])) == (True, False, True, 0)
    # The line is a prefix of another one's.
    assert marks(_judged([_report(line=(_with_line.__code__.co_firstlineno + 1) * 10)])) == (True, False, True, 0)
    assert marks(_judged([_report(remedy="accept it")])) == (True, True, False, 0)
    assert marks(_judged([_report(cause="in split: 3 -> 2")])) == (False, False, False, 1)
    assert marks(_judged([])) == (False, False, False, 0)
    # A cause that only the text of the line has.
    assert marks(_judged([_report(cause="something").replace("the text", "in topk: 3 -> 2")])) == (False,) * 3 + (1,)
    assert marks(_judged([], cause=None, graphs=1)) == (True, True, True, 0)
    assert marks(_judged([], cause=None, graphs=2)) == (False, False, False, 0)
    assert marks(_judged([_report()], cause=None, graphs=1)) == (False, False, False, 1)


def test_each_fault_is_planted_once() -> None:
    assert len(PROGRAMS) == len(explain.programs())
    for program in PROGRAMS.values():
        if program.cause is not None and program.has_line:
            assert Path(program.planted.rpartition(":")[0]).is_file()


def test_no_program_is_chosen_by_a_wrong_name() -> None:
    assert [program.name for program in explain.named("python int, nonzero")] == ["Python int", "nonzero"]
    with pytest.raises(ValueError, match="no fault is called 'nothing'"):
        explain.named("nothing")


@pytest.mark.parametrize(
    "name",
    [
        "FFT in the backward only",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("autocast toggled", "frozen layer", "Python float")),
    ],
)
def test_a_fault_is_found(name: str) -> None:
    row = measure(PROGRAMS[name], timeout=100)
    assert (row.error, row.cause, row.line, row.remedy, row.others, row.dumps) == (None, True, True, True, [], False)


@pytest.mark.slow
def test_the_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "explain.json"
    assert explain.main(["--only", "EMA after, print", "--markdown", "--json", str(path)]) == 0
    said = capsys.readouterr().out
    assert "| print | CompiledStep | a report | yes | yes | yes | 0 |" in said
    assert path.is_file()
