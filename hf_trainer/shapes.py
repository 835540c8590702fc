"""`TrainerShapes`: the batches of a trainer get few shapes, so that few programs are compiled."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy
import torch
import transformers
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, RandomSampler, Sampler, default_collate

from hf_trainer.model import model_of
from hf_trainer.replay import overridden
from xla_adapters.data.batches import BucketBatches, BucketSampler
from xla_adapters.data.packing import PackedDataset, why_documents_mix
from xla_adapters.data.shapes import (
    ShapeNotices,
    ShapePolicy,
    Shapes,
    lengths_of,
    why_own_loss_may_count,
    why_padding_may_count,
    with_rows,
)
from xla_adapters.errors import ConfigError
from xla_adapters.runtime import get_runtime
from xla_adapters.utils.host_random import host_random_numbers_kept
from xla_adapters.utils.patching import replaced

# Models of transformers whose losses are means over labels that are not -100, each row by itself.
_MEANS_OVER_LABELS = re.compile(
    r"(ForCausalLM|LMHeadModel|ForMaskedLM|ForConditionalGeneration|ForTokenClassification|ForSequenceClassification"
    r"|ForImageClassification|ForAudioClassification|ForQuestionAnswering|ForMultipleChoice)$"
)
# Of these, those whose results have a length, as their inputs.
_PER_TOKEN = re.compile(
    r"(ForCausalLM|LMHeadModel|ForMaskedLM|ForConditionalGeneration|ForTokenClassification|ForQuestionAnswering)$"
)
# Datasets for evaluation whose lengths are remembered.
_KEPT = 16
_CAUSAL = re.compile(r"(ForCausalLM|LMHeadModel)$")
# Softmax over all positions.
_BY_POSITION = re.compile(r"ForQuestionAnswering$")
# Options of `generate` whose effect does not depend on padding.
_SAME_WITH_PADDING = frozenset(
    """max_length max_new_tokens min_length min_new_tokens max_time do_sample temperature top_k top_p min_p typical_p
    epsilon_cutoff eta_cutoff num_beams num_return_sequences length_penalty early_stopping renormalize_logits
    remove_invalid_values suppress_tokens begin_suppress_tokens forced_bos_token_id forced_eos_token_id bos_token_id
    eos_token_id pad_token_id decoder_start_token_id use_cache cache_implementation max_cache_len disable_compile
    return_dict_in_generate output_scores output_logits transformers_version synced_gpus generation_config labels
    decoder_input_ids decoder_attention_mask assistant_confidence_threshold assistant_lookbehind num_assistant_tokens
    num_assistant_tokens_schedule target_lookbehind""".split()  # noqa: SIM905 (a list has a line for each)
)
# Options that do nothing if they are 1.
_OFF_AT_ONE = ("repetition_penalty", "encoder_repetition_penalty", "guidance_scale", "num_beam_groups")
# What looks at the tokens before the new ones: those of the decoder, if there is an encoder.
_LOOKING_BACK = frozenset("repetition_penalty no_repeat_ngram_size bad_words_ids sequence_bias stop_strings".split())  # noqa: SIM905
# Options of a `DataLoader` that are kept when its batches are formed otherwise.
_OF_LOADER = (
    *("collate_fn", "num_workers", "pin_memory", "worker_init_fn", "prefetch_factor", "persistent_workers"),
    *("multiprocessing_context", "timeout", "generator", "in_order"),
)
# Families of models with an encoder whose decoders alone count positions from the first token, padding or not.
_COUNTING_ALL = frozenset("bart blenderbot m2m_100 marian mbart mt5 pegasus t5 umt5 whisper".split())  # noqa: SIM905


class TrainerShapes:
    """Gives the batches of a trainer few shapes: see `ShapePolicy`.

    Batches stay as the collator has made them until a step takes them: counts of samples and tokens, and what callbacks
    see, are those of the data.

    Args:
        trainer: the trainer.
        policy: None leaves batches as they are.
    """

    def __init__(self, trainer: transformers.Trainer, policy: ShapePolicy | None) -> None:
        self._trainer = trainer
        self._policy = policy
        self._training: Shapes | None = None
        self._evaluation: Shapes | None = None
        # Of the training, if they have as many tokens and not as many rows.
        self._batches: BucketBatches | None = None
        # The sampler that these are in place of.
        self._stock: Any = None
        # Whether the loader of the training is known.
        self._has_loader = False
        # Of datasets for evaluation, with these, so that no other gets the same id.
        self._known: dict[int, tuple[Any, Shapes | None]] = {}
        self._notices = ShapeNotices()

    @property
    def number(self) -> int:
        """How many lengths batches of the training have; 0 before its data is known."""
        return 0 if self._training is None else self._training.used

    @property
    def announced(self) -> list[dict[str, Any]]:
        """The shapes that were announced, as `Shapes.as_values`."""
        return self._notices.announced

    # ---- which shapes ----------------------------------------------------------------------------

    def samples_for(self, rows: int) -> int:
        """How many of the first samples of the training, repeated if need be, make at least so many rows of batches."""
        packing = None if self._policy is None else self._policy.packing
        found = None if packing is None else lengths_of(self._trainer.train_dataset, "input_ids")
        # As in a `PackedDataset`, where documents of one token are in no row.
        sizes = [size if size > 1 else 0 for size in (found or ([], None))[0]]
        if packing is None or not any(sizes):
            return rows
        tokens, wanted = numpy.cumsum(sizes), rows * packing
        whole, rest = divmod(wanted, int(tokens[-1]))
        return whole * len(tokens) + int(numpy.searchsorted(tokens, rest)) + 1

    def sampler(self, dataset: Any, stock: Sampler[int] | None) -> Sampler[int] | None:
        """The sampler of a training: batches of one bucket each, in random order, if the stock one is random."""
        policy, trainer = self._policy, self._trainer
        if policy is None or type(stock) is not RandomSampler:
            return stock
        args = trainer.args
        rows = int(trainer._train_batch_size or args.train_batch_size) * args.world_size
        if policy.tokens_per_batch is not None:
            rows = get_runtime().device.count() if get_runtime().device.is_spmd() else 1
        lengths: list[int] | None = None
        labels: list[int] | None = None
        if policy.packing is None:
            lengths, labels = lengths_of(dataset, policy.length_of) or (None, None)
        if lengths is None and policy.packing is None:
            self._notices.without_lengths(policy)
        elif lengths is not None and self._may_pad(policy):
            self._training = policy.fit(lengths, labels, rows=rows, limit=self._limit())
            self._announce(self._training, "training")
        if policy.tokens_per_batch is not None and args.auto_find_batch_size:
            raise ConfigError(
                f"tokens_per_batch={policy.tokens_per_batch} decides how large batches are, so that "
                "auto_find_batch_size=True has nothing to choose: leave one of them out"
            )
        seed, drops = args.seed if args.data_seed is None else args.data_seed, policy.last_batch == "drop"
        if self._training is not None and lengths is not None and policy.tokens_per_batch is not None:
            drops = drops or args.dataloader_drop_last
            self._batches, self._stock = self._training.batch_sampler(lengths, seed=seed, drop_last=drops), stock
        shapes = self._training or ShapePolicy(buckets=1).fit([0])
        if self._batches is not None or (len(shapes.bounds) == 1 and not drops):
            return stock
        known = lengths if self._training is not None and lengths is not None else [0] * len(dataset)
        return shapes.sampler(known, rows, seed=seed, drop_last=drops)

    def loader(self, make: Callable[[], Any]) -> Any:
        """The loader of a training, whose sampler may be the user's own.

        Args:
            make: makes it; calls `sampler` if transformers chooses one.

        Raises:
            ConfigError: the lengths of a stream are not known, or its documents cannot be packed.
        """
        policy, self._training, self._has_loader = self._policy, None, True
        # Evaluations are announced once.
        announced = self._notices.announced
        announced[:] = [entry for entry in announced if entry["of"].startswith("evaluation")]
        self._batches = None
        with ExitStack() as stack:
            if policy is not None and policy.tokens_per_batch is not None:
                prepare = self._trainer.accelerator.prepare
                stack.enter_context(replaced(self._trainer.accelerator, "prepare", self._prepared_by(prepare)))
            if policy is not None and policy.packing is not None and self._trainer.train_dataset is not None:
                stack.enter_context(self._packing(policy, policy.packing))
            loader = make()
            self._check_sampler(loader)
        if policy is not None and self._training is None:
            self._fit_training(policy, loader)
        if policy is not None and policy.tokens_per_batch is not None and self._batches is None:
            self._notices.warn(
                f"tokens_per_batch={policy.tokens_per_batch} has no effect: it needs a dataset with a length, that is "
                "read in transformers' random order by its own loader, and whose batches may be padded"
            )
        return loader

    def _prepared_by(self, prepare: Callable[..., Any]) -> Callable[..., Any]:
        """accelerate's function that takes a loader, whose batches are replaced by those of as many tokens."""

        def prepared(loader: Any, *args: Any, **options: Any) -> Any:
            if self._batches is not None and getattr(loader, "sampler", None) is not self._stock:
                # The user's own sampler chooses.
                self._batches = None
            if self._batches is not None:
                # As of the loader that transformers makes.
                kept = {name: getattr(loader, name) for name in _OF_LOADER}
                loader = DataLoader(loader.dataset, batch_sampler=self._batches, **kept)
            return prepare(loader, *args, **options)

        return prepared

    @contextmanager
    def _packing(self, policy: ShapePolicy, length: int) -> Iterator[None]:
        """The loader that is made reads rows of whole documents, each as the trainer's collator makes it."""
        trainer = self._trainer
        reason = self._why_not_packed(policy)
        if reason:
            raise ConfigError(f"packing={length}: {reason}")
        before = trainer.train_dataset, trainer.data_collator
        collator = trainer._get_collator_with_removed_columns(trainer.data_collator, "training")
        packed = PackedDataset(trainer.train_dataset, length, collator=collator, pad_id=self._pad_id() or 0)
        if len(packed):
            # What cannot be put together is told before the training.
            with host_random_numbers_kept():
                packed[0]
        if trainer.is_world_process_zero():
            print(f"shapes of the training: {packed}; 1 graph of each kind of step", file=sys.stderr)
        trainer.train_dataset, trainer.data_collator = packed, default_collate
        try:
            yield
        finally:
            trainer.train_dataset, trainer.data_collator = before

    def _check_sampler(self, loader: Any) -> None:
        """Raises if a sampler of the user's has other samples in mind than rows of documents."""
        rows, batches = self._trainer.train_dataset, getattr(loader, "batch_sampler", None)
        # accelerate gives each process its part of another sampler's batches.
        sampler = getattr(getattr(batches, "batch_sampler", batches), "sampler", None)
        if not isinstance(rows, PackedDataset) or not isinstance(sampler, Sized) or isinstance(sampler, BucketSampler):
            return
        if len(sampler) != len(rows):
            raise ConfigError(
                f"packing: the training has {len(rows)} rows of documents, and {type(sampler).__name__} chooses "
                f"{len(sampler)} samples. Make it of the dataset that _get_train_sampler is given"
            )

    def _why_not_packed(self, policy: ShapePolicy) -> str:
        """Why documents in a row may change each other's losses, in words; empty if they cannot."""
        trainer, inner = self._trainer, _inner_model(self._trainer)
        if any(base.__module__.startswith("trl.") for base in type(trainer).__mro__):
            return "trainers of TRL make their batches themselves, and SFTConfig has a packing= of its own"
        names = ("training_step", "_prepare_inputs", "_prepare_input", "_set_signature_columns_if_needed")
        if (own := overridden(trainer, names)) is not None:
            return f"{own} of your own may change a batch (an attention mask lets documents see each other)"
        if not _CAUSAL.search(type(inner).__name__) or not type(inner).__module__.startswith("transformers.models."):
            return f"{type(inner).__name__} is no causal language model of transformers"
        if self._has_own_loss() and (reason := why_own_loss_may_count(policy)):
            return reason
        if (strategy := trainer.args.train_sampling_strategy) not in ("random", "sequential"):
            return f"train_sampling_strategy={strategy!r} has nothing to go by, since rows have one length"
        return self._why_length_counts() or why_documents_mix(model_of(trainer))

    def _of_unknown_loader(self, policy: ShapePolicy) -> None:
        """A step comes, and the user's `get_train_dataloader` has made the loader alone."""
        self._has_loader = True
        where = f"{type(self._trainer).__name__}.get_train_dataloader makes the loader alone"
        if policy.packing is not None:
            raise ConfigError(
                f"packing={policy.packing} has no effect: {where}. Call super().get_train_dataloader() there"
            )
        if isinstance(policy.buckets, tuple):
            self._training = Shapes.given(policy) if self._may_pad(policy) else None
        else:
            self._notices.warn(
                f"batches of the training keep their lengths: {where}. Call super().get_train_dataloader() there, or "
                "list the lengths: buckets=[64, 128, ...]"
            )

    def _fit_training(self, policy: ShapePolicy, loader: Any) -> None:
        dataset, sampler = loader.dataset, getattr(getattr(loader, "batch_sampler", None), "sampler", None)
        drops = getattr(loader, "drop_last", False) or isinstance(sampler, BucketSampler)
        if policy.last_batch == "drop" and not drops:
            self._notices.warn(
                "last_batch='drop' has no effect with this loader: give it drop_last=True (dataloader_drop_last)"
            )
        is_stream = isinstance(dataset, torch.utils.data.IterableDataset) or not hasattr(dataset, "__len__")
        if policy.packing is not None or not self._may_pad(policy):
            return
        if isinstance(policy.buckets, tuple) and is_stream:
            self._training = Shapes.given(policy)
        elif (found := lengths_of(dataset, policy.length_of)) is None:
            self._notices.without_lengths(policy)
        else:
            self._training = policy.fit(*found, limit=self._limit())
            self._announce(self._training, "training" + ", by the first samples of its stream" * is_stream)

    @contextmanager
    def evaluating(self, loader: Any) -> Iterator[None]:
        """Around an evaluation: its batches are those of a loader, in its order."""
        before, self._evaluation = self._evaluation, None
        if self._policy is not None and self._may_pad(self._policy):
            self._evaluation = self._of_evaluation(self._policy, getattr(loader, "dataset", None))
        try:
            yield
        finally:
            self._evaluation = before

    def _of_evaluation(self, policy: ShapePolicy, dataset: Any) -> Shapes | None:
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            return Shapes.given(policy) if isinstance(policy.buckets, tuple) else self._training
        if id(dataset) not in self._known:
            if len(self._known) == _KEPT:
                del self._known[next(iter(self._known))]
            lengths, labels = lengths_of(dataset, policy.length_of) or ([], None)
            self._known[id(dataset)] = dataset, self._of_batches(policy, lengths, labels) if lengths else None
        return self._known[id(dataset)][1]

    def _of_batches(self, policy: ShapePolicy, lengths: list[int], labels: list[int] | None) -> Shapes | None:
        """The order of an evaluation stays: what is padded to a bucket are batches."""
        longest = self._longest(lengths)
        of_labels = [0] * len(longest) if labels is None else self._longest(labels)
        if isinstance(policy.buckets, tuple):
            # Longer ones stay as they are.
            fitting = [pair for pair in zip(longest, of_labels, strict=True) if pair[0] <= policy.buckets[-1]]
            longest, of_labels = [pair[0] for pair in fitting], [pair[1] for pair in fitting]
        if not longest:
            return None
        found = policy.fit(longest, None if labels is None else of_labels, limit=self._limit())
        self._announce(found, "evaluation, whose order stays")
        return found

    def _longest(self, lengths: list[int]) -> list[int]:
        rows = self._trainer.args.eval_batch_size
        return [max(lengths[begin : begin + rows]) for begin in range(0, len(lengths), rows)]

    def _announce(self, shapes: Shapes, of: str) -> None:
        if self._trainer.is_world_process_zero():
            self._notices.announce(shapes, of)

    def _limit(self) -> int | None:
        """The length that the model takes, if its config says so."""
        limit = getattr(getattr(model_of(self._trainer), "config", None), "max_position_embeddings", None)
        return limit if isinstance(limit, int) and limit > 0 else None

    # ---- batches ---------------------------------------------------------------------------------

    def of_training(self, inputs: Any) -> tuple[Any, str]:
        """A batch as its step takes it, and what distinguishes its program from those of other lengths, in words."""
        if self._policy is None:
            return inputs, ""
        if not self._has_loader:
            self._of_unknown_loader(self._policy)
        inputs, phase, _ = self._shaped(self._training, inputs)
        rows = self._trainer._train_batch_size
        if self._batches is not None and self._training is not None:
            place = self._training.place(_length_of(inputs, self._policy.length_of))
            rows = 0 if place is None else self._training.rows_of[place]
            if 0 < rows < _rows(inputs):
                self._notices.warn(
                    f"a batch of {_rows(inputs)} rows has more elements than tokens_per_batch: its collator pads to "
                    "more than the longest of its samples"
                )
        inputs = self._with_rows(inputs, rows, trains=True)
        return (inputs if self._policy.packing is None else _of_documents(inputs)), phase

    def of_evaluation(self, inputs: Any, *, preprocesses: bool) -> tuple[Any, str, Cut | None]:
        """As `of_training`; and what cuts the results of the step to those of the batch as it was.

        Args:
            inputs: the batch.
            preprocesses: whether the step calls code of the user's with its results.
        """
        if self._policy is None:
            return inputs, "", None
        if preprocesses:
            self._notices.warn(
                "batches of evaluations keep their shapes: preprocess_logits_for_metrics would see what is added"
            )
            return inputs, "", None
        shaped, phase, cut = self._shaped(self._evaluation, inputs)
        rows = self._trainer.args.eval_batch_size
        more = self._with_rows(shaped, rows, trains=False)
        if more is not shaped:
            cut.rows = rows, _rows(shaped)
        return more, phase, cut

    def of_prompts(self, model: Any, options: Mapping[str, Any]) -> Prompts:
        """The prompts of a call of `generate`, with the length of a bucket.

        Args:
            model: generates.
            options: as for `generate`, by name, on the host.
        """
        prompts = Prompts(options=dict(options))
        shapes = self._evaluation or self._training
        if shapes is None and self._policy is not None and isinstance(self._policy.buckets, tuple):
            shapes = Shapes.given(self._policy)
        ids = options.get("input_ids")
        if shapes is None or shapes.policy.length_of != "input_ids" or ids is None or ids.ndim != 2:
            return prompts
        whole = None if _has_new(model, options) else _option(model, options, "max_length")
        if whole is not None and ids.shape[1] >= whole and not model.config.is_encoder_decoder:
            # transformers says so, of the prompt as it is.
            return prompts
        reason = self._why_model_sees(model) or _why_generation_sees(model, options)
        reason = reason or prompts.extend(shapes, model, self._pad_id() or 0, self._limit())
        if reason:
            self.prompts_stay(reason)
        elif self._evaluation is not None and shapes.policy.last_batch == "pad":
            prompts.add_rows(model, self._trainer.args.eval_batch_size)
        return prompts

    def prompts_stay(self, why: str) -> None:
        """Warns that prompts of generation keep their length; once for each reason, in words."""
        if self._policy is not None:
            self._notices.warn(f"prompts of generation keep their length: {why}")

    def _shaped(self, shapes: Shapes | None, inputs: Any) -> tuple[Any, str, Cut]:
        """A batch of a bucket's length."""
        cut = Cut(per_token=_PER_TOKEN.search(type(_inner_model(self._trainer)).__name__) is not None)
        if shapes is None:
            return inputs, "", cut
        shaped, reason = shapes.padded(inputs, self._pad_id())
        if reason:
            self._notices.warn(f"a batch keeps its length: {reason}")
            return inputs, "", cut
        for name, value in inputs.items() if shaped is not inputs else ():
            if isinstance(value, torch.Tensor) and value.ndim > 1:
                cut.add_length(name, shaped[name].shape[1], value.shape[1])
        return shaped, shapes.phase(shaped), cut

    def _with_rows(self, inputs: Any, rows: int, *, trains: bool) -> Any:
        """A batch filled up with rows of which it is known that they do not count; else the batch itself."""
        policy = self._policy
        count = _rows(inputs)
        if policy is None or policy.last_batch != "pad" or not count or not rows or count >= rows:
            return inputs
        reason = self._why_rows_count(inputs, trains=trains)
        if not reason:
            inputs, reason = with_rows(inputs, rows)
        if reason:
            self._notices.warn(f"a batch of {count} rows keeps them, which costs one more compile: {reason}")
        return inputs

    def _has_own_loss(self) -> bool:
        """Whether code computes the loss that is not transformers'."""
        trainer, model = self._trainer, _inner_model(self._trainer)
        return (
            trainer.compute_loss_func is not None
            or overridden(trainer, ("compute_loss",)) is not None
            or not type(model).__module__.startswith("transformers.models.")
            or hasattr(model, "_loss_function")
            or bool(getattr(model.config, "loss_type", None))
        )

    def _may_pad(self, policy: ShapePolicy) -> bool:
        """Whether padding is known to change no loss and no result, or promised; if not, warns."""
        model = model_of(self._trainer)
        reason = self._why_model_sees(model) or (why_own_loss_may_count(policy) if self._has_own_loss() else "")
        if reason:
            self._notices.warn(f"batches keep their lengths, and are not arranged by them: {reason}")
        return not reason

    def _why_model_sees(self, model: Any) -> str:
        if _BY_POSITION.search(type(_inner_model(self._trainer)).__name__):
            return "its model chooses among all positions, which sees padding, too"
        return self._why_length_counts() or why_padding_may_count(model, self._pad_id())

    def _why_length_counts(self) -> str:
        if getattr(getattr(model_of(self._trainer), "active_peft_config", None), "is_prompt_learning", False):
            return "its model adds tokens of its own"
        if self._trainer.args.neftune_noise_alpha is not None:
            return "the noise of neftune_noise_alpha depends on the length"
        return ""

    def _why_rows_count(self, inputs: Mapping[str, Any], *, trains: bool) -> str:
        """Why rows without labels may change a loss; empty if they cannot."""
        trainer, model = self._trainer, _inner_model(self._trainer)
        name = type(model).__name__
        if trainer.args.world_size > 1:
            return "several processes divide the data"
        if self._has_own_loss():
            return f"it is not known whether the loss of {name}, or your own, leaves out rows whose labels are -100"
        if not _MEANS_OVER_LABELS.search(name):
            return f"it is not known whether the loss of {name} leaves out rows whose labels are -100"
        if (unknown := why_padding_may_count(model)) != "" and "input_ids" in inputs:
            return unknown
        if getattr(model.config, "output_router_logits", False):
            return "a loss on the router sees all rows"
        kind = getattr(model.config, "problem_type", None) or "single_label_classification"
        if name.endswith("Classification") and (model.config.num_labels == 1 or kind != "single_label_classification"):
            return "the loss is no choice of one class"
        if trains and any(isinstance(module, _BatchNorm) for module in model.modules()):
            return "batch norm sees all rows"
        if not {"labels", "start_positions"} & set(inputs) and (trains or trainer.can_return_loss):
            return "it has no labels"
        return ""

    def _pad_id(self) -> int | None:
        trainer = self._trainer
        tokenizers = (trainer.processing_class, getattr(trainer.data_collator, "tokenizer", None))
        holders = (*tokenizers, getattr(trainer.processing_class, "tokenizer", None), model_of(trainer))
        for holder in holders:
            found = getattr(getattr(holder, "config", holder), "pad_token_id", None)
            if isinstance(found, int):
                return found
        return None


