"""Trainings by a recipe: a YAML file that names a task, a model, data, and options. `xla-adapters train` runs them."""

# ruff: noqa: RUF009 (`_key` makes fields)

from __future__ import annotations

import argparse
import copy
import dataclasses
import difflib
import functools
import glob
import importlib
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy
import transformers
import yaml
from transformers import HfArgumentParser, set_seed

import xla_adapters
from hf_trainer._requirements import require
from hf_trainer.bridge import XLAStatsCallback
from hf_trainer.options import XLAArguments
from xla_adapters.errors import ConfigError

_IGNORED = -100


def _key(meaning: str, default: Any = None) -> Any:
    return field(default=default, metadata={"help": meaning})


@dataclass(kw_only=True)
class Recipe:
    """The keys of a recipe that are no training arguments and no XLA options. Mappings are JSON on the command line."""

    task: str = _key("What is trained.", "")
    model: str | None = _key("A folder or a name on the hub, for from_pretrained.")
    model_type: str | None = _key("Instead of model: the type of a model that is trained from scratch, e.g. llama.")
    model_config: str | None = _key("Values of the model's config, as a mapping. dtype is float32 if it is not there.")
    processor: str | None = _key("Folder or name of the tokenizer, image processor or feature extractor (the model's).")
    dataset: str | None = _key("json, csv, text, parquet or imagefolder with files, or a name on the hub.")
    dataset_config: str | None = _key("The configuration of a dataset that has several.")
    data_files: list[str] | None = _key("Files to train with, or patterns of them.")
    eval_files: list[str] | None = _key("Files to evaluate with, or patterns of them.")
    data_dir: str | None = _key("The folder of the data, instead of files.")
    split: str = _key("The split to train with.", "train")
    eval_split: str | None = _key("The split to evaluate with.")
    columns: list[str] | None = _key("The dataset's columns in the order of the task, if they have other names.")
    lora: str | None = _key("Trains an adapter: values of peft's LoraConfig, as a mapping.")


@dataclass(kw_only=True)
class _Texts:
    max_length: int = _key("The longest text in tokens; what is longer is cut.", 512)


@dataclass(kw_only=True)
class _Sentences(_Texts):
    loss: str = _key("The class of the loss, of those of sentence-transformers.", "MultipleNegativesRankingLoss")


@dataclass(frozen=True)
class Task:
    """How one kind of training is put together.

    Attributes:
        columns: the columns that it reads; several tuples are alternatives.
        trainer, arguments: the classes, as `module:name`.
        prepare: makes the model, and changes the data; returns the trainer's other arguments.
        keys: further keys of the recipe.
    """

    columns: tuple[tuple[str, ...], ...]
    prepare: Callable[[_Job], dict[str, Any]]
    trainer: str = "hf_trainer:Trainer"
    arguments: str = "transformers:TrainingArguments"
    keys: tuple[type, ...] = (_Texts,)


class _Parser(HfArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog.rpartition(' ')[2]}: {message}")


def main(file: str, overrides: Sequence[str]) -> int:
    """Trains by a recipe, and saves the model and its processor in `output_dir`; returns the exit status.

    Args:
        file: the recipe.
        overrides: of the command line: `--key=value`, each of which replaces what the recipe says.

    Raises:
        ConfigError: the recipe cannot work; the message names the key.
    """
    print(f"saved in {train(file, overrides).args.output_dir}")
    return 0


def train(file: str, overrides: Sequence[str] = ()) -> Any:
    """As `main`; returns the trainer."""
    task, recipe, xla, args, more = _parsed(file, overrides)
    set_seed(args.seed)
    job = _Job(file, recipe, args, xla, more, *_datasets(file, recipe))
    if job.evaluation is None and args.eval_strategy != "no":
        raise job.error("eval_strategy", f"{args.eval_strategy.value} needs eval_files or eval_split")
    job.name_columns(task.columns)
    options = task.prepare(job)
    trainer = _class(task.trainer)(
        args=args,
        train_dataset=job.train,
        eval_dataset=job.evaluation,
        xla_args=xla,
        callbacks=[XLAStatsCallback()],
        **options,
    )
    resume = args.resume_from_checkpoint
    trainer.train({"true": True, "false": False}.get(str(resume).lower(), resume))
    if job.evaluation is not None and args.eval_strategy == "no":
        trainer.evaluate()
    trainer.save_model()
    for processor in job.processors:
        processor.save_pretrained(args.output_dir)
    return trainer


