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
import transformers

from benchmarks.ecosystem.table import cells
from tests.hf_trainer.scenarios import Sample, arguments, assert_parity, ours, steps_of, traced_and_replayed
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


# Models with LayerDrop draw a number for each layer on the host, in transformers 5.22 also if no layer may be left out.
LAYERS_ARE_DRAWN = transformers.__version__.startswith("5.22.")


def test_a_scheduler_of_diffusers() -> None:
    run = traced_and_replayed(5, make=_Denoiser, data=_noised(), args={"max_steps": 8})
    assert run.counts.compiles == 1


@pytest.mark.parametrize(
    "name",
    [
        "HF Trainer x timm ViT",
        "HF Trainer x CTC speech (Wav2Vec2)",
        "Lightning x PyG GCN (edges normalized with the data)",
        "Lightning x PyG GCN",
        "sentence-transformers x encoder, CoSENT loss",
    ],
)
def test_a_model(name: str) -> None:
    (cell,) = (cell for cell in cells() if cell.name == name)
    cell.prepare()
    trained, expected = cell.train("error"), cell.train(None)
    assert trained.replays is not None
    if LAYERS_ARE_DRAWN and "Wav2Vec2" in name:
        assert (trained.replays, [*trained.reasons]) == (0, ["the step draws random numbers on the host"])
    else:
        assert trained.replays >= 3
    assert trained.compiles == 1
    assert max(abs(a - b) for a, b in zip(trained.losses, expected.losses, strict=True)) < 1e-5


_TEXT: dict[str, Any] = {
    **{"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1},
    **{"num_attention_heads": 4, "num_key_value_heads": 2},
}
_IMAGE = 99


def _with_image(index: int, at: int, **more: torch.Tensor) -> Sample:
    """A text in which four tokens stand for an image, from position `at` on."""
    ids = torch.randint(5, 90, (12,), generator=torch.Generator().manual_seed(index))
    ids[at : at + 4] = _IMAGE
    return {"input_ids": ids, "labels": torch.where(ids == _IMAGE, -100, ids), **more}


def _llava() -> tuple[Any, list[Sample]]:
    vision = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8
    )
    config = transformers.LlavaConfig(
        vision_config=vision,
        text_config=transformers.LlamaConfig(**_TEXT),
        image_token_index=_IMAGE,
        image_seq_length=4,
    )
    data = [_with_image(index, index % 3, pixel_values=torch.full((3, 16, 16), index / 8)) for index in range(16)]
    return transformers.LlavaForConditionalGeneration(config), data


def _qwen() -> tuple[Any, list[Sample]]:
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    config = transformers.Qwen2VLConfig(
        vision_config={"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4},
        text_config={**_TEXT, "rope_parameters": rope},
        image_token_id=_IMAGE,
        vision_start_token_id=98,
    )
    patches = {"pixel_values": torch.linspace(-1, 1, 96).repeat(16, 1), "image_grid_thw": torch.tensor([1, 4, 4])}
    data = [_with_image(index, 2, **patches) for index in range(16)]
    for row in data:
        row["mm_token_type_ids"] = (row["input_ids"] == _IMAGE).long()
    return transformers.Qwen2VLForConditionalGeneration(config), data


def _bart() -> tuple[Any, list[Sample]]:
    config = transformers.BartConfig(
        **{"vocab_size": 128, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2},
        **{"decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "dropout": 0.0},
        **{"eos_token_id": 2, "max_position_embeddings": 32},
    )
    data = []
    for index in range(16):
        ids = torch.randint(5, 90, (12,), generator=torch.Generator().manual_seed(index))
        ids[-1 - index % 4] = 2
        data.append({"input_ids": ids, "labels": torch.tensor(index % 3)})
    return transformers.BartForSequenceClassification(config), data


def _collated(rows: list[Sample]) -> Sample:
    return {
        name: torch.cat([row[name] for row in rows])
        if name == "pixel_values" and rows[0][name].ndim == 2
        else torch.stack([row[name] for row in rows])
        for name in rows[0]
    }


@pytest.mark.parametrize(("make", "replays"), [(_llava, 5), (_qwen, 0), (_bart, 0 if LAYERS_ARE_DRAWN else 5)])
def test_models_that_look_at_tokens(make: Any, replays: int) -> None:
    """Qwen's keeps a tensor in an attribute, which a replay could not, and has a graph for each place of its images."""

    def model() -> Any:
        torch.manual_seed(0)
        return make()[0]

    args = {"max_steps": 8, "remove_unused_columns": False, "learning_rate": 1e-3}
    run = assert_parity(model, make()[1], args=args, data_collator=_collated)
    assert (run.counts.compiles, max(step.executions for step in run.steps)) == (1, 1)
    assert steps_of(run.trainer).train.replays >= replays


def test_what_a_model_checks_is_said_as_on_the_cpu() -> None:
    model, data = _bart()
    data[9]["input_ids"][3] = 2
    with pytest.raises(ValueError, match="same number of <eos> tokens"):
        ours(model, data, args=arguments(max_steps=8))


@pytest.mark.parametrize("library", [diffusers, sentence_transformers, timm, torch_geometric])
def test_another_version_is_not_trusted(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    file = str(library.__file__)
    assert trusted.is_trusted_file(file)
    monkeypatch.setattr(library, "__version__", "99.1")
    for function in (trusted.is_trusted_file, trusted.is_library_file):
        function.cache_clear()
    assert not trusted.is_trusted_file(file)
