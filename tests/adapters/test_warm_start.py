"""The second start of a training compiles nothing; nor does one that resumes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.isolation import outcome_of, run_in_child
from tests.runtime import warm_trainings as warm
from xla_adapters.runtime.compile_cache import why_missing

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(why_missing() is not None, reason="there was no C compiler at the installation"),
]

_SIZE = 1, 16
_ENV = {"XLA_ADAPTERS_CACHE_DIR": ""}


@pytest.mark.parametrize(
    "name",
    [
        *(
            name if name in ("HF evaluation", "Lightning") else pytest.param(name, marks=pytest.mark.long)
            for name in warm.TRAININGS
        ),
        "Lightning, fsdp",
    ],
)
def test_the_second_start_compiles_nothing(name: str, tmp_path: Path) -> None:
    first, again = (run_in_child(partial(warm.train, name, *_SIZE, tmp_path), env=_ENV) for _ in range(2))
    assert first.compiles > 0
    assert (again.compiles, again.loads) == (0, first.compiles)
    assert again.losses == first.losses


def test_a_run_that_was_killed_resumes_without_a_compile(tmp_path: Path) -> None:
    output = str(tmp_path / "output")
    whole = run_in_child(partial(warm.train, "HF Trainer", *_SIZE, tmp_path / "others"), env=_ENV)

    def run(function: Any) -> Any:
        return outcome_of(partial(function, *_SIZE, tmp_path / "programs", output), timeout=200, env=_ENV)

    assert run(warm.killed).error
    resumed = run(warm.resumed).value
    assert resumed.compiles == 0
    assert resumed.losses == whole.losses