# ---- the file ------------------------------------------------------------------------------------


def _parsed(file: str, overrides: Sequence[str]) -> tuple[Task, Recipe, XLAArguments, Any, Any]:
    """The task, and the dataclasses of a recipe: its own keys, XLA options, training arguments, those of the task."""
    try:
        values = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"the recipe {file} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: a recipe is a mapping of keys to values")
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--task", default=values.get("task"))
    name = first.parse_known_args(overrides)[0].task
    if name not in TASKS:
        raise ConfigError(f"{file}: task: {name!r} is none of {', '.join(TASKS)}")
    task = TASKS[name]
    with _about(f"{file}: task"):
        # If the library is missing, the trainer's module says what to install.
        _, arguments = _class(task.trainer), _class(task.arguments)
    kinds: tuple[Any, ...] = (Recipe, XLAArguments, arguments, *task.keys)
    program = f"xla-adapters train {file}"
    parser = _Parser(kinds, prog=program, usage=f"{program} [--key=value ...]", allow_abbrev=False)
    actions: dict[str, Any] = {}
    for action in parser._actions:
        actions.setdefault(action.dest, action)
    _check_keys(file, "key", values, actions)
    parser.set_defaults(**{key: value for key, value in values.items() if value is None or value == []})
    given = [word for key, value in values.items() for word in _words(key, value, actions[key])]
    parsed, rest = parser.parse_known_args([*given, *overrides])
    for word in rest:
        if word.startswith("--"):
            _check_keys("the command line", "key", [word[2:].partition("=")[0]], actions)
        raise ConfigError(f"the command line: {word!r} is not understood; write --key=value")
    found: list[Any] = []
    for kind in kinds:
        if len(found) == 2 and found[1].to_sharding() is not None:
            # Training arguments start the runtime.
            xla_adapters.initialize(spmd=True)
        with _about(file):
            found.append(kind(**{one.name: getattr(parsed, one.name) for one in dataclasses.fields(kind) if one.init}))
    recipe, xla, args, *more = found
    return task, recipe, xla, args, more[0] if more else None


def _words(key: str, value: Any, action: argparse.Action) -> list[str]:
    """What a value of the file is on the command line."""
    if value is None or value == []:
        return []
    if isinstance(value, list):
        return [f"--{key}", *map(str, value)]
    if isinstance(value, bool):
        # YAML reads `no` as false, which is a value of `save_strategy`.
        return [f"--{key}={'no' if not value and 'no' in (action.choices or ()) else str(value).lower()}"]
    return [f"--{key}={json.dumps(value) if isinstance(value, dict) else value}"]


def _check_keys(where: str, what: str, given: Any, known: Any) -> None:
    """Raises if a key is not known.

    Raises:
        ConfigError: lists those that are like it.
    """
    for key in given:
        if key not in known:
            close = difflib.get_close_matches(str(key), list(known), 4)
            like = f"; is it {' or '.join(close)}?" if close else ""
            raise ConfigError(f"{where}: there is no {what} {key!r}{like}")


@contextmanager
def _about(where: str) -> Iterator[None]:
    """Errors of libraries inside the context are those of a recipe: says which key they are about."""
    try:
        yield
    except (OSError, ValueError, TypeError, KeyError, ImportError) as error:
        raise ConfigError(f"{where}: {error}") from error


