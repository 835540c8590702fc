"""What `xla-adapters check` makes of what it saw: findings, remedies, the page."""

from __future__ import annotations

from typing import Any

import pytest

from xla_adapters.tools.check_facts import (
    Compile,
    DtypeUse,
    Facts,
    HostOperator,
    LoaderFacts,
    Place,
    StepFacts,
    Told,
)
from xla_adapters.tools.check_findings import dtype_remedy, findings, read_remedy
from xla_adapters.tools.check_report import CheckReport


@pytest.mark.parametrize(
    ("line", "patch"),
    [
        ("total += loss.item()", "+total += loss.detach()"),
        ("self.log('x', outputs.loss.detach().cpu().item())", "+self.log('x', outputs.loss.detach())"),
        ("values.append(float(loss))", "+values.append(loss.detach())"),
        ("best = losses[0].tolist()", "+best = losses[0].detach()"),
        ("kept = logits.argmax(-1).cpu()", "+kept = logits.argmax(-1).detach()"),
        ("print(loss)", "-print(loss)"),
        ("assert loss > 0", "-assert loss > 0"),
        ("xm.mark_step()", "-xm.mark_step()"),
        ("values = logits.cpu().numpy()", "+values = logits.detach()"),
        ("if loss.item() > 3:", ""),
        # With a tensor these would read it all the same.
        ("best = min(best, loss.item())", ""),
        ("kept = hidden[:, : lengths.max().item()]", ""),
        ("history.append(f'{loss.item():.3f}')", ""),
        ("log('loss', round(loss.item(), 3))", ""),
        ("is_high = loss.item() > 3", ""),
        ("metric.update(loss)", ""),
    ],
)
def test_remedies_of_reads(line: str, patch: str) -> None:
    found = read_remedy(line)[1].splitlines()
    assert (found[-1] if found else "") == patch


def test_remedies_of_dtypes() -> None:
    assert dtype_remedy("float64", "x = y.double()")[1] == "-x = y.double()\n+x = y.float()"
    assert dtype_remedy("float16", "x = y.half()")[1] == "-x = y.half()\n+x = y.bfloat16()"
    assert dtype_remedy("float64", "x = f(y)") == ("use float32", "")


def _facts(**values: Any) -> Facts:
    steps = {"train": StepFacts(calls=6, updates=6, replays=3, may_replay=True, executions=[1] * 6)}
    return Facts(**{"asked": 6, "state": "stopped", "steps": steps, **values})


def test_recompiles_of_one_cause_are_one_finding() -> None:
    reasons = [f"x: (8, {length}) -> (8, {length + 1})\n  what to do: pad" for length in (5, 6, 7)]
    compiles = [
        Compile(step="train", call=call, seconds=1.5, reason=reason, is_first=call == 2)
        for call, reason in enumerate(reasons, 2)
    ]
    (found,) = findings(_facts(compiles=compiles))
    assert found.title == "call 3, 4 of train compiled another graph, 3.0 s in all: x: (8, 7) -> (8, 8)"
    assert (found.is_problem, found.to_do) == (True, "pad")


def test_the_compile_of_the_last_batch_is_one_finding_with_it() -> None:
    def compiled(call: int, reason: str) -> Compile:
        return Compile(step="train", call=call, seconds=1.5, reason=f"{reason}\n  what to do: pad", is_first=call == 1)

    last = compiled(8, "x: (8, 5) int64 -> (4, 5) int64; y: (8,) int64 -> (4,) int64")
    # Trainers make a loader for each evaluation.
    loaders = [
        LoaderFacts(place=Place(file="a.py", line=number), samples=60, batch=8, last=4, trains=number == 3)
        for number in (3, 5, 5)
    ]
    found = findings(_facts(compiles=[compiled(1, "first"), last], loaders=loaders))
    assert [(finding.kind, finding.is_problem, finding.place.line) for finding in found] == [
        ("last batch", True, 3),
        ("last batch", False, 5),
    ]
    assert found[0].details == "call 8 of train compiled it, 1.5 s"
    longer = compiled(8, "x: (8, 5) int64 -> (4, 6) int64; y: (8,) int64 -> (4,) int64")
    found = findings(_facts(compiles=[longer], loaders=loaders[:1]))
    assert [finding.kind for finding in found] == ["recompile", "last batch"]
    assert not found[1].details


def test_what_is_never_replayed_says_so() -> None:
    facts = _facts()
    for step, said in (
        (StepFacts(calls=6, updates=6), "as the body of `with step()` must run"),
        (StepFacts(calls=6, updates=6, is_managed=True), "as all steps of Fabric"),
        (StepFacts(calls=6, updates=6, is_managed=True, may_replay=True), "two calls alike were not seen yet"),
    ):
        facts.steps["train"] = step
        (found,) = findings(facts)
        assert (found.kind, found.is_problem) == ("traced", False)
        assert said in found.title


def test_the_remedy_of_a_host_operator_is_that_of_the_graph_break() -> None:
    operators = [HostOperator(names=["_fft_r2c"], place=Place()), HostOperator(names=["_unknown"], place=Place())]
    fft, unknown = findings(_facts(host_operators=operators))
    assert "multiply by the matrix of the transform" in fft.to_do
    assert "compute it in the dataset" in unknown.to_do


def test_a_graph_that_a_break_explains_is_no_problem_of_its_own() -> None:
    facts = _facts(
        compiles=[
            Compile(step="train", call=2, seconds=1.0, reason="it takes another path: it comes to add", is_first=False)
        ]
    )
    assert [finding.is_problem for finding in findings(facts)] == [True]
    facts.steps["train"].executions = [2] * 6
    assert [finding.is_problem for finding in findings(facts)] == [False]


@pytest.mark.parametrize(("padding", "is_problem"), [(20, False), (30, True)])
def test_padding_counts_from_a_quarter(padding: int, is_problem: bool) -> None:
    loader = LoaderFacts(place=Place(), batches=1, tokens=100, padding=padding, known_by="attention_mask", trains=True)
    (found,) = findings(_facts(loaders=[loader]))
    assert found.is_problem == is_problem
    loader.trains = False
    assert [finding.is_problem for finding in findings(_facts(loaders=[loader]))] == [False]


def test_other_findings() -> None:
    facts = _facts(
        told=[Told(category="EagerOptimizerWarning", message="LBFGS runs eagerly")],
        host_operators=[HostOperator(names=["_ctc_loss_backward"], place=Place(), calls=2)],
        dtypes=[DtypeUse(dtype="complex64", what="view_as_complex", place=Place())],
    )
    facts.steps["train"] = StepFacts(calls=6, updates=6, may_replay=True, reasons={"it prints (a.py:3)": 6})
    facts.steps["train"].eager_operations = [4, 4, 5]
    found = [(finding.kind, finding.is_problem) for finding in findings(facts)]
    assert found == [
        ("host operator", True),
        ("on a TPU", True),
        ("EagerOptimizerWarning", False),
        ("traced", False),
        ("eager operations", False),
    ]


def test_the_page_escapes_what_it_shows() -> None:
    told = Told(category="GraphBreakWarning", message="tensor read inside the step 'a': <b>&\n  cost: much")
    report = CheckReport(command="a<b>.py", facts=_facts(told=[told], skipped=["<i>"]))
    text = report.page()
    assert "<b>&" not in text.replace("<b>What to do", "")
    assert "<i>" not in text
    assert "&lt;b&gt;&amp;" in text
    assert text.count("<section") == 1
