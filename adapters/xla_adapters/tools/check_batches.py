"""`Batches`: looks at the batches that `DataLoader`s give: padding, and a last batch that is smaller."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader

from xla_adapters.replay.program import StepProgram
from xla_adapters.tools.check_facts import Facts, LoaderFacts, Place
from xla_adapters.utils.location import current_location
from xla_adapters.utils.nested_values import tensors_in
from xla_adapters.utils.patching import replaced

_MASK, _TOKENS = "attention_mask", "input_ids"


class Batches:
    """Notes facts about every `DataLoader` that is iterated inside of `watching`.

    Args:
        facts: to fill in.
    """

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._known: weakref.WeakKeyDictionary[DataLoader[Any], LoaderFacts] = weakref.WeakKeyDictionary()
        self._made: weakref.WeakKeyDictionary[DataLoader[Any], Place] = weakref.WeakKeyDictionary()
        self._last: LoaderFacts | None = None
        self._padding_id: int | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A context in which loaders are watched."""
        around: list[tuple[Any, str, Callable[[Any], Any]]] = [
            (DataLoader, "__init__", self._init),
            (DataLoader, "__iter__", self._iter),
            (StepProgram, "open", self._open),
        ]
        with ExitStack() as stack:
            for owner, name, wrapped in around:
                stack.enter_context(replaced(owner, name, wrapped(getattr(owner, name))))
            yield

    def training_step_ended(self) -> None:
        """The loader that gave the last batch feeds training steps."""
        if self._last is not None:
            self._last.trains = True

    # ---- what is wrapped -------------------------------------------------------------------------

    def _init(self, init: Callable[..., None]) -> Callable[..., None]:
        def init_loader(loader: DataLoader[Any], *args: Any, **options: Any) -> None:
            init(loader, *args, **options)
            self._made[loader] = _caller()

        return init_loader

    def _iter(self, iterate: Callable[[DataLoader[Any]], Any]) -> Callable[[DataLoader[Any]], Any]:
        def iter_loader(loader: DataLoader[Any]) -> Iterator[Any]:
            for batch in iterate(loader):
                self._note(loader, batch)
                yield batch

        return iter_loader

    def _open(self, opened: Callable[..., None]) -> Callable[..., None]:
        def open_program(program: StepProgram, **options: Any) -> None:
            replay = options.get("replay")
            if self._padding_id is None and replay is not None:
                self._padding_id = _padding_id(replay.modules)
            opened(program, **options)

        return open_program

    # ---- what is noted ---------------------------------------------------------------------------

    def _note(self, loader: DataLoader[Any], batch: Any) -> None:
        facts = self._known.get(loader)
        rows = next((len(tensor) for tensor in tensors_in(batch) if tensor.ndim), 0)
        if facts is None:
            facts = LoaderFacts(place=self._made.get(loader, Place()), batch=rows)
            if isinstance(loader.dataset, Sized):
                facts.samples = len(loader.dataset)
                facts.last = _last_batch(facts.samples, len(loader), rows)
            self._known[loader] = facts
            self._facts.loaders.append(facts)
        facts.batches += 1
        self._last = facts
        tokens, padding, known_by = _padding(batch, self._padding_id)
        facts.tokens += tokens
        facts.padding += padding
        facts.known_by = known_by or facts.known_by


def _last_batch(samples: int, batches: int, rows: int) -> int | None:
    """Samples in the last batch, if the loader keeps one with fewer than the others."""
    rest = samples % rows if rows else 0
    return rest if rest and batches == samples // rows + 1 and batches > 1 else None


def _padding(batch: Any, padding_id: int | None) -> tuple[int, int, str]:
    """Tokens in a batch, how many of them are padding, and what tells."""
    if not isinstance(batch, Mapping):
        return 0, 0, ""
    mask, tokens = batch.get(_MASK), batch.get(_TOKENS)
    if isinstance(mask, torch.Tensor) and mask.ndim == 2:
        return mask.numel(), int((mask == 0).sum()), _MASK
    if isinstance(tokens, torch.Tensor) and tokens.ndim == 2 and padding_id is not None:
        return tokens.numel(), int((tokens == padding_id).sum()), f"padding token {padding_id}"
    return 0, 0, ""


def _padding_id(modules: Any) -> int | None:
    """The padding token of the model that a step trains, as its configuration or its embedding has it."""
    for module in modules:
        given = getattr(getattr(module, "config", None), "pad_token_id", None)
        if isinstance(given, int):
            return given
        for part in module.modules():
            if isinstance(part, torch.nn.Embedding) and part.padding_idx is not None:
                return part.padding_idx
    return None


def _caller() -> Place:
    location = current_location()
    where = location.called_from or location if location is not None else None
    return Place() if where is None else Place(file=where.filename, line=where.lineno)