def _class(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


# ---- data and models -----------------------------------------------------------------------------


def _datasets(file: str, recipe: Recipe) -> tuple[Any, Any]:
    """The datasets to train and to evaluate with; None if it is not evaluated."""
    with _about(f"{file}: dataset"):
        require("a recipe", "ecosystem", datasets="datasets")
    from datasets import exceptions, load_dataset

    if recipe.dataset is None:
        raise ConfigError(f"{file}: dataset: give json, csv, text, parquet or imagefolder, or a name on the hub")
    files = {"data_files": recipe.data_files, "eval_files": recipe.eval_files}
    for key, patterns in (*files.items(), ("data_dir", [recipe.data_dir] if recipe.data_dir else None)):
        for pattern in patterns or ():
            if "://" not in pattern and not glob.glob(pattern, recursive=True):
                raise ConfigError(f"{file}: {key}: there is no {pattern!r} in {Path.cwd()}")
    named = {split: given for split, given in zip(("train", "eval"), files.values(), strict=True) if given}
    try:
        found = load_dataset(recipe.dataset, recipe.dataset_config, data_files=named or None, data_dir=recipe.data_dir)
    except (OSError, ValueError, exceptions.DatasetsError) as error:
        what = f"{error}: {error.__cause__}" if error.__cause__ else str(error)
        raise ConfigError(f"{file}: dataset: {recipe.dataset!r} cannot be loaded: {what}") from error
    chosen = {"split": recipe.split, "eval_split": recipe.eval_split or ("eval" if recipe.eval_files else None)}
    for key, split in chosen.items():
        if split is not None and split not in found:
            raise ConfigError(f"{file}: {key}: the dataset has no {split!r}; it has {', '.join(found)}")
    return found[recipe.split], found[chosen["eval_split"]] if chosen["eval_split"] else None


@dataclass
class _Job:
    """One training by a recipe.

    Attributes:
        file: the recipe's.
        recipe, args, xla, more: its own keys, the training arguments, the XLA options, the keys of the task.
        train, evaluation: the datasets.
        processors: what is saved with the model.
    """

    file: str
    recipe: Recipe
    args: Any
    xla: XLAArguments
    more: Any
    train: Any
    evaluation: Any
    processors: list[Any] = field(default_factory=list)

    def error(self, key: str, message: str) -> ConfigError:
        """An error about a key of the recipe."""
        return ConfigError(f"{self.file}: {key}: {message}")

    def mapping(self, key: str) -> dict[str, Any]:
        """The value of a key that is a mapping; empty if it is not given."""
        try:
            value = json.loads(getattr(self.recipe, key) or "{}")
        except json.JSONDecodeError as error:
            raise self.error(key, f"{getattr(self.recipe, key)!r} is no mapping, and no JSON: {error}") from error
        if not isinstance(value, dict):
            raise self.error(key, f"{value!r} is no mapping")
        return value

    def change(self, function: Callable[[Any], Any]) -> None:
        """Changes both datasets."""
        self.train = function(self.train)
        self.evaluation = function(self.evaluation) if self.evaluation is not None else None

    def name_columns(self, alternatives: tuple[tuple[str, ...], ...]) -> None:
        """Gives the columns the names that the task knows them by, and leaves out others.

        Raises:
            ConfigError: one of them is missing.
        """
        there, given = self.train.column_names, self.recipe.columns
        if given is None:
            given = next(
                (list(names) for names in alternatives if set(names) <= set(there)), [] if alternatives else there
            )
        is_known = not alternatives or tuple(given) in alternatives
        wanted = given if is_known else next((names for names in alternatives if len(names) == len(given)), ())
        missing = [name for name in given if name not in there]
        if missing or not wanted:
            reads = " or ".join(", ".join(names) for names in alternatives) or "the texts of its loss"
            raise self.error(
                "columns",
                f"{self.recipe.task} reads {reads}; the dataset has {', '.join(there)}"
                f"{f', and no {missing[0]}' if missing else ''}. Name them in this order: columns: [...]",
            )
        names = dict(zip(given, wanted, strict=True))
        with _about(f"{self.file}: columns"):
            self.change(lambda data: data.select_columns(given).rename_columns(names))

    def load(self, auto: str) -> Any:
        """A tokenizer, image processor or feature extractor, by the name of its class."""
        source = self.recipe.processor or self.recipe.model
        if source is None:
            raise self.error("processor", "a model from scratch has none: give a folder, or a name on the hub")
        with _about(f"{self.file}: {'processor' if self.recipe.processor else 'model'}"):
            found = getattr(transformers, auto).from_pretrained(source)
        self.processors.append(found)
        return found

    def model(self, auto: str, tokenizer: Any = None, **values: Any) -> Any:
        """The model.

        Args:
            auto: the class that loads it.
            tokenizer: a model from scratch has its vocabulary.
            values: of its config, beside those of the recipe.
        """
        given, recipe = self.mapping("model_config"), self.recipe
        if (recipe.model is None) == (recipe.model_type is None):
            raise self.error("model", "give a folder or a name on the hub; or model_type, to train from scratch")
        if recipe.model_type is not None and tokenizer is not None:
            special = ("pad_token_id", "bos_token_id", "eos_token_id")
            values |= {"vocab_size": len(tokenizer), **{name: getattr(tokenizer, name) for name in special}}
        loader: Any = getattr(transformers, auto)
        config: Any = transformers.AutoConfig
        where = f"{self.file}: {'model' if recipe.model else 'model_type'}"
        with _about(where):
            kind = recipe.model_type or config.from_pretrained(recipe.model).model_type
            # T5 has no attribute for the first token of the decoder until it is set.
            known = [*dir(config.for_model(kind)), "decoder_start_token_id"]
        _check_keys(f"{self.file}: model_config", f"value of {kind}", given, known)
        values |= given
        with _about(where):
            if recipe.model is None:
                return loader.from_config(config.for_model(kind, **values))
            return loader.from_pretrained(
                recipe.model,
                config=config.from_pretrained(recipe.model, **values),
                dtype=values.get("dtype", "float32"),
                # A classifier of other classes gets a new head.
                ignore_mismatched_sizes="id2label" in values,
            )

    def adapter(self, task_type: str | None = None) -> Any:
        """The `LoraConfig` of the recipe; None if it has none."""
        values = self.mapping("lora")
        if not values:
            return None
        with _about(self.file):
            require("lora", "ecosystem", peft="PEFT 0.21")
        from peft import LoraConfig

        _check_keys(f"{self.file}: lora", "value", values, [one.name for one in dataclasses.fields(LoraConfig)])
        with _about(f"{self.file}: lora"):
            return LoraConfig(**{"task_type": task_type, **values})

    def adapted(self, model: Any, task_type: str | None = None) -> Any:
        """The model, with an adapter if the recipe has one."""
        if (adapter := self.adapter(task_type)) is None:
            return model
        from peft import get_peft_model

        with _about(f"{self.file}: lora"):
            return get_peft_model(model, adapter)

    def classes(self) -> dict[str, Any]:
        """The values of a config for the classes of the column `label`, which becomes their numbers."""
        from datasets import ClassLabel, Value

        feature = self.train.features["label"]
        if not isinstance(feature, ClassLabel):
            found = sorted(self.train.unique("label"))
            is_text = isinstance(feature, Value) and "string" in feature.dtype
            if not is_text and not all(isinstance(one, int) and one >= 0 for one in found):
                raise self.error("columns", f"labels are texts or numbers of classes, and not {found[0]!r}")
            feature = ClassLabel(names=found) if is_text else ClassLabel(num_classes=found[-1] + 1)
        with _about(f"{self.file}: columns: label"):
            self.change(lambda data: data.cast_column("label", feature))
        names = dict(enumerate(feature.names))
        return {"id2label": names, "label2id": {name: number for number, name in names.items()}}


# ---- tasks ---------------------------------------------------------------------------------------


def _causal_lm(job: _Job) -> dict[str, Any]:
    tokenizer = job.load("AutoTokenizer")
    length, end = job.more.max_length, tokenizer.eos_token or ""
    keeps_documents = "packing" in (job.xla.shapes or "")

    def tokenize(rows: Mapping[str, Any]) -> dict[str, Any]:
        texts = [text + end for text in rows["text"]]
        if keeps_documents:
            ids = tokenizer(texts, truncation=True, max_length=length)["input_ids"]
        else:
            # One text after the other, cut into rows.
            joined = [token for one in tokenizer(texts)["input_ids"] for token in one]
            ids = [joined[at : at + length] for at in range(0, len(joined) - length + 1, length)]
        return {"input_ids": ids, "labels": ids}

    job.change(lambda data: data.map(tokenize, batched=True, remove_columns=data.column_names))
    if not len(job.train):
        raise job.error("max_length", f"the texts are shorter than one row of {length} tokens")
    model = job.adapted(job.model("AutoModelForCausalLM", tokenizer), "CAUSAL_LM")
    return {"model": model, "processing_class": tokenizer, "data_collator": transformers.default_data_collator}


def _sft(job: _Job) -> dict[str, Any]:
    from datasets import Value

    tokenizer = job.load("AutoTokenizer")
    if not isinstance(job.train.features.get("text", Value("string")), Value):
        job.change(lambda data: data.rename_column("text", "messages"))
    model = job.model("AutoModelForCausalLM", tokenizer)
    return {"model": model, "processing_class": tokenizer, "peft_config": job.adapter("CAUSAL_LM")}


def _dpo(job: _Job) -> dict[str, Any]:
    options = _sft(job)
    # With an adapter the reference is the model without it.
    reference = None if options["peft_config"] else copy.deepcopy(options["model"])
    return {**options, "ref_model": reference}


def _classification(job: _Job) -> dict[str, Any]:
    tokenizer, classes = job.load("AutoTokenizer"), job.classes()

    def tokenize(rows: Mapping[str, Any]) -> dict[str, Any]:
        encoded = tokenizer(rows["text"], rows.get("text_pair"), truncation=True, max_length=job.more.max_length)
        return {**encoded, "labels": rows["label"]}

    job.change(lambda data: data.map(tokenize, batched=True, remove_columns=data.column_names))
    model = job.model("AutoModelForSequenceClassification", tokenizer, **classes)
    return {"model": job.adapted(model, "SEQ_CLS"), "processing_class": tokenizer, "compute_metrics": _accuracy}


def _accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((numpy.argmax(prediction.predictions, -1) == prediction.label_ids).mean())}


