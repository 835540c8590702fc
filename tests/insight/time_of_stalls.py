"""A clock that stands still but for injected stalls: tests of what time goes to neither wait nor compare times."""

from __future__ import annotations

import pytest

from xla_adapters.insight import run_record
from xla_adapters.insight.times import WallClock

_now = 0.0


def pass_by(seconds: float) -> None:
    """A stall."""
    global _now
    _now += seconds


def use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run records that are made from now on have this clock."""
    monkeypatch.setattr(run_record, "WallClock", lambda: WallClock(lambda: _now))
