"""Models of images and texts, of sound, and of objects in pictures: one execution per step, with the CPU's numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

for _library in ("diffusers", "peft", "sentence_transformers", "timm", "torch_geometric", "trl"):
    pytest.importorskip(_library)

from benchmarks.ecosystem import with_lightning, with_transformers  # noqa: E402
from benchmarks.ecosystem.cell import LOSS_LIMIT, WEIGHT_LIMIT, Row, Trained  # noqa: E402
from benchmarks.ecosystem.table import multimodal  # noqa: E402
from benchmarks.ecosystem.vision_language import VISION_LANGUAGE  # noqa: E402
from benchmarks.zoo import Batch, Model  # noqa: E402
from xla_adapters import TensorReadError  # noqa: E402
from xla_adapters.config import OnGraphBreak  # noqa: E402

pytestmark = pytest.mark.isolated

_slow = functools.partial(pytest.param, marks=pytest.mark.slow)


def _compared(train: Callable[[OnGraphBreak | None], Trained], mode: OnGraphBreak = "error") -> Row:
    """What a training shows, compared with the one on plain CPU torch."""
    row = Row("trainer", "model", loss_limit=LOSS_LIMIT, weight_limit=WEIGHT_LIMIT)
    row.take(train(mode), train(None))
    assert row.equal, row
    return row


def _train_of(name: str) -> Callable[[OnGraphBreak | None], Trained]:
    (cell,) = (cell for cell in multimodal() if cell.model == name)
    return cell.train


@pytest.mark.parametrize(
    "name",
    [
        # Texts of other lengths around pictures of several sizes.
        "Qwen2-VL",
        # Which pictures are there is found by the values of the batch.
        "SmolVLM",
        "Wav2Vec2 (CTC, padded)",
        *map(_slow, ("LLaVA", "LLaVA-NeXT", "LLaVA-OneVision", "Qwen2.5-VL", "Qwen3-VL", "PaliGemma", "Idefics3")),
        *map(_slow, ("Gemma 3 (images)", "InternVL", "BLIP-2", "HuBERT (CTC, padded)")),
    ],
)
def test_a_model_trains_as_one_graph_and_is_replayed(name: str) -> None:
    row = _compared(_train_of(name))
    assert (row.compiles, row.executions, row.replays) == (1, 1, 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Qwen2-VL", "LLaVA", "PaliGemma"])
def test_gradient_checkpointing_and_lightning(name: str) -> None:
    (model,) = (one for one in VISION_LANGUAGE if one.name == name)
    (recomputing,) = with_transformers.plain((model,), gradient_checkpointing=True)
    (lightning,) = with_lightning.trainer((model,))
    for cell in (recomputing, lightning):
        row = _compared(cell.train)
        assert (row.compiles, row.executions) == (1, 1), cell.trainer


class _Turned(Model):
    """Qwen2-VL with pictures in another order in its last two batches, which have the shapes of the others."""

    def batches(self, count: int) -> list[Batch]:
        (other,) = (one for one in VISION_LANGUAGE if one.name == "Qwen2-VL (sizes in another order)")
        return [*super().batches(count)[:4], *other.batches(count)[4:]]


def test_a_batch_with_other_grids_is_another_program() -> None:
    """Pictures change places after steps were replayed: nothing of the batch has another shape."""
    (model,) = (one for one in VISION_LANGUAGE if one.name == "Qwen2-VL")
    (cell,) = with_transformers.plain((_Turned(**vars(model)),))
    row = _compared(cell.train)
    assert row.executions == 1
    assert row.replays == 2


def test_a_matcher_on_the_host_costs_one_more_execution() -> None:
    """DETR matches boxes in the middle of the step. Its checks, clamps and counts of boxes split nothing."""
    train = _train_of("DETR")
    row = _compared(train, "warn")
    assert (row.compiles, row.executions) == (2, 2)
    with pytest.raises(TensorReadError, match=r"loss_for_object_detection\.py"):
        train("error")


@pytest.mark.slow
def test_each_auxiliary_matching_costs_an_execution() -> None:
    assert _compared(_train_of("DETR (auxiliary loss)"), "warn").executions == 3