def _seq2seq(job: _Job) -> dict[str, Any]:
    tokenizer = job.load("AutoTokenizer")

    def tokenize(rows: Mapping[str, Any]) -> Any:
        limit = {"truncation": True, "max_length": job.more.max_length}
        return tokenizer(rows["source"], text_target=rows["target"], **limit)

    job.change(lambda data: data.map(tokenize, batched=True, remove_columns=data.column_names))
    start = {} if job.recipe.model else {"decoder_start_token_id": tokenizer.pad_token_id}
    model = job.adapted(job.model("AutoModelForSeq2SeqLM", tokenizer, **start), "SEQ_2_SEQ_LM")
    collator = transformers.DataCollatorForSeq2Seq(tokenizer, model=model)
    return {"model": model, "processing_class": tokenizer, "data_collator": collator}


def _image_classification(job: _Job) -> dict[str, Any]:
    processor = job.load("AutoImageProcessor")
    model = job.model("AutoModelForImageClassification", **job.classes())
    mode = "L" if getattr(model.config, "num_channels", 3) == 1 else "RGB"

    def pixels(rows: Mapping[str, Any]) -> dict[str, Any]:
        images = processor([image.convert(mode) for image in rows["image"]], return_tensors="pt")
        return {"pixel_values": images["pixel_values"], "labels": rows["label"]}

    _prepared_when_read(job, pixels)
    return {"model": job.adapted(model), "processing_class": processor, "compute_metrics": _accuracy}


