"""Models of libraries that are trusted in the versions that were read: they are replayed, as the traced steps train."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")
import diffusers
import sentence_transformers
import timm
import torch_geometric

from benchmarks.ecosystem.table import cells
from tests.hf_trainer.scenarios import Sample, traced_and_replayed
from xla_adapters.replay.safety import trusted

pytestmark = pytest.mark.isolated


class _Denoiser(torch.nn.Module):
    """As the programs of diffusers: its scheduler is no module, and moves its tensors to the device when it is used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 4)
        self.scheduler = diffusers.DDPMScheduler(num_train_timesteps=20)

    def forward(self, x: torch.Tensor, noise: torch.Tensor, times: torch.Tensor) -> dict[str, torch.Tensor]:
        predicted = self.layer(self.scheduler.add_noise(x, noise, times))
        return {"loss": torch.nn.functional.mse_loss(predicted, noise)}


def _noised() -> list[Sample]:
    generator = torch.Generator().manual_seed(0)

    def noise() -> torch.Tensor:
        return torch.randn(4, generator=generator)

    return [{"x": noise(), "noise": noise(), "times": torch.tensor(at)} for at in range(16)]


def test_a_scheduler_of_diffusers() -> None:
    run = traced_and_replayed(5, make=_Denoiser, data=_noised(), args={"max_steps": 8})
    assert run.counts.compiles == 1


@pytest.mark.parametrize(
    "name",
    [
        "HF Trainer x timm ViT",
        "Lightning x PyG GCN (edges normalized with the data)",
        "sentence-transformers x encoder, CoSENT loss",
    ],
)
def test_a_model(name: str) -> None:
    (cell,) = (cell for cell in cells() if cell.name == name)
    cell.prepare()
    trained, expected = cell.train("error"), cell.train(None)
    assert trained.replays is not None
    assert trained.replays >= 3
    assert trained.compiles == 1
    assert max(abs(a - b) for a, b in zip(trained.losses, expected.losses, strict=True)) < 1e-5


@pytest.mark.parametrize("library", [diffusers, sentence_transformers, timm, torch_geometric])
def test_another_version_is_not_trusted(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    file = str(library.__file__)
    assert trusted.is_trusted_file(file)
    monkeypatch.setattr(library, "__version__", "99.1")
    for function in (trusted.is_trusted_file, trusted.is_library_file):
        function.cache_clear()
    assert not trusted.is_trusted_file(file)
