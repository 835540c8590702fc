"""A few architectures compile for TPUs; what cannot be traced has its reason in the table."""

from __future__ import annotations

from importlib import util

import pytest

from benchmarks import tpu_compile, zoo
from benchmarks.tpu_compile import Row, main, measure, table_of
from xla_adapters.tools.tpu_compiler import Target


def test_the_table_says_why_something_does_not_compile() -> None:
    good = Row("good", "v5e:2x2", arguments=1, temporaries=2, sent=3.0, trace_seconds=1.0, compile_seconds=2.0)
    text = table_of([good, Row("bad", "v6e:2x2", reason="not compiled: E1000")])
    assert "bad on v6e:2x2: not compiled: E1000" in text
    assert "good on" not in text


def test_an_architecture_that_cannot_be_traced_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("this model reads")

    monkeypatch.setattr(tpu_compile, "trace", refuse)
    row = measure(zoo.named("GPT-2")[0], Target.parse("v5e:2x2"), 60, bf16=False)
    assert not row.ok
    assert "this model reads" in str(row.reason)


@pytest.mark.slow
@pytest.mark.skipif(
    util.find_spec("libtpu") is None or util.find_spec("pypjrt") is None,
    reason='libtpu or pypjrt is not installed: pip install "xla-adapters[preflight]"',
)
def test_a_few_architectures_compile() -> None:
    arguments = ["--only", "DistilBERT,ResNet", "--topologies", "v5e:2x2", "--at-least", "2", "--check"]
    assert main(arguments) == 0