def _speech(job: _Job) -> dict[str, Any]:
    extractor, tokenizer = job.load("AutoFeatureExtractor"), job.load("AutoTokenizer")
    model = job.model("AutoModelForSpeechSeq2Seq", tokenizer)
    start = model.config.decoder_start_token_id

    def features(rows: Mapping[str, Any]) -> dict[str, Any]:
        rate = extractor.sampling_rate
        heard = extractor([_sound(job, one, rate) for one in rows["audio"]], sampling_rate=rate, return_tensors="pt")
        limit = {"truncation": True, "max_length": job.more.max_length, "padding": "max_length"}
        encoded = tokenizer(rows["text"], return_tensors="pt", **limit)
        labels = encoded["input_ids"].masked_fill(encoded["attention_mask"] == 0, _IGNORED)
        # The model puts the first token before them.
        return {"input_features": heard["input_features"], "labels": labels[:, int((labels[:, 0] == start).all()) :]}

    _prepared_when_read(job, features)
    return {"model": job.adapted(model), "processing_class": extractor}


def _prepared_when_read(job: _Job, function: Callable[[Mapping[str, Any]], dict[str, Any]]) -> None:
    """Images and spectrograms would be many times as large as their files."""
    job.args.remove_unused_columns = False
    job.change(lambda data: data.with_transform(function))


