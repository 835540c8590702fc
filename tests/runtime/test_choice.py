"""Which runtime is used, and what is said where that is not clear."""

from __future__ import annotations

import pytest

from xla_adapters.errors import ConfigError
from xla_adapters.runtime import choice


def _installed(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr(choice, "find_spec", lambda name: object() if name in names else None)


@pytest.mark.parametrize("name", ["torch_xla", "torch_tpu"])
def test_the_one_that_is_installed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    _installed(monkeypatch, name)
    assert choice.installed_runtime() == name


def test_both_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, "torch_xla", "torch_tpu")
    with pytest.raises(ConfigError, match=r'initialize\(runtime="torch_tpu"\)'):
        choice.installed_runtime()


def test_none_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch)
    with pytest.raises(ConfigError, match=r"xla-adapters\[torch-tpu\]"):
        choice.installed_runtime()


def test_one_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, "torch_xla")
    with pytest.raises(ConfigError, match="torch_tpu is not installed"):
        choice.make_runtime("torch_tpu")
    with pytest.raises(ConfigError, match="valid values: 'torch_xla', 'torch_tpu'"):
        choice.make_runtime("jax")
