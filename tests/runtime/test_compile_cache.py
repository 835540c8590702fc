"""`initialize(cache_dir=)`: says where the cache cannot be loaded; elsewhere it is used, and counted."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

import xla_adapters
from tests.isolation import isolated, run_in_child
from xla_adapters import RuntimeOrderError
from xla_adapters.runtime.torch_xla import compile_cache


@isolated
def test_a_device_that_cannot_load_says_so_once_and_writes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    with pytest.warns(UserWarning, match="cannot load executables on CPU devices") as said:
        xla_adapters.initialize(cache_dir=str(folder))
    assert said[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        xla_adapters.initialize(cache_dir=str(folder))
    (torch.ones(2, device="xla") + 1).cpu()
    assert not folder.exists()
    assert xla_adapters.get_runtime().counters.compile_cache() == {"hits": 0, "misses": 0, "failures": 0}


def _counted(folder: Path) -> dict[str, int]:
    """What is counted where executables are taken to be loadable, though those of the CPU are not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile_cache, "_CANNOT_LOAD", {})
        xla_adapters.initialize(cache_dir=str(folder))
        # Changes nothing.
        xla_adapters.initialize(cache_dir=str(folder))
        with pytest.raises(RuntimeOrderError, match=r"initialize\(cache_dir=\.\.\.\)"):
            xla_adapters.initialize(cache_dir=str(folder / "other"))
    value = torch.ones(2, device="xla")
    with xla_adapters.step():
        value.add_(1)
    assert value.tolist() == [2, 2]
    return xla_adapters.get_runtime().counters.compile_cache()


def test_misses_and_failures_are_counted(tmp_path: Path) -> None:
    first = run_in_child(lambda: _counted(tmp_path))
    kept = list(tmp_path.iterdir())
    assert first == {"hits": 0, "misses": len(kept), "failures": 0}
    assert kept
    assert run_in_child(lambda: _counted(tmp_path)) == {"hits": 0, "misses": 0, "failures": len(kept)}
