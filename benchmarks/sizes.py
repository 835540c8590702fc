"""Models of any depth and width with random weights, by family, and batches for them."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import nn

from benchmarks.zoo import Batch

GPT2, VIT, RESNET = "gpt2", "vit", "resnet"
_HIDDEN_DROPOUT = ("hidden_dropout_prob", "attention_probs_dropout_prob")
_SPECIAL_TOKENS = {"bos_token_id": 0, "eos_token_id": 0}
# Images are drawn a few times and repeated.
_IMAGES = 4
# Of Whisper large v3; and how many windows half a minute has.
_MEL_BINS, _WINDOWS = 128, 3000


def _no_more(size: Size) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Family:
    """How a family of transformers calls its sizes.

    Attributes:
        model: the class.
        names: options of the config for layers, width, heads, and the width between the layers of an MLP.
        dropout: options that are rates of dropout.
        length: the option for the most tokens of a text, if there is one.
        grows: an MLP's width, as a multiple of the model's.
        images: whether it takes images; else texts.
        sounds: whether it takes sounds of half a minute, beside the texts that it writes.
        classes: whether it predicts a class for each row; else tokens.
        more: further options of the config.
    """

    model: str
    names: tuple[str, ...] = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")
    dropout: tuple[str, ...] = ()
    length: str | None = "max_position_embeddings"
    grows: float = 4
    images: bool = False
    sounds: bool = False
    classes: bool = False
    more: Callable[[Size], dict[str, Any]] = _no_more


def _image_options(size: Size) -> dict[str, Any]:
    return {"image_size": size.pixels, "patch_size": size.patch, "num_labels": size.classes}


def _decoder_like_encoder(size: Size) -> dict[str, Any]:
    decoder = {"layers": size.layers, "attention_heads": size.heads, "ffn_dim": int(4 * size.width)}
    tokens = {**_SPECIAL_TOKENS, "pad_token_id": 0, "decoder_start_token_id": 0}
    return {**{f"decoder_{name}": value for name, value in decoder.items()}, **tokens, "num_mel_bins": _MEL_BINS}


FAMILIES = {
    GPT2: Family(
        "GPT2LMHeadModel",
        ("n_layer", "n_embd", "n_head", "n_inner"),
        ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
        "n_positions",
        more=lambda size: _SPECIAL_TOKENS,
    ),
    "llama": Family("LlamaForCausalLM", dropout=("attention_dropout",), grows=3, more=lambda size: _SPECIAL_TOKENS),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        dropout=("attention_dropout",),
        grows=3,
        more=lambda size: {"num_key_value_heads": 1, "head_dim": size.width // size.heads, **_SPECIAL_TOKENS},
    ),
    "gpt_neo": Family(
        "GPTNeoForCausalLM",
        ("num_layers", "hidden_size", "num_heads", "intermediate_size"),
        ("attention_dropout", "embed_dropout", "resid_dropout"),
        more=lambda size: {"attention_types": [[["global", "local"], size.layers // 2]], **_SPECIAL_TOKENS},
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        dropout=("attention_dropout",),
        grows=2,
        more=lambda size: {"num_key_value_heads": 8, "num_local_experts": 8},
    ),
    "bert": Family("BertForMaskedLM", dropout=_HIDDEN_DROPOUT),
    "bert_classes": Family(
        "BertForSequenceClassification",
        dropout=_HIDDEN_DROPOUT,
        classes=True,
        more=lambda size: {"num_labels": size.classes},
    ),
    "t5": Family(
        "T5ForConditionalGeneration",
        ("num_layers", "d_model", "num_heads", "d_ff"),
        ("dropout_rate",),
        None,
        more=lambda size: {"d_kv": size.width // size.heads, "decoder_start_token_id": 0},
    ),
    "whisper": Family(
        "WhisperForConditionalGeneration",
        ("encoder_layers", "d_model", "encoder_attention_heads", "encoder_ffn_dim"),
        ("dropout",),
        "max_target_positions",
        sounds=True,
        more=_decoder_like_encoder,
    ),
    VIT: Family(
        "ViTForImageClassification",
        dropout=_HIDDEN_DROPOUT,
        length=None,
        images=True,
        classes=True,
        more=_image_options,
    ),
}


@dataclass(frozen=True)
class Size:
    """A model, and its batches.

    Attributes:
        layers, width, heads, dropout: of the model; of torchvision's models only whether there is dropout.
        family: of transformers, a key of `FAMILIES` or `RESNET`; or the name of a function of torchvision.
        batch, length: rows, and tokens of a text.
        vocabulary, classes: how many tokens and classes there are.
        pixels, patch: of images, square.
        grows: see `Family`; None for the family's.
        options: of the config, instead of those that follow from the sizes.
    """

    layers: int
    width: int
    length: int = 64
    batch: int = 8
    vocabulary: int = 256
    heads: int = 2
    dropout: float = 0.1
    family: str = GPT2
    classes: int = 256
    pixels: int = 32
    patch: int = 8
    grows: float | None = None
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        size = f"{self.layers}x{self.width}"
        return size if self.family == GPT2 else f"{self.family} {size}" if self.layers else self.family

    @property
    def missing(self) -> str | None:
        """Why the model cannot be made here, if so."""
        if self.family in FAMILIES or self.family == RESNET or importlib.util.find_spec("torchvision") is not None:
            return None
        return "not measured: torchvision is not installed (pip install 'xla-adapters[bench]')"

    def model(self) -> nn.Module:
        """The model with random weights, the same at each call."""
        torch.manual_seed(0)
        if self.family == RESNET:
            return _resnet(self)
        if self.family not in FAMILIES:
            return _of_torchvision(self)
        family = FAMILIES[self.family]
        grows = self.grows or family.grows
        sizes = (self.layers, self.width, self.heads, int(grows * self.width))
        options = dict(zip(family.names, sizes, strict=True)) | dict.fromkeys(family.dropout, self.dropout)
        if family.length is not None:
            options[family.length] = self.length
        if not family.images:
            options["vocab_size"] = self.vocabulary
        kind: Any = getattr(transformers, family.model)
        made: nn.Module = kind(kind.config_class(**{**options, **family.more(self), **dict(self.options)}))
        return made

    @property
    def _images(self) -> bool:
        return self.family not in FAMILIES or FAMILIES[self.family].images

    def batches(self, number: int) -> list[Batch]:
        """Random batches, the same at each call: tokens that predict themselves, or images and their classes."""
        draw = torch.Generator().manual_seed(0)
        if self._images:
            shape = (self.batch, 3, self.pixels, self.pixels)
            few = [
                {
                    "pixel_values": torch.randn(shape, generator=draw),
                    "labels": torch.randint(0, self.classes, (self.batch,), generator=draw),
                }
                for _ in range(min(number, _IMAGES))
            ]
            return [few[index % len(few)] for index in range(number)]
        shape_of_text = (self.batch, self.length)
        tokens = [torch.randint(0, self.vocabulary, shape_of_text, generator=draw) for _ in range(number)]
        return [{"input_ids": ids, "labels": ids.clone()} for ids in tokens]

    def example(self) -> Batch:
        """A batch of zeros, for what is compiled and not run."""
        classes = torch.zeros(self.batch, dtype=torch.long)
        if self._images:
            return {"pixel_values": torch.zeros(self.batch, 3, self.pixels, self.pixels), "labels": classes}
        tokens = torch.zeros(self.batch, self.length, dtype=torch.long)
        if FAMILIES[self.family].sounds:
            return {"input_features": torch.zeros(self.batch, _MEL_BINS, _WINDOWS), "labels": tokens}
        return {"input_ids": tokens, "labels": classes if FAMILIES[self.family].classes else tokens.clone()}


def _resnet(size: Size) -> nn.Module:
    """The width is that of the last of three stages; each has the layers."""
    hidden = [size.width // 4, size.width // 2, size.width]
    config = transformers.ResNetConfig(
        embedding_size=hidden[0],
        hidden_sizes=hidden,
        depths=[size.layers] * len(hidden),
        layer_type="basic",
        num_labels=size.classes,
    )
    return transformers.ResNetForImageClassification(config)


class Classified(nn.Module):
    """An image model with its loss, called as those of transformers are.

    Args:
        net: predicts a class for each image.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> Any:
        return SimpleNamespace(loss=nn.functional.cross_entropy(self.net(pixel_values), labels))


