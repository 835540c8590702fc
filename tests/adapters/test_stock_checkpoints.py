"""A training moves between the stock trainers on the plain CPU and ours by its checkpoints, in both directions."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_strategy import XLAEagerFabricStrategy, XLAEagerStrategy
from tests.hf_trainer import scenarios
from tests.hf_trainer.scenarios import Classifier, Run, arguments, assert_close, on_cpu, ours, vector_samples
from tests.lightning_strategy import scenarios as of_lightning
from xla_adapters import get_runtime
from xla_adapters.tracing.optimizers import keep_own_kernels

pytestmark = pytest.mark.isolated

SAVED = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2}


def stock_hf(folder: Path, *, resume: str | None = None, **options: Any) -> Run:
    with on_cpu(Classifier(), vector_samples(16), args={"output_dir": str(folder), **SAVED, **options}) as trainer:
        return scenarios.train(trainer, resume_from_checkpoint=resume)


def test_ours_goes_on_from_a_checkpoint_of_the_cpu(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whose default optimizer is a fused one there, and which has no random numbers of the device."""
    whole = stock_hf(tmp_path)
    path = tmp_path / "checkpoint-2"
    assert torch.load(path / "optimizer.pt")["param_groups"][0]["fused"] is True
    with caplog.at_level(logging.WARNING, logger="hf_trainer.resume"):
        rest = ours(
            Classifier(seed=1),
            vector_samples(16),
            args=arguments(str(tmp_path), **SAVED),
            train_options={"resume_from_checkpoint": str(path)},
        )
    assert_close(rest.losses[-4:], whole.losses[2:])
    assert [step.executions for step in rest.steps] == [1] * 4
    if get_runtime().device.torch_device().type == "xla":
        assert [record.getMessage() for record in caplog.records if "another kind of device" in record.getMessage()]


def test_stock_goes_on_from_a_checkpoint_of_ours(tmp_path: Path) -> None:
    whole = ours(Classifier(), vector_samples(16), args=arguments(str(tmp_path), **SAVED))
    rest = stock_hf(tmp_path, resume=str(tmp_path / "checkpoint-2"))
    assert_close(rest.losses[-4:], whole.losses[2:])


def lightning(folder: Path, *, resume: Path | None = None, fused: bool = False, **options: Any) -> list[float]:
    torch.manual_seed(0)
    module = of_lightning.Classifier(
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2, **({"fused": True} if fused else {}))
    )
    # In the middle of an epoch stock Lightning would begin its data anew.
    keep = ModelCheckpoint(folder, filename="{step}", every_n_epochs=1, save_top_k=-1)
    trainer = L.Trainer(max_epochs=2, callbacks=[keep], logger=False, enable_progress_bar=False, **options)
    trainer.fit(module, of_lightning.loader(2), ckpt_path=None if resume is None else str(resume))
    return module.losses


@pytest.mark.parametrize("to_ours", [True, False])
def test_lightning(to_ours: bool, tmp_path: Path) -> None:
    get_runtime().device.initialize()
    stock: dict[str, Any] = {"accelerator": "cpu", "fused": to_ours}
    first, second = (stock, {"strategy": XLAEagerStrategy()}) if to_ours else ({"strategy": XLAEagerStrategy()}, stock)
    whole = lightning(tmp_path, **first)
    rest = lightning(tmp_path / "rest", resume=tmp_path / "step=2.ckpt", **second)
    assert_close(rest, whole[2:])


def test_fabric_loads_a_fused_optimizer(tmp_path: Path) -> None:
    get_runtime().device.initialize()
    host = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(host.parameters(), fused=True)
    host(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    torch.save({"optimizer": optimizer.state_dict()}, tmp_path / "host.ckpt")
    fabric = L.Fabric(strategy=XLAEagerFabricStrategy())
    model = torch.nn.Linear(4, 2)
    wrapped, loaded = fabric.setup(model, torch.optim.AdamW(model.parameters()))
    fabric.load(tmp_path / "host.ckpt", {"optimizer": loaded})
    assert not loaded.param_groups[0]["fused"]
    assert [state["step"].item() for state in loaded.state.values()] == [1, 1]
    wrapped(torch.ones(1, 4, device=fabric.device)).sum().backward()
    loaded.step()


def test_other_options_of_a_group_are_those_that_were_saved() -> None:
    saved = torch.optim.AdamW([torch.zeros(2, requires_grad=True)], lr=0.5, fused=True, amsgrad=True).state_dict()
    optimizer = torch.optim.AdamW([torch.zeros(2, requires_grad=True)], lr=0.1)
    keep_own_kernels(optimizer)
    optimizer.load_state_dict(saved)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["amsgrad"], group["fused"]) == (0.5, True, None)
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict({**saved, "param_groups": saved["param_groups"] * 2})
