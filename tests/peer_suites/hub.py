"""Tiny models, tokenizers and data under the names that transformers' tests ask the hub for."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

_WORDPIECE = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 700,
}
_BERTS = {
    "google-bert/bert-base-cased": False,
    "google-bert/bert-base-cased-finetuned-mrpc": False,
    "google-bert/bert-base-uncased": True,
    "bert-base-cased": False,
    "bert-base-uncased": True,
    "prajjwal1/bert-tiny": True,
}


def _lines(fixtures: Path, count: int) -> list[str]:
    lines = [line for line in (fixtures / "sample_text.txt").read_text().splitlines() if line.strip()]
    return (lines * (count // len(lines) + 1))[:count]


def _pairs(fixtures: Path) -> list[dict[str, str]]:
    rows = (fixtures / "tests_samples/wmt_en_ro/train.json").read_text().splitlines()
    return [json.loads(row)["translation"] for row in rows if row.strip()]


def replace_data(fixtures: Path) -> None:
    """`datasets.load_dataset` makes data sets of the hub from the fixtures."""
    import datasets

    stock, pairs = datasets.load_dataset, _pairs(fixtures)

    def columns(source: str, target: str) -> Any:
        some = (pairs * 40)[:40]
        return datasets.Dataset.from_dict({source: [row["en"] for row in some], target: [row["ro"] for row in some]})

    made = {
        "Salesforce/wikitext": lambda: datasets.Dataset.from_dict({"text": _lines(fixtures, 200)}),
        "abisee/cnn_dailymail": partial(columns, "article", "highlights"),
        "openai/gsm8k": partial(columns, "question", "answer"),
        "fka/awesome-chatgpt-prompts": lambda: datasets.DatasetDict(
            train=datasets.Dataset.from_dict({"prompt": _lines(fixtures, 64)})
        ),
    }

    def load_dataset(path: str, *args: Any, **kwargs: Any) -> Any:
        return made[path]() if path in made else stock(path, *args, **kwargs)

    datasets.load_dataset = load_dataset


class Hub:
    """Writes models and tokenizers into a cache of the hub.

    Args:
        folder: the cache.
        fixtures: text to train tokenizers with.
    """

    def __init__(self, folder: Path, fixtures: Path) -> None:
        self._folder = folder
        self._corpus = _lines(fixtures, 400) + [text for row in _pairs(fixtures) for text in row.values()]

    def add(self, name: str, *parts: Any) -> Path:
        """Adds a repository with what `save_pretrained` of each part writes."""
        root = self._folder / f"models--{name.replace('/', '--')}"
        folder = root / "snapshots" / ("0" * 40)
        folder.mkdir(parents=True, exist_ok=True)
        (root / "refs").mkdir(exist_ok=True)
        (root / "refs" / "main").write_text("0" * 40)
        for part in parts:
            part.save_pretrained(folder)
        return folder

    def byte_pairs(self, *special: str, **names: str) -> Any:
        """A tokenizer of byte pairs."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
        from transformers import PreTrainedTokenizerFast

        made = Tokenizer(models.BPE(byte_fallback=False))
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=list(special), initial_alphabet=alphabet)
        made.train_from_iterator(self._corpus, trainer)
        return PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=128, **names)

    def word_pieces(self, *, lower: bool) -> Any:
        """BERT's tokenizer."""
        from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
        from transformers import PreTrainedTokenizerFast

        made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        made.normalizer = normalizers.BertNormalizer(lowercase=lower)
        made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(vocab_size=600, special_tokens=list(_WORDPIECE))
        made.train_from_iterator(self._corpus, trainer)
        made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
        names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
        return PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=512, **names)

    def unigrams(self, *special: str) -> list[tuple[str, float]]:
        """A vocabulary of T5 and mBART."""
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers

        made = Tokenizer(models.Unigram())
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=500, special_tokens=list(special), unk_token="<unk>")
        made.train_from_iterator(self._corpus, trainer)
        return [tuple(entry) for entry in json.loads(made.to_str())["model"]["vocab"]]


def make(folder: Path, fixtures: Path) -> None:
    """Makes the cache, unless it is there."""
    if (folder / "complete").exists():
        return
    import torch

    torch.manual_seed(0)
    hub = Hub(folder, fixtures)
    _add_decoders(hub)
    _add_berts(hub)
    _add_pairs(hub)
    (folder / "complete").touch()


def _add_decoders(hub: Hub) -> None:
    import transformers as t

    names = {"unk_token": "<unk>", "pad_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = hub.byte_pairs("<unk>", "<s>", "</s>", **names)
    ids: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2}
    llama = t.LlamaForCausalLM(t.LlamaConfig(**_SMALL, **ids))
    hub.add("hf-internal-testing/tiny-random-LlamaForCausalLM", llama, tokenizer)
    qwen = t.Qwen2ForCausalLM(t.Qwen2Config(**_SMALL, num_key_value_heads=2, **ids))
    hub.add("trl-internal-testing/tiny-Qwen2ForCausalLM-2.5", qwen, tokenizer)
    end = "<|endoftext|>"
    tokenizer = hub.byte_pairs(end, unk_token=end, bos_token=end, eos_token=end)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 700, "n_positions": 128}
    hub.add(
        "openai-community/gpt2", t.GPT2LMHeadModel(t.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)), tokenizer
    )


def _add_berts(hub: Hub) -> None:
    import transformers as t

    for name, lower in _BERTS.items():
        model = t.BertForSequenceClassification(t.BertConfig(**_SMALL))
        folder = hub.add(name, model, hub.word_pieces(lower=lower))
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        settings |= {"tokenizer_class": "BertTokenizer", "do_lower_case": lower}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
        (folder / "vocab.txt").write_text("\n".join(sorted(vocabulary, key=vocabulary.get)) + "\n")


def _add_pairs(hub: Hub) -> None:
    import transformers as t

    tokens = hub.unigrams("<pad>", "</s>", "<unk>")
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 700}
    model = t.T5ForConditionalGeneration(t.T5Config(**sizes, decoder_start_token_id=0))
    hub.add("google-t5/t5-small", model, t.T5Tokenizer(vocab=tokens, model_max_length=512))
    tokenizer = t.MBartTokenizer(vocab=hub.unigrams("<s>", "<pad>", "</s>", "<unk>"), model_max_length=512)
    sizes = {
        f"{part}_{name}": size
        for part in ("encoder", "decoder")
        for name, size in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))
    }
    sizes |= {"d_model": 32, "max_position_embeddings": 128, "vocab_size": len(tokenizer) + 8}
    hub.add("sshleifer/tiny-mbart", t.MBartForConditionalGeneration(t.MBartConfig(**sizes)), tokenizer)
