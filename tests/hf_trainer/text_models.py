"""A tokenizer of characters, and tiny Llamas and Berts in folders, as programs load them from the hub."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

_SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
_VOCABULARY = 128


def tokenizer() -> PreTrainedTokenizerFast:
    """A token for each character."""
    characters = [*_SPECIAL, *map(chr, range(32, 127))]
    tokens = Tokenizer(models.WordLevel({one: index for index, one in enumerate(characters)}, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokens.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokens, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )


def llama(kind: type[PreTrainedModel] = LlamaForCausalLM, **options: Any) -> PreTrainedModel:
    """A decoder that knows the folder it is saved in: some trainers load a second one from there."""
    torch.manual_seed(0)
    model = kind(
        LlamaConfig(
            vocab_size=_VOCABULARY,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=64,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            **options,
        )
    )
    folder = tempfile.mkdtemp()
    model.save_pretrained(folder)
    model.config._name_or_path = model.name_or_path = folder
    return model


def bert_folder(kind: type[PreTrainedModel] = BertModel, **options: Any) -> str:
    """The folder of an encoder and its tokenizer."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=_VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=0,
        **options,
    )
    folder = tempfile.mkdtemp()
    kind(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder
