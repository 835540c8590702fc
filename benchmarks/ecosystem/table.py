"""The cells of the table.

Left out is what makes no sense: TRL and sentence-transformers train texts, Seq2SeqTrainer what generates a sequence
from another; adapters of PEFT are shown for the models that people adapt.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.ecosystem import with_lightning, with_sentences, with_transformers, with_trl
from benchmarks.ecosystem.audio import AUDIO
from benchmarks.ecosystem.cell import Cell
from benchmarks.ecosystem.detectors import DETECTORS, HUNGARIAN, PADDED
from benchmarks.ecosystem.library_models import (
    GCN_NORMALIZED,
    GCN_NORMALIZING,
    TIMM_CONVNEXT,
    TIMM_RESNET,
    TIMM_VIT,
    UNET,
    UNET_CONDITION,
)
from benchmarks.ecosystem.vision_language import VISION_LANGUAGE
from benchmarks.zoo import ARCHITECTURES, Model


def _called(name: str, model: str, among: tuple[Model, ...] = ARCHITECTURES) -> Model:
    (found,) = (one for one in among if one.name == model)
    return replace(found, name=name)


DECODER = _called("decoder (Llama)", "Llama (padded)")
ENCODER = _called("encoder (BERT)", "BERT (padded)")
SEQ2SEQ = _called("seq2seq (T5)", "T5 (padded)")
BART = _called("seq2seq (BART)", "BART (padded)")
VISION = _called("vision (ViT)", "ViT")
SPEECH = _called("speech (Whisper)", "Whisper")
CTC = _called("CTC speech (Wav2Vec2)", "Wav2Vec2 (CTC)")
SEGMENTATION = _called("segmentation (Segformer)", "SegFormer", DETECTORS)

EVERY_MODEL = (
    *(DECODER, ENCODER, SEQ2SEQ, VISION, SPEECH, CTC),
    *(UNET, UNET_CONDITION, TIMM_VIT, TIMM_CONVNEXT, TIMM_RESNET),
    *(SEGMENTATION, PADDED, HUNGARIAN, GCN_NORMALIZING, GCN_NORMALIZED),
)


def cells() -> list[Cell]:
    """All of them, by trainer."""
    return [
        *with_transformers.plain(EVERY_MODEL),
        *with_transformers.seq2seq((SEQ2SEQ, BART, SPEECH)),
        *with_transformers.adapted((DECODER, ENCODER, SEQ2SEQ, VISION, SPEECH, UNET_CONDITION, TIMM_VIT), dora=False),
        *with_transformers.adapted((DECODER, ENCODER, SEQ2SEQ, VISION), dora=True),
        *with_trl.cells(),
        *with_sentences.cells(),
        *with_lightning.trainer(EVERY_MODEL),
        *with_lightning.fabric(EVERY_MODEL),
    ]


def multimodal() -> list[Cell]:
    """transformers' Trainer with models of images and texts, of sound, and of objects in pictures."""
    return with_transformers.plain((*VISION_LANGUAGE, *AUDIO, *DETECTORS))
