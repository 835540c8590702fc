"""The models of torch_xla's dynamo training table, a ViT, GPT-2 and Llama; small inputs, random weights."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import nn

from benchmarks.training import token_batches
from benchmarks.zoo_batches import Batch

CLASSES = 1000
# Of the transformers: between those of the tests and those people train on accelerators.
_WIDTH, _LAYERS, _HEADS, _VOCABULARY = 256, 4, 4, 1024


@dataclass(frozen=True)
class Shape:
    """The sizes of the models' inputs.

    Attributes:
        batch: rows.
        pixels: of images, square.
        length: of texts.
    """

    batch: int = 8
    pixels: int = 64
    length: int = 64


class Classified(nn.Module):
    """An image model with its loss, called as those of transformers are."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> Any:
        return SimpleNamespace(loss=nn.functional.cross_entropy(self.net(pixel_values), labels))


@dataclass(frozen=True)
class Model:
    """A row of the table.

    Attributes:
        name: of the row.
        make: makes it.
        images: whether it takes images; else texts.
        vision: whether it is torchvision's.
    """

    name: str
    make: Callable[[Shape], nn.Module]
    images: bool = True
    vision: bool = False

    @property
    def missing(self) -> str | None:
        """Why it cannot be measured here, if so."""
        if self.vision and importlib.util.find_spec("torchvision") is None:
            return "not measured: torchvision is not installed (pip install 'xla-adapters[bench]')"
        return None

    def build(self, shape: Shape, *, dropout: bool = True) -> nn.Module:
        """The model with random weights, the same at each call.

        Args:
            shape: of its inputs.
            dropout: whether it drops anything; without, its losses do not depend on random numbers.
        """
        torch.manual_seed(0)
        made = self.make(shape)
        for module in made.modules():
            if isinstance(module, nn.Dropout) and not dropout:
                module.p = 0.0
        return made

    def batches(self, number: int, shape: Shape) -> list[Batch]:
        """Random batches, the same at each call; images come from a few, which are repeated."""
        if not self.images:
            return token_batches(number, (shape.batch, shape.length), _VOCABULARY)
        generator = torch.Generator().manual_seed(0)
        few = [
            {
                "pixel_values": torch.randn(shape.batch, 3, shape.pixels, shape.pixels, generator=generator),
                "labels": torch.randint(0, CLASSES, (shape.batch,), generator=generator),
            }
            for _ in range(4)
        ]
        return [few[index % len(few)] for index in range(number)]


def _vision(name: str, function: str) -> Model:
    def make(shape: Shape) -> nn.Module:
        import torchvision

        return Classified(getattr(torchvision.models, function)(num_classes=CLASSES))

    return Model(name, make, vision=True)


def _vit(shape: Shape) -> nn.Module:
    config = transformers.ViTConfig(
        image_size=shape.pixels,
        patch_size=8,
        hidden_size=_WIDTH,
        num_hidden_layers=_LAYERS,
        num_attention_heads=_HEADS,
        intermediate_size=4 * _WIDTH,
        num_labels=CLASSES,
        hidden_dropout_prob=0.1,
    )
    return transformers.ViTForImageClassification(config)


def _bert(shape: Shape) -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=_VOCABULARY,
        hidden_size=_WIDTH,
        num_hidden_layers=_LAYERS,
        num_attention_heads=_HEADS,
        intermediate_size=4 * _WIDTH,
        max_position_embeddings=shape.length,
    )
    return transformers.BertForMaskedLM(config)


def _gpt2(shape: Shape) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=_VOCABULARY,
        n_positions=shape.length,
        n_embd=_WIDTH,
        n_layer=_LAYERS,
        n_head=_HEADS,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config)


def _llama(shape: Shape) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=_WIDTH,
        intermediate_size=3 * _WIDTH,
        num_hidden_layers=_LAYERS,
        num_attention_heads=_HEADS,
        num_key_value_heads=_HEADS // 2,
        max_position_embeddings=shape.length,
    )
    return transformers.LlamaForCausalLM(config)


MODELS: tuple[Model, ...] = (
    _vision("ResNet-18", "resnet18"),
    _vision("ResNet-50", "resnet50"),
    _vision("ResNeXt-50", "resnext50_32x4d"),
    Model("BERT", _bert, images=False),
    _vision("AlexNet", "alexnet"),
    _vision("MobileNetV2", "mobilenet_v2"),
    _vision("MNASNet", "mnasnet1_0"),
    _vision("VGG-16", "vgg16"),
    _vision("SqueezeNet", "squeezenet1_1"),
    Model("ViT", _vit),
    Model("GPT-2", _gpt2, images=False),
    Model("Llama", _llama, images=False),
)


def named(names: str) -> list[Model]:
    """The models of these names, comma-separated.

    Raises:
        ValueError: there is none of a name; the message lists what there is.
    """
    known = {model.name.lower(): model for model in MODELS}
    chosen = []
    for name in (part.strip() for part in names.split(",")):
        if name.lower() not in known:
            raise ValueError(f"no model is called {name!r}; there are {', '.join(model.name for model in MODELS)}")
        chosen.append(known[name.lower()])
    return chosen