def _sound(job: _Job, value: Any, wanted: int) -> Any:
    """The samples of a sound: a WAV file, or what `datasets` has decoded."""
    if isinstance(value, str):
        from scipy.io import wavfile

        with _about(f"{job.file}: columns: audio: {value}"):
            rate, samples = wavfile.read(value)
        scale = numpy.iinfo(samples.dtype).max if samples.dtype.kind == "i" else 1
        samples = samples.astype(numpy.float32) / scale
    else:
        rate, samples = value["sampling_rate"], numpy.asarray(value["array"], numpy.float32)
    if rate != wanted:
        raise job.error("columns", f"a sound has {rate} samples per second, and the feature extractor wants {wanted}")
    return samples.mean(-1) if samples.ndim > 1 else samples


def _sentence_transformers(job: _Job) -> dict[str, Any]:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import losses
    from sentence_transformers.sentence_transformer.data_collator import SentenceTransformerDataCollator

    source = job.recipe.model
    with tempfile.TemporaryDirectory() as folder:
        if source is None or job.recipe.processor or job.recipe.model_config:
            source, tokenizer = folder, job.load("AutoTokenizer")
            job.processors.clear()
            tokenizer.save_pretrained(folder)
            job.model("AutoModel", tokenizer).save_pretrained(folder)
        with _about(f"{job.file}: model"):
            model = SentenceTransformer(source, device="cpu")
    model.max_seq_length = job.more.max_length
    if (adapter := job.adapter("FEATURE_EXTRACTION")) is not None:
        model.add_adapter(adapter)
    _check_keys(f"{job.file}: loss", "loss", [job.more.loss], losses.__all__)
    # One shape, in the training only.
    padded = functools.partial(model.preprocess, processing_kwargs={"text": {"padding": "max_length"}})
    collator = SentenceTransformerDataCollator(padded, router_mapping=job.args.router_mapping, prompts=job.args.prompts)
    return {"model": model, "loss": getattr(losses, job.more.loss)(model), "data_collator": collator}


TASKS = {
    "causal-lm": Task((("text",),), _causal_lm),
    "sft": Task(
        (("text",), ("messages",), ("prompt", "completion")), _sft, "hf_trainer.trl:SFTTrainer", "trl:SFTConfig", ()
    ),
    "dpo": Task(
        (("prompt", "chosen", "rejected"), ("chosen", "rejected")),
        _dpo,
        "hf_trainer.trl:DPOTrainer",
        "trl:DPOConfig",
        (),
    ),
    "classification": Task((("text", "text_pair", "label"), ("text", "label")), _classification),
    "seq2seq": Task(
        (("source", "target"),),
        _seq2seq,
        "hf_trainer:Seq2SeqTrainer",
        "transformers:Seq2SeqTrainingArguments",
    ),
    "image-classification": Task((("image", "label"),), _image_classification, keys=()),
    "speech": Task((("audio", "text"),), _speech, "hf_trainer:Seq2SeqTrainer", "transformers:Seq2SeqTrainingArguments"),
    "sentence-transformers": Task(
        (),
        _sentence_transformers,
        "hf_trainer.sentence_transformers:SentenceTransformerTrainer",
        "sentence_transformers:SentenceTransformerTrainingArguments",
        (_Sentences,),
    ),
}
