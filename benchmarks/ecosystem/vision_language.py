"""Models of images and texts of transformers, with several images in a text, at other places in each batch."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

from benchmarks.ecosystem.model import Model
from benchmarks.zoo import BATCH, VOCABULARY, Batch

PIXELS, PATCH, IMAGE_TOKEN = 16, 4, 90
# How many images the texts of a batch have; each batch has these in another order.
_IMAGES = (2, 0, 1, 1)
_LENGTH = 20
_SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
_VISION: dict[str, Any] = {**_SIZES, "image_size": PIXELS, "patch_size": PATCH}
_TEXT: dict[str, Any] = {
    **_SIZES,
    "vocab_size": VOCABULARY,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 256,
}
_TILES = [[PIXELS, 2 * PIXELS], [2 * PIXELS, PIXELS], [2 * PIXELS, 2 * PIXELS]]
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
    rows, labels = [], []
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


def _one_each(tokens: int, **more: Any) -> Callable[[torch.Generator], Batch]:
    """Batches with one picture per text."""

    def batch(generator: torch.Generator) -> Batch:
        texts = texts_with_images(generator, [[tokens]] * BATCH)
        return {**texts, "pixel_values": pictures(generator, BATCH), **more}

    return batch


def _typed(batch: Callable[[torch.Generator], Batch], generator: torch.Generator) -> Batch:
    """The batch, and which of its tokens stand for an image."""
    made = batch(generator)
    return {**made, "token_type_ids": (made["input_ids"] == IMAGE_TOKEN).long()}


def _answers(batch: Callable[[torch.Generator], Batch], generator: torch.Generator) -> Batch:
    """The batch as PaliGemma takes it: 1 stands for what is to be answered."""
    made = batch(generator)
    return {**made, "token_type_ids": (made["labels"] != -100).long()}


def _of(model: str, config: str, **parts: Any) -> nn.Module:
    net: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**parts))
    return net


def _llama(**options: Any) -> Any:
    return transformers.LlamaConfig(**{**_TEXT, **options})


def _clip() -> Any:
    return transformers.CLIPVisionConfig(**_VISION, projection_dim=16)


def _siglip(**options: Any) -> Any:
    return transformers.SiglipVisionConfig(**{**_VISION, "vision_use_head": False, **options})


def _llava() -> nn.Module:
    return _of(
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        text_config=_llama(),
        vision_config=_clip(),
        image_token_index=IMAGE_TOKEN,
    )


def _llava_next() -> nn.Module:
    return _of(
        *("LlavaNextForConditionalGeneration", "LlavaNextConfig"),
        text_config=_llama(),
        vision_config=_clip(),
        image_token_index=IMAGE_TOKEN,
        image_grid_pinpoints=_TILES,
    )


def _llava_onevision() -> nn.Module:
    return _of(
        *("LlavaOnevisionForConditionalGeneration", "LlavaOnevisionConfig"),
        text_config=transformers.Qwen2Config(**_TEXT),
        vision_config=_siglip(),
        image_token_index=IMAGE_TOKEN,
        video_token_index=IMAGE_TOKEN + 1,
        image_grid_pinpoints=_TILES,
    )


@functools.cache
def _lengths(build: Callable[[], nn.Module], sizes: tuple[tuple[int, int], ...]) -> list[int]:
    """How many tokens stand for pictures of these sizes, of a model that cuts them into tiles."""
    net = build().model
    with torch.no_grad():
        features = net.get_image_features(
            torch.zeros(len(sizes), _tiles(), 3, PIXELS, PIXELS), image_sizes=torch.tensor(sizes)
        )
    return [len(one) for one in features.pooler_output]


def _tiles() -> int:
    return 5


def _tiled(build: Callable[[], nn.Module], generator: torch.Generator) -> Batch:
    """Pictures of several sizes, padded to as many tiles as the largest has."""
    sizes = ((PIXELS, 2 * PIXELS), (2 * PIXELS, 2 * PIXELS - 6), (2 * PIXELS, PIXELS), (30, 32))
    with torch.random.fork_rng():
        lengths = iter(_lengths(build, sizes))
    images = [list(itertools.islice(lengths, count)) for count in _shared(generator)]
    return {
        **texts_with_images(generator, images),
        "pixel_values": pictures(generator, len(sizes), _tiles()),
        "image_sizes": torch.tensor(sizes),
    }


_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_QWEN_TOKENS = {
    "image_token_id": IMAGE_TOKEN,
    "video_token_id": IMAGE_TOKEN + 1,
    "vision_start_token_id": IMAGE_TOKEN + 2,
    "vision_end_token_id": IMAGE_TOKEN + 3,
}


def _qwen2_vl() -> nn.Module:
    return _of(
        *("Qwen2VLForConditionalGeneration", "Qwen2VLConfig"),
        text_config={**_TEXT, "rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]}},
        vision_config={"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": PATCH},
        **_QWEN_TOKENS,
    )


def _qwen2_5_vl() -> nn.Module:
    return _of(
        *("Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLConfig"),
        text_config={**_TEXT, "rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]}},
        vision_config={
            **{"depth": 2, "hidden_size": 32, "out_hidden_size": 32, "num_heads": 4, "patch_size": PATCH},
            **{"intermediate_size": 48, "window_size": 16, "fullatt_block_indexes": [1]},
        },
        **_QWEN_TOKENS,
    )


def _qwen3_vl() -> nn.Module:
    return _of(
        *("Qwen3VLForConditionalGeneration", "Qwen3VLConfig"),
        text_config={
            **_TEXT,
            "head_dim": 8,
            "rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1]},
        },
        vision_config={
            **{"depth": 2, "hidden_size": 32, "out_hidden_size": 32, "num_heads": 4, "patch_size": PATCH},
            **{"intermediate_size": 48, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        },
        **_QWEN_TOKENS,
    )


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


def _paligemma() -> nn.Module:
    return _of(
        *("PaliGemmaForConditionalGeneration", "PaliGemmaConfig"),
        text_config=transformers.GemmaConfig(**_TEXT, head_dim=8),
        vision_config=_siglip(projection_dim=32),
        image_token_index=IMAGE_TOKEN,
        projection_dim=32,
        hidden_size=32,
    )


def _gemma3() -> nn.Module:
    return _of(
        *("Gemma3ForConditionalGeneration", "Gemma3Config"),
        text_config=transformers.Gemma3TextConfig(
            **_TEXT, head_dim=8, sliding_window=8, layer_types=["sliding_attention", "full_attention"]
        ),
        vision_config=_siglip(),
        image_token_index=IMAGE_TOKEN,
        boi_token_index=IMAGE_TOKEN + 2,
        eoi_token_index=IMAGE_TOKEN + 3,
        mm_tokens_per_image=4,
    )


def _idefics3(kind: str) -> nn.Module:
    return _of(
        *(f"{kind}ForConditionalGeneration", f"{kind}Config"),
        text_config=_llama(),
        vision_config=_VISION,
        image_token_id=IMAGE_TOKEN,
        scale_factor=2,
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


def _internvl() -> nn.Module:
    return _of(
        *("InternVLForConditionalGeneration", "InternVLConfig"),
        text_config=transformers.Qwen2Config(**_TEXT),
        vision_config=transformers.InternVLVisionConfig(**_VISION),
        image_token_id=IMAGE_TOKEN,
        image_seq_length=4,
    )


_QFORMER: dict[str, Any] = {
    **_SIZES,
    "vocab_size": VOCABULARY,
    "encoder_hidden_size": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def _blip2(kind: str) -> nn.Module:
    return _of(
        *(f"{kind}ForConditionalGeneration", f"{kind}Config"),
        text_config=transformers.OPTConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            word_embed_proj_dim=32,
            ffn_dim=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=128,
            dropout=0.0,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        ),
        vision_config={**_VISION, "initializer_range": 0.02},
        qformer_config=_QFORMER,
        num_query_tokens=4,
        image_token_index=IMAGE_TOKEN,
    )


def _instructed(generator: torch.Generator) -> Batch:
    asked = torch.randint(3, 80, (BATCH, 5), generator=generator)
    return {
        **_one_each(4)(generator),
        "qformer_input_ids": asked,
        "qformer_attention_mask": torch.ones_like(asked),
    }


def _siglip_pairs() -> nn.Module:
    text = {name: value for name, value in _TEXT.items() if name != "num_key_value_heads"}
    return _of(
        *("SiglipModel", "SiglipConfig"),
        text_config={**text, "max_position_embeddings": 10, "projection_size": 32},
        vision_config=_VISION,
    )


def _pairs(generator: torch.Generator) -> Batch:
    tokens = torch.randint(3, VOCABULARY, (BATCH, 10), generator=generator)
    return {"input_ids": tokens, "pixel_values": pictures(generator, BATCH), "return_loss": True}


def _florence2() -> nn.Module:
    return _of(
        *("Florence2ForConditionalGeneration", "Florence2Config"),
        text_config=transformers.BartConfig(**_bart()),
        vision_config=transformers.Florence2VisionConfig(
            depths=[1, 1],
            embed_dim=[8, 16],
            num_heads=[2, 2],
            num_groups=[2, 2],
            patch_size=[3, 3],
            patch_stride=[2, 2],
            patch_padding=[1, 1],
            patch_prenorm=[False, True],
            window_size=4,
            drop_path_rate=0.0,
            projection_dim=32,
        ),
        image_token_id=IMAGE_TOKEN,
    )


def _bart() -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "d_model": 32,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "dropout": 0.0,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 2,
    }


def _florence2_batch(generator: torch.Generator) -> Batch:
    # 16 patches and the mean of them.
    made = _one_each(17)(generator)
    made["labels"] = torch.randint(3, 80, (BATCH, 6), generator=generator)
    return made


def _encoder_decoder(encoder: Any) -> nn.Module:
    decoder = transformers.MBartConfig(**_bart(), is_decoder=True, add_cross_attention=True)
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id, config.pad_token_id = 2, 0
    net: nn.Module = transformers.VisionEncoderDecoderModel(config)
    return net


def _vit_decoder() -> nn.Module:
    return _encoder_decoder(
        transformers.ViTConfig(**_VISION, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    )


def _donut() -> nn.Module:
    return _encoder_decoder(
        transformers.DonutSwinConfig(
            image_size=PIXELS,
            patch_size=2,
            embed_dim=16,
            depths=[1, 1],
            num_heads=[2, 4],
            window_size=4,
            drop_path_rate=0.0,
        )
    )


def _captions(generator: torch.Generator) -> Batch:
    labels = torch.randint(3, VOCABULARY, (BATCH, 6), generator=generator)
    labels[0, 4:] = -100
    return {"pixel_values": pictures(generator, BATCH), "labels": labels}


def _layoutlmv3() -> nn.Module:
    text = {name: value for name, value in _TEXT.items() if name != "num_key_value_heads"}
    return _of(
        *("LayoutLMv3ForTokenClassification", "LayoutLMv3Config"),
        **text,
        coordinate_size=6,
        shape_size=4,
        input_size=PIXELS,
        patch_size=PATCH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=3,
    )


def _documents(generator: torch.Generator) -> Batch:
    corner = torch.randint(0, 500, (BATCH, 10, 2), generator=generator)
    size = torch.randint(1, 400, (BATCH, 10, 2), generator=generator)
    return {
        "input_ids": torch.randint(3, VOCABULARY, (BATCH, 10), generator=generator),
        "bbox": torch.cat([corner, corner + size], -1),
        "pixel_values": pictures(generator, BATCH),
        "labels": torch.randint(0, 3, (BATCH, 10), generator=generator),
    }


VISION_LANGUAGE = (
    Model("LLaVA", _llava, _flat(16)),
    Model("LLaVA-NeXT", _llava_next, functools.partial(_tiled, _llava_next)),
    Model("LLaVA-OneVision", _llava_onevision, functools.partial(_tiled, _llava_onevision)),
    Model("Qwen2-VL", _qwen2_vl, functools.partial(_grids, False)),
    Model("Qwen2-VL (sizes in another order)", _qwen2_vl, functools.partial(_grids, True)),
    Model("Qwen2.5-VL", _qwen2_5_vl, functools.partial(_grids, False)),
    Model("Qwen3-VL", _qwen3_vl, functools.partial(_grids, False)),
    Model("PaliGemma", _paligemma, functools.partial(_answers, _one_each(16))),
    Model("Gemma 3 (images)", _gemma3, functools.partial(_typed, _flat(4, (IMAGE_TOKEN + 2, IMAGE_TOKEN + 3)))),
    Model("Idefics3", functools.partial(_idefics3, "Idefics3"), functools.partial(_listed, False)),
    Model(
        "Idefics3 (other numbers of pictures)",
        functools.partial(_idefics3, "Idefics3"),
        functools.partial(_listed, True),
    ),
    Model("SmolVLM", functools.partial(_idefics3, "SmolVLM"), functools.partial(_listed, False)),
    Model("InternVL", _internvl, _flat(4)),
    Model("BLIP-2", functools.partial(_blip2, "Blip2"), _one_each(4)),
    Model("InstructBLIP", functools.partial(_blip2, "InstructBlip"), _instructed),
    Model("SigLIP", _siglip_pairs, _pairs),
    Model("Florence-2", _florence2, _florence2_batch),
    Model("ViT with a decoder", _vit_decoder, _captions),
    Model("Donut", _donut, _captions),
    Model("LayoutLMv3", _layoutlmv3, _documents),
)
