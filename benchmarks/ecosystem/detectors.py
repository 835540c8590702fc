"""Models of transformers that find objects or segments in pictures, with other numbers of them in each picture.

transformers matches predictions and boxes by the Hungarian algorithm of SciPy: on the host, in the middle of the step.
RF-DETR pads its targets for XLA (`pad_targets_to`), so that the number of boxes shapes no graph, and matches on the
host as well. The second loss here pads likewise, and matches without leaving the graph: each box in turn takes the
best query that is free.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers
from torch import nn

from benchmarks.zoo import (
    BATCH,
    CLASSES,
    LAYERS,
    MLP,
    NO_ACTIVATION_DROPOUT,
    NO_HIDDEN_DROPOUT,
    SIZES,
    WIDTHS,
    Batch,
    Model,
)
from benchmarks.zoo import of_transformers as of

PIXELS, QUERIES = 32, 8
_BOXES = 4
_QUERIED: dict[str, Any] = {
    **{**LAYERS, **WIDTHS, **NO_ACTIVATION_DROPOUT, "d_model": 32, "encoder_layers": 1, "num_queries": QUERIES},
}
_SMALL_RESNET = {"embedding_size": 8, "layer_type": "basic"}
_RESNET = {
    **{**_SMALL_RESNET, "model_type": "resnet", "hidden_sizes": [8, 16, 16], "depths": [1, 1, 1]},
    "out_features": ["stage3"],
}
_LAST_STAGES = {"out_features": ["stage2", "stage3", "stage4"]}
_RT_RESNET = {
    **{**_SMALL_RESNET, "model_type": "rt_detr_resnet", "hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1]},
    **_LAST_STAGES,
}
_RT_DETR = {
    **{"backbone_config": _RT_RESNET, "encoder_in_channels": [16, 16, 16], "decoder_in_channels": [32, 32, 32]},
    **{"encoder_hidden_dim": 32, "encoder_ffn_dim": 48, "encoder_attention_heads": 4, "num_denoising": 0},
    **{"d_model": 32, "decoder_ffn_dim": 48, "decoder_layers": 2, "decoder_attention_heads": 4},
    **{"num_queries": QUERIES, "dropout": 0.0},
}
_SWIN = {
    **{"model_type": "swin", "image_size": PIXELS, "patch_size": 2, "embed_dim": 8, "depths": [1, 1, 1, 1]},
    **{"num_heads": [1, 1, 2, 2], "window_size": 2, "drop_path_rate": 0.0},
    **_LAST_STAGES,
}
_WORDS = {"model_type": "bert", **SIZES, **MLP, **NO_HIDDEN_DROPOUT, "num_hidden_layers": 1, "vocab_size": 1100}
_GROUNDING_DINO = {
    **{"backbone_config": _SWIN, "text_config": _WORDS, "max_text_len": 16, "auxiliary_loss": True},
    **{"encoder_n_points": 2, "decoder_n_points": 2, "num_feature_levels": 3, "fusion_droppath": 0.0},
}
_SEGFORMER = {
    **{"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16]},
    **{"patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2]},
    **{"decoder_hidden_size": 16, "drop_path_rate": 0.0, "classifier_dropout_prob": 0.0},
}


def pictures(generator: torch.Generator, size: int = PIXELS) -> torch.Tensor:
    return torch.randn(BATCH, 3, size, size, generator=generator)


def targets(generator: torch.Generator, *, varying: bool = False) -> list[dict[str, torch.Tensor]]:
    """A dictionary for each image, as transformers takes them.

    Args:
        generator: draws the targets.
        varying: whether each batch has other numbers of boxes. Otherwise its images have 1, 2, 3 and 4.
    """
    counts = (
        torch.randint(1, _BOXES + 1, (BATCH,), generator=generator).tolist()
        if varying
        else [1 + image % _BOXES for image in range(BATCH)]
    )
    return [
        {
            "class_labels": torch.randint(0, CLASSES["num_labels"], (count,), generator=generator),
            "boxes": 0.3 + 0.3 * torch.rand(count, 4, generator=generator),
        }
        for count in counts
    ]


def _detected(varying: bool, generator: torch.Generator) -> Batch:
    return {"pixel_values": pictures(generator), "labels": targets(generator, varying=varying)}


def _detr(name: str, model: str, batch: Any, **options: Any) -> Model:
    parts: dict[str, Any] = {"backbone_config": _RESNET, **options}
    return of(name, f"{model}ForObjectDetection", batch, _QUERIED, CLASSES, parts)


class Sam(nn.Module):
    """SAM and the loss of its masks; transformers has none for it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = transformers.SamModel(
            transformers.SamConfig(
                vision_config=transformers.SamVisionConfig(
                    hidden_size=32,
                    output_channels=16,
                    num_hidden_layers=2,
                    num_attention_heads=4,
                    image_size=PIXELS,
                    patch_size=8,
                    window_size=2,
                    global_attn_indexes=[1],
                    num_pos_feats=8,
                    mlp_dim=48,
                    initializer_range=0.02,
                ),
                prompt_encoder_config={
                    "hidden_size": 16,
                    "image_size": PIXELS,
                    "patch_size": 8,
                    "mask_input_channels": 4,
                },
                mask_decoder_config={
                    "hidden_size": 16,
                    "mlp_dim": 32,
                    "num_attention_heads": 2,
                    "iou_head_hidden_dim": 16,
                },
            )
        )

    def forward(
        self, pixel_values: torch.Tensor, input_boxes: torch.Tensor, labels: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        masks = self.net(pixel_values=pixel_values, input_boxes=input_boxes, multimask_output=False).pred_masks
        return {"loss": nn.functional.binary_cross_entropy_with_logits(masks[:, 0, 0], labels)}


def _outlined(generator: torch.Generator) -> Batch:
    corner = torch.rand(BATCH, 1, 2, generator=generator) * 10
    size = 5 + torch.rand(BATCH, 1, 2, generator=generator) * 15
    return {
        "pixel_values": pictures(generator),
        "input_boxes": torch.cat([corner, corner + size], -1),
        "labels": (torch.rand(BATCH, 16, 16, generator=generator) > 0.5).float(),
    }


def _asked(generator: torch.Generator) -> Batch:
    # "[CLS] a word . a word . a word . [SEP]" in the numbers of BERT.
    names = torch.randint(5, 100, (BATCH, 3), generator=generator)
    tokens = torch.stack([torch.tensor([101, a, 1012, b, 1012, c, 1012, 102]) for a, b, c in names.tolist()])
    return {
        "pixel_values": pictures(generator),
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "labels": targets(generator),
    }


def _labelled(generator: torch.Generator) -> Batch:
    labels = torch.randint(0, CLASSES["num_labels"], (BATCH, PIXELS, PIXELS), generator=generator)
    labels[:, :2] = 255
    return {"pixel_values": pictures(generator), "labels": labels}


_SAME, _OTHERS = functools.partial(_detected, False), functools.partial(_detected, True)

DETECTORS = (
    _detr("DETR", "Detr", _SAME),
    _detr("DETR (other numbers of boxes in each batch)", "Detr", _OTHERS),
    _detr("DETR (auxiliary loss)", "Detr", _SAME, auxiliary_loss=True),
    _detr("Conditional DETR", "ConditionalDetr", _SAME),
    _detr("Deformable DETR", "DeformableDetr", _SAME, num_feature_levels=1),
    of("RT-DETR", "RTDetrForObjectDetection", _SAME, _RT_DETR, CLASSES),
    of(
        *("YOLOS", "YolosForObjectDetection", _SAME, SIZES, MLP, CLASSES),
        **{"image_size": [PIXELS, PIXELS], "patch_size": 8, "num_detection_tokens": QUERIES},
    ),
    of("Grounding DINO", "GroundingDinoForObjectDetection", _asked, _QUERIED, _GROUNDING_DINO),
    Model("SAM", Sam, _outlined),
    of("SegFormer", "SegformerForSemanticSegmentation", _labelled, _SEGFORMER, NO_HIDDEN_DROPOUT, CLASSES),
)


_BOXES, _KINDS = 4, CLASSES["num_labels"]
# More than any cost of a pair.
_NEVER = 1e6
_BACKBONE = {
    **{"model_type": "rf_detr_dinov2", "image_size": PIXELS, "patch_size": 4, "hidden_size": 16},
    **{"num_hidden_layers": 2, "num_attention_heads": 2, "mlp_ratio": 2, "num_windows": 2, "out_features": ["stage2"]},
}


def _listed(generator: torch.Generator) -> Batch:
    labels = targets(generator)
    return {"pixel_values": pictures(generator), "labels": labels}


HUNGARIAN = of(
    *("detection (RF-DETR, Hungarian on the host)", "RfDetrForObjectDetection", _listed, CLASSES),
    **{"backbone_config": _BACKBONE, "d_model": 16, "intermediate_size": 16, "decoder_ffn_dim": 32},
    **{"decoder_layers": 2, "decoder_n_points": 2, "decoder_self_attention_heads": 2, "num_queries": QUERIES},
    **{"decoder_cross_attention_heads": 2, "group_detr": 2, "dropout": 0.0},
)


class PaddedDetector(nn.Module):
    """RF-DETR with padded targets."""

    def __init__(self) -> None:
        super().__init__()
        self.net = HUNGARIAN.build()

    def forward(
        self, pixel_values: torch.Tensor, boxes: torch.Tensor, classes: torch.Tensor, real: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        out = self.net(pixel_values)
        # The queries of each group are matched with all boxes.
        logits, predicted = (value.unflatten(1, (-1, QUERIES)) for value in (out.logits, out.pred_boxes))
        losses = [padded_loss(logits[:, i], predicted[:, i], boxes, classes, real) for i in range(logits.shape[1])]
        return {"loss": torch.stack(losses).mean()}


def padded_loss(
    logits: torch.Tensor, predicted: torch.Tensor, boxes: torch.Tensor, classes: torch.Tensor, real: torch.Tensor
) -> torch.Tensor:
    """The loss of a set of predictions.

    Args:
        logits: per image, query and class.
        predicted: a box per image and query.
        boxes: the targets, padded to the same number in each image.
        classes: theirs.
        real: which targets are no padding.
    """
    query = matched(logits.detach(), predicted.detach(), boxes, classes, real)
    wanted = nn.functional.one_hot(query, QUERIES).to(logits.dtype) * real[..., None]
    targets = torch.einsum("btq,btc->bqc", wanted, nn.functional.one_hot(classes, _KINDS).to(logits.dtype))
    count = real.sum().clamp(min=1)
    by_class = nn.functional.binary_cross_entropy_with_logits(logits, targets, reduction="sum") / count
    mine = predicted.gather(1, query[..., None].expand(-1, -1, 4))
    by_box = ((mine - boxes).abs().sum(-1) * real).sum() / count
    return by_class + 5 * by_box


def matched(
    logits: torch.Tensor, predicted: torch.Tensor, boxes: torch.Tensor, classes: torch.Tensor, real: torch.Tensor
) -> torch.Tensor:
    """The query of each target, all of them different. Arguments are those of `padded_loss`."""
    likely = logits.sigmoid().gather(2, classes[:, None].expand(-1, QUERIES, -1))
    cost = 5 * (predicted[:, :, None] - boxes[:, None]).abs().sum(-1) - 2 * likely
    taken = torch.zeros_like(cost[:, :, 0])
    found = []
    for target in range(boxes.shape[1]):
        query = (cost[:, :, target] + _NEVER * taken).argmin(1)
        found.append(query)
        # Padding takes no query from a box.
        taken = taken + nn.functional.one_hot(query, QUERIES) * real[:, target, None]
    return torch.stack(found, 1)


def _padded(generator: torch.Generator) -> Batch:
    """Another number of boxes in each image of each batch."""
    counts = torch.randint(1, _BOXES + 1, (BATCH,), generator=generator)
    return {
        "pixel_values": pictures(generator),
        "boxes": 0.3 + 0.3 * torch.rand(BATCH, _BOXES, 4, generator=generator),
        "classes": torch.randint(0, _KINDS, (BATCH, _BOXES), generator=generator),
        "real": torch.arange(_BOXES)[None] < counts[:, None],
    }


PADDED = Model("detection (RF-DETR, padded, matched in the graph)", PaddedDetector, _padded, HUNGARIAN.prepare)