class Cut:
    """Removes the added rows and positions from the results of a step.

    Args:
        per_token: whether results have a length, as the inputs.

    Attributes:
        rows: how many rows the step got, and how many of them count; None if that is the same.
    """

    def __init__(self, *, per_token: bool) -> None:
        self.rows: tuple[int, int] | None = None
        self._per_token = per_token
        self._lengths: dict[int, set[int]] = {}
        self._of_labels: tuple[int, int] | None = None

    def add_length(self, name: str, extended: int, length: int) -> None:
        """What has this name in the batch was extended."""
        self._lengths.setdefault(extended, set()).add(length)
        if name == "labels":
            self._of_labels = extended, length

    def __call__(self, results: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        """Loss, logits and labels, cut.

        Args:
            results: of `prediction_step`, on the host.
        """
        if self.rows is None and not self._lengths:
            return results
        loss, logits, labels = results
        first = logits[0] if isinstance(logits, (list, tuple)) and logits else None
        return (
            loss,
            tree_map(lambda value: self._cut(value, is_first=value is first or value is logits), logits),
            tree_map(lambda value: self._cut(value, is_first=True), labels),
        )

    def _cut(self, value: Any, *, is_first: bool) -> Any:
        if not isinstance(value, torch.Tensor) or not value.ndim:
            return value
        if self.rows is not None and value.shape[0] == self.rows[0]:
            value = value[: self.rows[1]]
        if value.ndim not in (2, 3):
            return value
        size = value.shape[1]
        if is_first and self._of_labels is not None and size == self._of_labels[0]:
            return value[:, : self._of_labels[1]]
        if value.ndim == 2 and not self._per_token:
            return value
        lengths = self._lengths.get(size, set())
        # Inputs and labels may have been extended to the same length.
        return value[:, : next(iter(lengths))] if len(lengths) == 1 else value


class Prompts:
    """The arguments of `generate`, whose prompts may get the length of a bucket.

    The prompts of a decoder are extended in front, where masks hide what is put, and the input of an encoder behind.

    Args:
        options: the arguments, by name.

    Attributes:
        options: the arguments, perhaps with longer prompts.
        are_longer: whether they were extended.
        phase: what distinguishes the programs from those of other lengths, in words.
        cache_length: of a static cache for prompts of every bucket; None if it is not known (models with an encoder,
            prompts that stay).
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.are_longer = False
        self.phase = ""
        self.cache_length: int | None = None
        self._in_front = 0
        # How many sequences count, if rows were added.
        self._count: int | None = None

    def extend(self, shapes: Shapes, model: Any, pad_id: int, limit: int | None) -> str:
        """Extends the prompts to the length of their bucket; says in words why not, if it cannot."""
        size = self.options["input_ids"].shape[1]
        of_encoder = bool(model.config.is_encoder_decoder)
        prompts = {name: value for name, value in self.options.items() if _is_prompt(name, value, size)}
        # `padded` extends behind.
        turned = prompts if of_encoder else {name: value.flip(1) for name, value in prompts.items()}
        padded, reason = shapes.padded(turned, pad_id)
        if reason:
            return reason
        in_front = 0 if of_encoder else padded["input_ids"].shape[1] - size
        lengths = _new_lengths(model, self.options, in_front)
        whole = _option(model, self.options, "max_length")
        new = _option(model, self.options, "max_new_tokens") or (20 if whole is None else whole - size)
        if not of_encoder and limit is not None and size + in_front + new > limit:
            return f"{size + in_front + new} positions (a bucket and new tokens) are more than the {limit} of the model"
        # The same for prompts of all lengths, so that the cache is.
        longest = shapes.bounds[-1] + (new if whole is None or _has_new(model, self.options) else whole - 1)
        longest = longest if limit is None else min(longest, limit)
        self.options |= padded if of_encoder else {name: value.flip(1) for name, value in padded.items()}
        self.options |= lengths
        self._in_front, self.are_longer = in_front, padded is not turned
        self.phase = shapes.phase(padded)
        self.cache_length = None if of_encoder else longest - 1
        return ""

    def add_rows(self, model: Any, rows: int) -> None:
        """Fills up the last batch of an evaluation, where each row is generated by itself."""
        count = len(self.options["input_ids"])
        tensors = {name: value for name, value in self.options.items() if isinstance(value, torch.Tensor)}
        if count >= rows or any(
            _option(model, self.options, name) for name in ("do_sample", "return_dict_in_generate")
        ):
            return
        extended, reason = with_rows(tensors, rows)
        if not reason:
            self.options |= extended
            self._count = count * (_option(model, self.options, "num_return_sequences") or 1)

    def cut(self, generated: Any) -> Any:
        """What was generated, without what was added."""
        if isinstance(generated, torch.Tensor):
            return generated[: self._count, self._in_front :]
        if self._in_front:
            generated.sequences = generated.sequences[:, self._in_front :]
        return generated


def _is_prompt(name: str, value: Any, size: int) -> bool:
    of_decoder = name == "labels" or name.startswith("decoder_")
    return isinstance(value, torch.Tensor) and value.ndim >= 2 and value.shape[1] == size and not of_decoder


def _option(model: Any, options: Mapping[str, Any], name: str) -> Any:
    """An option of `generate`, as given or as in the configs, in the order in which transformers looks for it."""
    configs = (options.get("generation_config"), model.generation_config)
    found = (options.get(name), *(getattr(config, name, None) for config in configs))
    return next((value for value in found if value is not None), None)


def _has_new(model: Any, options: Mapping[str, Any]) -> bool:
    return _option(model, options, "max_new_tokens") is not None


def _new_lengths(model: Any, options: Mapping[str, Any], more: int) -> dict[str, int]:
    """Limits of whole lengths, if so many positions are put in front."""
    names = [name for name in ("max", "min") if _option(model, options, f"{name}_new_tokens") is None]
    limits = {f"{name}_length": _option(model, options, f"{name}_length") for name in names}
    return {name: limit + more for name, limit in limits.items() if limit and more}


def _why_generation_sees(model: Any, options: Mapping[str, Any]) -> str:
    """Why what is generated may depend on padding, in words; empty if it does not."""
    paths = [type(part).__module__.split(".") for part in model.modules()]
    families = {path[2] for path in paths if path[:2] == ["transformers", "models"]} & _COUNTING_ALL
    if not model.config.is_encoder_decoder and families:
        return f"decoders of the family {min(families)!r} count positions from the first token, padding or not"
    if options.get("past_key_values") is not None:
        return "a cache is given, which would get what is added"
    configs = [config for config in (model.generation_config, options.get("generation_config")) if config is not None]
    names = dict.fromkeys([name for config in configs for name in vars(config)])
    given = {name: _option(model, options, name) for name in names}
    given |= {name: value for name, value in options.items() if not isinstance(value, torch.Tensor)}
    known = _SAME_WITH_PADDING | (_LOOKING_BACK if model.config.is_encoder_decoder else set())
    seeing = sorted(
        name
        for name, value in given.items()
        if name not in known and not name.startswith("_") and value and not (name in _OFF_AT_ONE and value == 1)
    )
    return f"{', '.join(seeing)} of generate may see what is added" if seeing else ""


def _of_documents(inputs: Any) -> Any:
    """A packed batch as models of transformers take it to look for documents, whatever their configs say by now.

    Raises:
        ConfigError: something has changed it.
    """
    if "position_ids" not in inputs or inputs.get("attention_mask") is not None:
        raise ConfigError(
            "packing: a batch must have position_ids and no attention_mask when its step begins, and has "
            f"{', '.join(sorted(inputs))}"
        )
    return {**inputs, "use_cache": False}


def _length_of(inputs: Any, name: str) -> int:
    value = inputs.get(name) if isinstance(inputs, Mapping) else None
    return int(value.shape[1]) if isinstance(value, torch.Tensor) and value.ndim > 1 else sys.maxsize


def _rows(inputs: Any) -> int:
    values = inputs.values() if isinstance(inputs, Mapping) else ()
    return next((len(value) for value in values if isinstance(value, torch.Tensor) and value.ndim), 0)


def _inner_model(trainer: transformers.Trainer) -> Any:
    """The model of transformers, also inside one of PEFT."""
    model: Any = model_of(trainer)
    return model.get_base_model() if hasattr(model, "get_base_model") else model
