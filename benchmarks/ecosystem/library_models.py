"""Models of other libraries than transformers: diffusers, timm, PyG."""

from __future__ import annotations

import timm
import torch
from diffusers import DDPMScheduler, UNet2DConditionModel, UNet2DModel
from torch import nn
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv
from torch_geometric.transforms import GCNNorm

from benchmarks.zoo import BATCH, Batch, Model

_PIXELS, _CLASSES, _TEXT_WIDTH = 16, 3, 12
_STEPS = 1000


class Denoiser(nn.Module):
    """A UNet of diffusers and its loss: the noise of a picture is predicted, as in the programs of diffusers.

    Args:
        unet: predicts the noise.
    """

    def __init__(self, unet: nn.Module) -> None:
        super().__init__()
        self.unet = unet
        self.scheduler = DDPMScheduler(num_train_timesteps=_STEPS)

    def forward(
        self, pixels: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor, text: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        noisy = self.scheduler.add_noise(pixels, noise, timesteps)
        condition = {} if text is None else {"encoder_hidden_states": text}
        predicted = self.unet(noisy, timesteps, **condition).sample
        return {"loss": nn.functional.mse_loss(predicted, noise)}


class Classifier(nn.Module):
    """A model of timm and its loss.

    Args:
        net: of timm.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.net(pixel_values)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def unconditional() -> nn.Module:
    """A UNet without a condition."""
    return Denoiser(
        UNet2DModel(
            sample_size=_PIXELS,
            layers_per_block=1,
            block_out_channels=(8, 16),
            norm_num_groups=4,
            attention_head_dim=4,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        )
    )


def conditional() -> nn.Module:
    """A UNet as in Stable Diffusion, conditioned on text."""
    return Denoiser(
        UNet2DConditionModel(
            sample_size=_PIXELS,
            in_channels=3,
            out_channels=3,
            layers_per_block=1,
            block_out_channels=(8, 16),
            norm_num_groups=4,
            attention_head_dim=4,
            cross_attention_dim=_TEXT_WIDTH,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        )
    )


def _noisy(generator: torch.Generator) -> Batch:
    """The noise is part of the batch: a device draws other random numbers than the CPU."""
    shape = (BATCH, 3, _PIXELS, _PIXELS)
    return {
        "pixels": torch.randn(shape, generator=generator),
        "noise": torch.randn(shape, generator=generator),
        "timesteps": torch.randint(0, _STEPS, (BATCH,), generator=generator),
    }


def _noisy_with_text(generator: torch.Generator) -> Batch:
    return {**_noisy(generator), "text": torch.randn(BATCH, 5, _TEXT_WIDTH, generator=generator)}


def _timm_vit() -> nn.Module:
    net = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3, num_classes=_CLASSES
    )
    return Classifier(net)


def _timm_convnext() -> nn.Module:
    return Classifier(
        timm.create_model("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16), num_classes=_CLASSES)
    )


def _timm_resnet() -> nn.Module:
    return Classifier(timm.create_model("resnet10t", channels=(8, 8, 16, 16), stem_width=8, num_classes=_CLASSES))


def _pictures(generator: torch.Generator) -> Batch:
    pixels = torch.randn(BATCH, 3, 32, 32, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(0, _CLASSES, (BATCH,), generator=generator)}


UNET = Model("diffusers UNet2D", unconditional, _noisy)
UNET_CONDITION = Model("diffusers UNet2DCondition", conditional, _noisy_with_text)
TIMM_VIT = Model("timm ViT", _timm_vit, _pictures)
TIMM_CONVNEXT = Model("timm ConvNeXt", _timm_convnext, _pictures)
TIMM_RESNET = Model("timm ResNet", _timm_resnet, _pictures)


# All batches are one graph, as in PyG's first example, with other labels.
_NODES, _EDGES, _FEATURES = 24, 60, 8
_IGNORED = -100


class GCN(nn.Module):
    """Two layers.

    Args:
        normalize: whether the layers normalize the edges in each step. Otherwise `GCNNorm` has done so with the data.
    """

    def __init__(self, normalize: bool) -> None:
        super().__init__()
        self.first = GCNConv(_FEATURES, 16, normalize=normalize)
        self.second = GCNConv(16, _CLASSES, normalize=normalize)

    def forward(
        self, x: torch.Tensor, edge_index: torch.Tensor, labels: torch.Tensor, edge_weight: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        hidden = self.first(x, edge_index, edge_weight).relu()
        logits = self.second(hidden, edge_index, edge_weight)
        return {"loss": nn.functional.cross_entropy(logits, labels, ignore_index=_IGNORED), "logits": logits}


def _graph(generator: torch.Generator) -> Data:
    # The edges are the same in each batch.
    edges = torch.randint(0, _NODES, (2, _EDGES), generator=torch.Generator().manual_seed(1))
    labels = torch.randint(0, _CLASSES, (_NODES,), generator=generator)
    # Instead of `train_mask`, whose number of nodes would shape the step.
    labels[_NODES // 2 :] = _IGNORED
    return Data(torch.randn(_NODES, _FEATURES, generator=generator), edges, y=labels)


def _as_it_is(generator: torch.Generator) -> Batch:
    graph = _graph(generator)
    return {"x": graph.x, "edge_index": graph.edge_index, "labels": graph.y}


def _normalized(generator: torch.Generator) -> Batch:
    graph = GCNNorm()(_graph(generator))
    return {"x": graph.x, "edge_index": graph.edge_index, "edge_weight": graph.edge_weight, "labels": graph.y}


def _normalizing() -> nn.Module:
    return GCN(normalize=True)


def _without() -> nn.Module:
    return GCN(normalize=False)


GCN_NORMALIZING = Model("PyG GCN", _normalizing, _as_it_is)
GCN_NORMALIZED = Model("PyG GCN (edges normalized with the data)", _without, _normalized)
