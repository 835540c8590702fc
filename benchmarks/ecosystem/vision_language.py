"""Models of images and texts of transformers, with several images in a text, at other places in each batch."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from benchmarks import zoo
from benchmarks.zoo import BATCH, GROUPED, MLP, NO_HIDDEN_DROPOUT, PADDED, SIZES, TOKENS, VOCABULARY, Batch, Model
from benchmarks.zoo import of_transformers as of

PIXELS, PATCH, IMAGE_TOKEN = 16, 4, 90
# How many images the texts of a batch have; each batch has these in another order.
_IMAGES = (2, 0, 1, 1)
_LENGTH = 20
_VISION: dict[str, Any] = {**SIZES, **MLP, "image_size": PIXELS, "patch_size": PATCH}
_PLAIN_TEXT: dict[str, Any] = {**SIZES, **MLP, **TOKENS, **PADDED, "max_position_embeddings": 256}
_TEXT: dict[str, Any] = {**_PLAIN_TEXT, **GROUPED}
_LLAMA, _QWEN2 = ({"model_type": kind, **_TEXT} for kind in ("llama", "qwen2"))
_CLIP: dict[str, Any] = {"model_type": "clip_vision_model", **_VISION, "projection_dim": 16}
_SIGLIP: dict[str, Any] = {"model_type": "siglip_vision_model", **_VISION, "vision_use_head": False}
_INDEX, _ID = {"image_token_index": IMAGE_TOKEN}, {"image_token_id": IMAGE_TOKEN}
_TILES = [[PIXELS, 2 * PIXELS], [2 * PIXELS, PIXELS], [2 * PIXELS, 2 * PIXELS]]
# The most of a picture, with the whole of it.
_MOST_TILES = 5
# Height and width of a picture in Qwen's patches.
_GRIDS = ((1, 4, 4), (1, 2, 4), (1, 4, 2), (1, 2, 2))


def texts_with_images(
    generator: torch.Generator, images: list[list[int]], *, around: tuple[int, int] | None = None
) -> Batch:
    """Texts with places for images and padding at their ends; labels are the tokens of the texts.

    Args:
        generator: draws the tokens and where the images are.
        images: how many tokens stand for each of the images of each text.
        around: tokens before and after an image.
    """
    before, after = ([], []) if around is None else ([around[0]], [around[1]])
    # The same for all orders of these images.
    length = _LENGTH + sum(sorted(count + len(before + after) for counts in images for count in counts)[-2:])
    rows = []
    for counts in images:
        row: list[int] = []
        for count in counts:
            words = int(torch.randint(1, 3, (), generator=generator))
            row += torch.randint(3, 80, (words,), generator=generator).tolist()
            row += [*before, *[IMAGE_TOKEN] * count, *after]
        words = int(torch.randint(4, 10, (), generator=generator))
        row += torch.randint(3, 80, (words,), generator=generator).tolist()
        rows.append(row + [0] * (length - len(row)))
    tokens = torch.tensor(rows)
    labels = tokens.masked_fill((tokens >= 80) | (tokens == 0), -100)
    return {"input_ids": tokens, "attention_mask": (tokens != 0).long(), "labels": labels}


def pictures(generator: torch.Generator, *shape: int, pixels: int = PIXELS) -> torch.Tensor:
    """Random pictures."""
    return torch.randn(*shape, 3, pixels, pixels, generator=generator)


def _shared(generator: torch.Generator) -> list[int]:
    return [_IMAGES[index] for index in torch.randperm(BATCH, generator=generator).tolist()]


def _flat(tokens: int, around: tuple[int, int] | None = None) -> Callable[[torch.Generator], Batch]:
    """Batches whose pictures are in one list, each with so many tokens."""

    def batch(generator: torch.Generator) -> Batch:
        images = [[tokens] * count for count in _shared(generator)]
        texts = texts_with_images(generator, images, around=around)
        return {**texts, "pixel_values": pictures(generator, sum(_IMAGES))}

    return batch


def _one_each(tokens: int, generator: torch.Generator) -> Batch:
    """A picture per text."""
    texts = texts_with_images(generator, [[tokens]] * BATCH)
    return {**texts, "pixel_values": pictures(generator, BATCH)}


def _typed(batch: Callable[[torch.Generator], Batch], generator: torch.Generator) -> Batch:
    """The batch, and which of its tokens stand for an image."""
    made = batch(generator)
    return {**made, "token_type_ids": (made["input_ids"] == IMAGE_TOKEN).long()}


def _answers(generator: torch.Generator) -> Batch:
    """A batch as PaliGemma takes it: 1 stands for what is to be answered."""
    made = _one_each(16, generator)
    return {**made, "token_type_ids": (made["labels"] != -100).long()}


@functools.cache
def _lengths(build: Callable[[], nn.Module], sizes: tuple[tuple[int, int], ...]) -> list[int]:
    """How many tokens stand for pictures of these sizes, of a model that cuts them into tiles."""
    net: Any = build().model
    with torch.no_grad():
        features = net.get_image_features(
            torch.zeros(len(sizes), _MOST_TILES, 3, PIXELS, PIXELS), image_sizes=torch.tensor(sizes)
        )
    return [len(one) for one in features.pooler_output]


def _tiled(build: Callable[[], nn.Module], generator: torch.Generator) -> Batch:
    """Pictures of several sizes, padded to as many tiles as the largest has."""
    sizes = ((PIXELS, 2 * PIXELS), (2 * PIXELS, 2 * PIXELS - 6), (2 * PIXELS, PIXELS), (30, 32))
    with torch.random.fork_rng():
        lengths = iter(_lengths(build, sizes))
    images = [list(itertools.islice(lengths, count)) for count in _shared(generator)]
    return {
        **texts_with_images(generator, images),
        "pixel_values": pictures(generator, len(sizes), _MOST_TILES),
        "image_sizes": torch.tensor(sizes),
    }


def _in_tiles(name: str, model: str, **options: Any) -> Model:
    made = of(name, model, dict, _INDEX, image_grid_pinpoints=_TILES, **options)
    return replace(made, batch=functools.partial(_tiled, made.build))


def _grids(other: bool, generator: torch.Generator) -> Batch:
    """Pictures of several sizes as Qwen-VL takes them, in texts of other lengths in each batch.

    Args:
        other: whether each batch has its pictures in another order, so that their sizes follow in another order.
        generator: draws the batch.
    """
    order = torch.randperm(len(_GRIDS), generator=generator).tolist() if other else range(len(_GRIDS))
    grids = [_GRIDS[index] for index in order]
    counts = iter([t * h * w // 4 for t, h, w in grids])
    images = [list(itertools.islice(counts, count)) for count in _shared(generator)]
    texts = texts_with_images(generator, images, around=(IMAGE_TOKEN + 2, IMAGE_TOKEN + 3))
    patches = sum(t * h * w for t, h, w in grids)
    return {
        **texts,
        "mm_token_type_ids": (texts["input_ids"] == IMAGE_TOKEN).int(),
        "pixel_values": torch.randn(patches, 3 * 2 * PATCH * PATCH, generator=generator),
        "image_grid_thw": torch.tensor(grids),
    }


def _qwen(name: str, kind: str, vision: dict[str, Any], *, other: bool = False, sections: tuple[int, ...]) -> Model:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections)}
    return of(
        *(name, f"{kind}ForConditionalGeneration", functools.partial(_grids, other), _ID),
        text_config={**_TEXT, "rope_parameters": rope, **({"head_dim": 8} if kind == "Qwen3VL" else {})},
        vision_config={"depth": 2, "hidden_size": 32, "num_heads": 4, "patch_size": PATCH, **vision},
        video_token_id=IMAGE_TOKEN + 1,
        vision_start_token_id=IMAGE_TOKEN + 2,
        vision_end_token_id=IMAGE_TOKEN + 3,
    )


def _listed(other: bool, generator: torch.Generator) -> Batch:
    """A list of pictures for each text, filled up with empty ones.

    Args:
        other: whether each batch has these numbers of pictures in another order.
        generator: draws the batch.
    """
    counts = _shared(generator) if other else list(_IMAGES)
    pixels = pictures(generator, BATCH, max(counts))
    for row, count in enumerate(counts):
        pixels[row, count:] = 0
    return {**texts_with_images(generator, [[4] * count for count in counts]), "pixel_values": pixels}


def _idefics3(name: str, kind: str = "Idefics3", *, other: bool = False) -> Model:
    parts: dict[str, Any] = {"text_config": _LLAMA, "vision_config": _VISION, "scale_factor": 2}
    return of(name, f"{kind}ForConditionalGeneration", functools.partial(_listed, other), _ID, parts)


def _blip2(name: str, kind: str, batch: Callable[[torch.Generator], Batch]) -> Model:
    text = {"model_type": "opt", **TOKENS, **PADDED, **SIZES, "word_embed_proj_dim": 32, "ffn_dim": 48, "dropout": 0.0}
    return of(
        *(name, f"{kind}ForConditionalGeneration", batch, _INDEX),
        text_config={**text, "max_position_embeddings": 128},
        vision_config={**_VISION, "initializer_range": 0.02},
        qformer_config={
            **{**SIZES, **MLP, **NO_HIDDEN_DROPOUT},
            **{"vocab_size": VOCABULARY, "encoder_hidden_size": 32},
        },
        num_query_tokens=4,
    )


def _instructed(generator: torch.Generator) -> Batch:
    asked = torch.randint(3, 80, (BATCH, 5), generator=generator)
    return {
        **_one_each(4, generator),
        "qformer_input_ids": asked,
        "qformer_attention_mask": torch.ones_like(asked),
    }


def _pairs(generator: torch.Generator) -> Batch:
    tokens = torch.randint(3, VOCABULARY, (BATCH, 10), generator=generator)
    return {"input_ids": tokens, "pixel_values": pictures(generator, BATCH), "return_loss": True}


_BART: dict[str, Any] = {
    **{**TOKENS, **PADDED, **zoo.LAYERS, **zoo.WIDTHS, "encoder_layers": 1, "decoder_layers": 1},
    **{"d_model": 32, "dropout": 0.0, "max_position_embeddings": 128, "decoder_start_token_id": 2},
}
_FLORENCE2 = {
    **{"depths": [1, 1], "embed_dim": [8, 16], "num_heads": [2, 2], "num_groups": [2, 2], "patch_size": [3, 3]},
    **{"patch_stride": [2, 2], "patch_padding": [1, 1], "patch_prenorm": [False, True], "window_size": 4},
    **{"drop_path_rate": 0.0, "projection_dim": 32},
}


def _florence2_batch(generator: torch.Generator) -> Batch:
    # 16 patches and the mean of them.
    made = _one_each(17, generator)
    made["labels"] = torch.randint(3, 80, (BATCH, 6), generator=generator)
    return made


def _with_decoder(name: str, encoder: dict[str, Any]) -> Model:
    decoder = {"model_type": "mbart", **_BART, "is_decoder": True, "add_cross_attention": True}
    parts = {"encoder": encoder, "decoder": decoder, "decoder_start_token_id": 2}
    return of(name, "VisionEncoderDecoderModel", _captions, PADDED, parts)


def _captions(generator: torch.Generator) -> Batch:
    labels = torch.randint(3, VOCABULARY, (BATCH, 6), generator=generator)
    labels[0, 4:] = -100
    return {"pixel_values": pictures(generator, BATCH), "labels": labels}


_DONUT = {
    **{"model_type": "donut-swin", "image_size": PIXELS, "patch_size": 2, "embed_dim": 16, "depths": [1, 1]},
    **{"num_heads": [2, 4], "window_size": 4, "drop_path_rate": 0.0},
}


def _documents(generator: torch.Generator) -> Batch:
    corner = torch.randint(0, 500, (BATCH, 10, 2), generator=generator)
    size = torch.randint(1, 400, (BATCH, 10, 2), generator=generator)
    return {
        "input_ids": torch.randint(3, VOCABULARY, (BATCH, 10), generator=generator),
        "bbox": torch.cat([corner, corner + size], -1),
        "pixel_values": pictures(generator, BATCH),
        "labels": torch.randint(0, 3, (BATCH, 10), generator=generator),
    }


_AROUND = (IMAGE_TOKEN + 2, IMAGE_TOKEN + 3)
_QWEN2_VISION = {"embed_dim": 32}
_QWEN2_5_VISION = {"out_hidden_size": 32, **MLP, "window_size": 16, "fullatt_block_indexes": [1]}
_QWEN3_VISION = {"out_hidden_size": 32, **MLP, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}

VISION_LANGUAGE = (
    of("LLaVA", "LlavaForConditionalGeneration", _flat(16), _INDEX, text_config=_LLAMA, vision_config=_CLIP),
    _in_tiles("LLaVA-NeXT", "LlavaNextForConditionalGeneration", text_config=_LLAMA, vision_config=_CLIP),
    _in_tiles(
        *("LLaVA-OneVision", "LlavaOnevisionForConditionalGeneration"),
        **{"text_config": _QWEN2, "vision_config": _SIGLIP, "video_token_index": IMAGE_TOKEN + 1},
    ),
    _qwen("Qwen2-VL", "Qwen2VL", _QWEN2_VISION, sections=(1, 1, 2)),
    _qwen("Qwen2-VL (sizes in another order)", "Qwen2VL", _QWEN2_VISION, sections=(1, 1, 2), other=True),
    _qwen("Qwen2.5-VL", "Qwen2_5_VL", _QWEN2_5_VISION, sections=(1, 1, 2)),
    _qwen("Qwen3-VL", "Qwen3VL", _QWEN3_VISION, sections=(2, 1, 1)),
    of(
        *("PaliGemma", "PaliGemmaForConditionalGeneration", _answers, _INDEX),
        text_config={"model_type": "gemma", **_TEXT, "head_dim": 8},
        vision_config={**_SIGLIP, "projection_dim": 32},
        projection_dim=32,
        hidden_size=32,
    ),
    of(
        *("Gemma 3 (images)", "Gemma3ForConditionalGeneration", functools.partial(_typed, _flat(4, _AROUND)), _INDEX),
        text_config={
            **{**_TEXT, "head_dim": 8, "sliding_window": 8},
            "layer_types": ["sliding_attention", "full_attention"],
        },
        vision_config=_SIGLIP,
        boi_token_index=IMAGE_TOKEN + 2,
        eoi_token_index=IMAGE_TOKEN + 3,
        mm_tokens_per_image=4,
    ),
    _idefics3("Idefics3"),
    _idefics3("Idefics3 (other numbers of pictures)", other=True),
    _idefics3("SmolVLM", "SmolVLM"),
    of(
        *("InternVL", "InternVLForConditionalGeneration", _flat(4), _ID),
        **{"text_config": _QWEN2, "vision_config": _VISION, "image_seq_length": 4},
    ),
    _blip2("BLIP-2", "Blip2", functools.partial(_one_each, 4)),
    _blip2("InstructBLIP", "InstructBlip", _instructed),
    of(
        *("SigLIP", "SiglipModel", _pairs),
        text_config={**_PLAIN_TEXT, "max_position_embeddings": 10, "projection_size": 32},
        vision_config=_VISION,
    ),
    of(
        *("Florence-2", "Florence2ForConditionalGeneration", _florence2_batch, _ID),
        **{"text_config": {"model_type": "bart", **_BART}, "vision_config": _FLORENCE2},
    ),
    _with_decoder("ViT with a decoder", {"model_type": "vit", **_VISION, **NO_HIDDEN_DROPOUT}),
    _with_decoder("Donut", _DONUT),
    of(
        *("LayoutLMv3", "LayoutLMv3ForTokenClassification", _documents, _PLAIN_TEXT, NO_HIDDEN_DROPOUT, zoo.CLASSES),
        **{"coordinate_size": 6, "shape_size": 4, "input_size": PIXELS, "patch_size": PATCH},
    ),
)
