"""RF-DETR, with the loss of transformers, and with targets of a fixed number that are matched in the graph.

transformers matches predictions and boxes by the Hungarian algorithm of SciPy: on the host, in the middle of the step.
RF-DETR pads its targets for XLA (`pad_targets_to`), so that the number of boxes shapes no graph, and matches on the
host as well. The second loss here pads likewise, and matches without leaving the graph: each box in turn takes the
best query that is free.
"""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.ecosystem.detectors import PIXELS, QUERIES, pictures, targets
from benchmarks.zoo import BATCH, CLASSES, Batch, Model
from benchmarks.zoo import of_transformers as of

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
