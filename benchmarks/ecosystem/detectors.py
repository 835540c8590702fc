"""Models of transformers that find objects or segments in pictures, with other numbers of them in each picture."""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers
from torch import nn

from benchmarks.ecosystem.model import Model
from benchmarks.zoo import BATCH, Batch

_PIXELS, _CLASSES, _BOXES, _QUERIES = 32, 3, 4, 8
_NO_DROPOUT = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0)
_DETR: dict[str, Any] = {
    **{"d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_queries": _QUERIES, "num_labels": _CLASSES},
    **_NO_DROPOUT,
}


def _resnet(*stages: str) -> Any:
    return transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16, 16], depths=[1, 1, 1], layer_type="basic", out_features=list(stages)
    )


def _pixels(generator: torch.Generator, size: int = _PIXELS) -> torch.Tensor:
    return torch.randn(BATCH, 3, size, size, generator=generator)


def _targets(generator: torch.Generator, *, varying: bool = False) -> list[dict[str, torch.Tensor]]:
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
            "class_labels": torch.randint(0, _CLASSES, (count,), generator=generator),
            "boxes": 0.3 + 0.3 * torch.rand(count, 4, generator=generator),
        }
        for count in counts
    ]


def _detected(varying: bool, generator: torch.Generator) -> Batch:
    return {"pixel_values": _pixels(generator), "labels": _targets(generator, varying=varying)}


def _of(stem: str, head: str, options: dict[str, Any], **more: Any) -> nn.Module:
    config = getattr(transformers, f"{stem}Config")(**options, **more)
    net: nn.Module = getattr(transformers, f"{stem}{head}")(config)
    return net


def _detr(stem: str, **more: Any) -> nn.Module:
    return _of(stem, "ForObjectDetection", _DETR, backbone_config=_resnet("stage3"), **more)


def _rt_detr() -> nn.Module:
    backbone = transformers.RTDetrResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 16, 16, 16],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )
    return _of(
        "RTDetr",
        "ForObjectDetection",
        {
            **{"backbone_config": backbone, "encoder_in_channels": [16, 16, 16], "decoder_in_channels": [32, 32, 32]},
            **{"encoder_hidden_dim": 32, "encoder_ffn_dim": 48, "encoder_attention_heads": 4, "num_denoising": 0},
            **{"d_model": 32, "decoder_ffn_dim": 48, "decoder_layers": 2, "decoder_attention_heads": 4},
            **{"num_queries": _QUERIES, "num_labels": _CLASSES, "dropout": 0.0},
        },
    )


def _yolos() -> nn.Module:
    return _of(
        "Yolos",
        "ForObjectDetection",
        {
            **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48},
            **{"image_size": [_PIXELS, _PIXELS], "patch_size": 8, "num_detection_tokens": _QUERIES},
            **{"num_labels": _CLASSES},
        },
    )


def _swin(*stages: str) -> Any:
    return transformers.SwinConfig(
        image_size=_PIXELS,
        patch_size=2,
        embed_dim=8,
        depths=[1, 1, 1, 1],
        num_heads=[1, 1, 2, 2],
        window_size=2,
        drop_path_rate=0.0,
        out_features=list(stages),
    )


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
                    image_size=_PIXELS,
                    patch_size=8,
                    window_size=2,
                    global_attn_indexes=[1],
                    num_pos_feats=8,
                    mlp_dim=48,
                    initializer_range=0.02,
                ),
                prompt_encoder_config={
                    "hidden_size": 16,
                    "image_size": _PIXELS,
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
        "pixel_values": _pixels(generator),
        "input_boxes": torch.cat([corner, corner + size], -1),
        "labels": (torch.rand(BATCH, 16, 16, generator=generator) > 0.5).float(),
    }


def _grounding_dino() -> nn.Module:
    text = transformers.BertConfig(
        vocab_size=1100,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=48,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return _of(
        "GroundingDino",
        "ForObjectDetection",
        {
            **{key: value for key, value in _DETR.items() if key != "num_labels"},
            **{"backbone_config": _swin("stage2", "stage3", "stage4"), "text_config": text, "max_text_len": 16},
            **{"encoder_n_points": 2, "decoder_n_points": 2, "num_feature_levels": 3, "fusion_droppath": 0.0},
            "auxiliary_loss": True,
        },
    )


def _asked(generator: torch.Generator) -> Batch:
    # "[CLS] a word . a word . a word . [SEP]" in the numbers of BERT.
    names = torch.randint(5, 100, (BATCH, 3), generator=generator)
    tokens = torch.stack([torch.tensor([101, a, 1012, b, 1012, c, 1012, 102]) for a, b, c in names.tolist()])
    return {
        "pixel_values": _pixels(generator),
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "labels": _targets(generator),
    }


def _segformer() -> nn.Module:
    return _of(
        "Segformer",
        "ForSemanticSegmentation",
        {
            **{"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16]},
            **{"patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2]},
            **{"decoder_hidden_size": 16, "num_labels": _CLASSES, "drop_path_rate": 0.0},
            **{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout_prob": 0.0},
        },
    )


def _labelled(generator: torch.Generator) -> Batch:
    labels = torch.randint(0, _CLASSES, (BATCH, _PIXELS, _PIXELS), generator=generator)
    labels[:, :2] = 255
    return {"pixel_values": _pixels(generator), "labels": labels}


_SAME, _OTHERS = functools.partial(_detected, False), functools.partial(_detected, True)

DETECTORS = (
    Model("DETR", functools.partial(_detr, "Detr"), _SAME),
    Model("DETR (other numbers of boxes in each batch)", functools.partial(_detr, "Detr"), _OTHERS),
    Model("DETR (auxiliary loss)", functools.partial(_detr, "Detr", auxiliary_loss=True), _SAME),
    Model("Conditional DETR", functools.partial(_detr, "ConditionalDetr"), _SAME),
    Model("Deformable DETR", functools.partial(_detr, "DeformableDetr", num_feature_levels=1), _SAME),
    Model("RT-DETR", _rt_detr, _SAME),
    Model("YOLOS", _yolos, _SAME),
    Model("Grounding DINO", _grounding_dino, _asked),
    Model("SAM", Sam, _outlined),
    Model("SegFormer", _segformer, _labelled),
)
