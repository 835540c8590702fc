"""Each Trainer or Fabric that a test makes for one process on one device, without a strategy, gets one."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

counts = {"trainers": 0, "replaceable": 0}
_mode = ""
_SEVERAL = ("ddp", "fsdp", "deepspeed", "xla", "parallel", "tpu")


def prepare(mode: str, sources: Path) -> None:
    """Imports everything, and puts the strategies in place."""
    global _mode
    _mode = mode
    os.environ.update(PJRT_DEVICE="CPU", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    # A test of Lightning's fails if variables are added to the environment; this one is set when torch_xla starts.
    os.environ.setdefault("PT_XLA_DEBUG_FILE", os.devnull)
    sys.path.insert(0, str(sources / "tests"))
    if mode == "cpu":
        sys.modules["torch_xla"] = None  # type: ignore[assignment]
    import lightning.fabric.fabric as fabric
    import lightning.pytorch.cli  # noqa: F401
    import sklearn.datasets  # noqa: F401
    import torchmetrics  # noqa: F401
    from lightning.pytorch.trainer import trainer

    trainer._AcceleratorConnector = _with(trainer._AcceleratorConnector, "XLAEagerStrategy")  # type: ignore[misc]
    fabric._Connector = _with(fabric._Connector, "XLAEagerFabricStrategy")  # type: ignore[misc]
    if mode == "ours":
        import lightning_strategy  # noqa: F401


def begin() -> None:
    """In each child: starts the runtime, as a test's own counts and environment must not see it start."""
    if _mode == "ours":
        import torch

        from xla_adapters import get_runtime, initialize

        initialize()
        torch.zeros(2, device="xla").sum().item()
        _ = get_runtime().replay_works


def _with(connector: Any, strategy: str) -> Any:
    def make(**arguments: Any) -> Any:
        if why := _several(arguments):
            import pytest

            pytest.skip(f"{why}: not for one process on one device")
        counts["trainers"] += 1
        if _is_replaceable(arguments):
            counts["replaceable"] += 1
            if _mode == "ours":
                given = getattr(sys.modules["lightning_strategy"], strategy)()
                arguments |= {"strategy": given, "accelerator": "auto", "devices": "auto"}
        return connector(**arguments)

    return make


def _several(arguments: dict[str, Any]) -> str | None:
    from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy

    strategy, devices = arguments.get("strategy"), arguments.get("devices")
    if (isinstance(strategy, str) and any(name in strategy for name in _SEVERAL)) or isinstance(
        strategy, DDPStrategy | FSDPStrategy
    ):
        return f"strategy={strategy}"
    count = len(devices) if isinstance(devices, list) else int(devices) if str(devices).isdigit() else 1
    if count > 1 and not isinstance(devices, bool):
        return f"devices={devices}"
    if arguments.get("accelerator") in ("gpu", "cuda", "mps", "tpu"):
        return f"accelerator={arguments['accelerator']}"
    return None


def _is_replaceable(arguments: dict[str, Any]) -> bool:
    from lightning.fabric.plugins import ClusterEnvironment

    plugins = arguments.get("plugins") or []
    return (
        arguments.get("strategy") in ("auto", None)
        and arguments.get("accelerator") in (None, "auto", "cpu")
        and not isinstance(arguments.get("devices"), bool)
        and arguments.get("devices") in (None, "auto", 1, "1", -1, "-1", [0])
        and arguments.get("num_nodes", 1) == 1
        and not any(
            isinstance(each, ClusterEnvironment) for each in (plugins if isinstance(plugins, list) else [plugins])
        )
    )