def _of_torchvision(size: Size) -> nn.Module:
    import torchvision

    net = getattr(torchvision.models, size.family)(num_classes=size.classes)
    for module in net.modules():
        if isinstance(module, nn.Dropout) and not size.dropout:
            module.p = 0.0
    return Classified(net)


def sizes(text: str, **options: Any) -> list[Size]:
    """`"2x128,12x32"`: layers and width of each; `"vit 2x128"`: of another family than GPT-2.

    Raises:
        ValueError: it is written otherwise.
    """
    made = []
    for item in text.split(","):
        family, _, size = item.strip().rpartition(" ")
        layers, times, width = size.partition("x")
        if not (times and layers.isdigit() and width.isdigit()):
            raise ValueError(f"{item!r} is not LAYERSxWIDTH, as in 12x32")
        if family and family not in FAMILIES:
            raise ValueError(f"no family is called {family!r}; there are {', '.join(FAMILIES)}")
        made.append(Size(int(layers), int(width), **options, **({"family": family} if family else {})))
    return made


_NO_CACHE = ("use_cache", False)
_LONG = ("max_position_embeddings", 4096)
# GPT-2 of 124 million parameters, Llama 3.2 of 1 billion and Llama 3 of 8 (without tied weights), GPT-Neo of 1.3, a
# Mixtral-like of 1.2 with 8 experts, ViT-L/16, T5 large, Whisper large v3 (1.5); all without dropout.
REAL_SIZES = {
    "gpt2": Size(12, 768, 1024, 16, 50257, 12, 0.0, options=(_NO_CACHE,)),
    "llama-1b": Size(
        *(16, 2048, 1024, 16, 128256, 32, 0.0),
        family="llama",
        grows=4,
        options=(_NO_CACHE, _LONG, ("num_key_value_heads", 8)),
    ),
    "llama-8b": Size(
        *(32, 4096, 1024, 16, 128256, 32, 0.0),
        family="llama",
        grows=3.5,
        options=(_NO_CACHE, _LONG, ("num_key_value_heads", 8)),
    ),
    "gpt-neo": Size(
        *(24, 2048, 1024, 16, 50257, 16, 0.0),
        family="gpt_neo",
        options=(_NO_CACHE, ("max_position_embeddings", 2048)),
    ),
    "mixtral": Size(*(12, 1024, 1024, 16, 32000, 16, 0.0), family="mixtral", grows=3.5, options=(_NO_CACHE, _LONG)),
    "vit": Size(24, 1024, batch=128, heads=16, dropout=0.0, family=VIT, classes=1000, pixels=224, patch=16),
    "t5": Size(24, 1024, 512, 16, 32128, 16, 0.0, family="t5", options=(_NO_CACHE,)),
    "whisper": Size(32, 1280, 448, 16, 51866, 20, 0.0, family="whisper", options=(_NO_CACHE,)),
}
# Families that sharding is measured with, and options of the model that are theirs alone.
_TO_SHARD: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": {"grows": 4},
    "gpt_neo": {"options": (("window_size", 32),)},
    "mixtral": {},
    "bert": {"family": "bert_classes", "options": (("max_position_embeddings", 512),)},
    "t5": {},
    "vit": {},
    "resnet": {},
}
TO_SHARD = tuple(_TO_SHARD)


def to_shard(family: str, *, width: int, layers: int = 2, rows: int = 16) -> tuple[nn.Module, Batch]:
    """A model without dropout on the host, with random weights, and a batch for it.

    Args:
        family: one of `TO_SHARD`.
        width: of the hidden states; of a ResNet, of its last stage.
        layers: of a ResNet, in each of three stages.
        rows: of the batch.
    """
    options = {"family": family, "heads": 8, "vocabulary": 4096, "classes": 16, "patch": 4, **_TO_SHARD[family]}
    size = Size(layers, width, 128, rows, dropout=0.0, **options)
    return size.model(), size.example()


def of_real_size(name: str, layers: int = 0, rows: int = 0) -> tuple[nn.Module, Batch]:
    """A model without weights, on the meta device, and a batch.

    Args:
        name: one of `REAL_SIZES`.
        layers: how many; 0 for those of the real size.
        rows: of the batch; 0 likewise.
    """
    size = REAL_SIZES[name]
    with torch.device("meta"):
        size = dataclasses.replace(size, layers=layers or size.layers, batch=rows or size.batch)
        return size.model(), size.example()
