"""Lightning counts the TPUs of a host when a Trainer is made."""

from __future__ import annotations

import pytest
from lightning.pytorch.accelerators import XLAAccelerator
from torch_xla._internal import tpu

from tests.isolation import isolated
from xla_adapters import get_runtime


@isolated
def test_a_host_without_chips_has_no_tpus_and_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tpu, "num_available_chips", lambda: 0)
    # As after `import jax`.
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.delenv("TPU_ACCELERATOR_TYPE", raising=False)
    XLAAccelerator.auto_device_count.cache_clear()
    with pytest.raises(TypeError):
        XLAAccelerator.auto_device_count()
    get_runtime().device.initialize()
    assert XLAAccelerator.auto_device_count() == 0
    monkeypatch.setattr(tpu, "num_available_chips", lambda: 4)
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v4-8")
    assert tpu.num_available_devices() == 4
