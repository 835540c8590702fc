"""`LoaderShapes`: the batches of a Trainer's or Fabric's loaders get few shapes, so that few programs are compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.fabric.utilities.data import _update_dataloader
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from xla_adapters.data.shapes import (
    ShapeNotices,
    ShapePolicy,
    Shapes,
    lengths_of,
    why_own_loss_may_count,
    why_padding_may_count,
)
from xla_adapters.errors import ConfigError


class LoaderShapes:
    """Gives the batches of loaders few shapes: see `ShapePolicy`.

    What a module's loss makes of rows that are not there nobody knows, so that a smaller last batch keeps its rows,
    unless it is dropped.

    Args:
        policy: None leaves batches as they are.
        seed: returns that of the order in which a training reads its data.
    """

    def __init__(self, policy: ShapePolicy | None, seed: Callable[[], int]) -> None:
        if policy is not None and policy.packing is not None:
            raise ConfigError(
                f"packing={policy.packing}: nobody knows whether your module gives its model the position_ids of a "
                "row, which keep documents apart. Give your DataLoader a PackedDataset (xla_adapters.data.packing),"
                " and pass its input_ids, position_ids and labels on to the model"
            )
        if policy is not None and policy.tokens_per_batch is not None:
            raise ConfigError(
                f"tokens_per_batch={policy.tokens_per_batch}: your loaders have a batch size of their own. Give your "
                "DataLoader a batch_sampler: ShapePolicy(tokens_per_batch=...).fit(lengths).batch_sampler(lengths)"
            )
        self._policy = policy
        self._seed = seed
        self._notices = ShapeNotices()
        self.begin()

    def begin(self) -> None:
        """A run begins, perhaps with other data and another model."""
        self._notices.announced = []
        self._shapes: dict[bool, Shapes] = {}
        # The longest sample of each batch of all evaluations, and of its labels.
        self._longest: tuple[list[int], list[int]] = [], []
        self._known: list[Any] = []
        # The dataset whose batches are formed within buckets: that of the training.
        self._in_order: Any = None
        self._pad_id: int | None = None
        self._limit: int | None = None
        # Why batches keep their lengths.
        self._why_not = "" if self._policy is None else why_own_loss_may_count(self._policy)

    def model_is_known(self, module: torch.nn.Module) -> None:
        """Looks for the id of padding in the configs of transformers' models in a module, and whether they see it."""
        self._why_not = self._why_not or why_padding_may_count(module)
        configs = [getattr(part, "config", None) for part in module.modules()]
        ids = [getattr(config, "pad_token_id", None) for config in configs]
        self._pad_id = next((number for number in (self._pad_id, *ids) if isinstance(number, int)), None)
        limits = [getattr(config, "max_position_embeddings", None) for config in configs]
        self._limit = min(
            (limit for limit in (self._limit, *limits) if isinstance(limit, int) and limit > 0), default=None
        )

    @property
    def announced(self) -> list[dict[str, Any]]:
        """The shapes that were announced, as `Shapes.as_values`."""
        return self._notices.announced

    # ---- loaders ---------------------------------------------------------------------------------

    def loader(self, loader: Any) -> Any:
        """A loader whose batches are of one bucket each, if it reads its data in random order; else the loader itself.

        Raises:
            ConfigError: the lengths of a stream are not known.
        """
        policy = self._policy
        if policy is None or not isinstance(loader, DataLoader):
            return loader
        if isinstance(loader.dataset, torch.utils.data.IterableDataset):
            self._fit_stream(policy, loader)
            return loader
        arranged = type(loader.batch_sampler) is BatchSampler
        if (
            arranged
            and type(loader.sampler) is RandomSampler
            and (self._in_order is None or self._in_order is loader.dataset)
        ):
            self._in_order = loader.dataset
            return self._in_buckets(policy, loader)
        if not any(dataset is loader.dataset for dataset in self._known):
            self._known.append(loader.dataset)
            self._fit_evaluation(policy, loader)
        return loader

    def _fit_stream(self, policy: ShapePolicy, loader: DataLoader[Any]) -> None:
        if isinstance(policy.buckets, tuple):
            found = Shapes.given(policy)
        else:
            lengths = lengths_of(loader.dataset, policy.length_of)
            if lengths is None:
                self._notices.without_lengths(policy)
                return
            found = policy.fit(*lengths, limit=self._limit)
            self._notices.announce(found, "loader, by the first samples of its stream")
        for trains in (True, False) if self._lengths_may_change() else ():
            self._shapes.setdefault(trains, found)

    def _lengths_may_change(self) -> bool:
        if self._why_not:
            self._notices.warn(f"batches keep their lengths, and are not arranged by them: {self._why_not}")
        return not self._why_not

    def _in_buckets(self, policy: ShapePolicy, loader: DataLoader[Any]) -> DataLoader[Any]:
        rows = int(loader.batch_size or 1)
        lengths, labels = lengths_of(loader.dataset, policy.length_of) or (None, None)
        if lengths is None:
            self._notices.without_lengths(policy)
        elif self._lengths_may_change():
            self._shapes[True] = policy.fit(lengths, labels, rows=rows, limit=self._limit)
            self._notices.announce(self._shapes[True], "training")
        shapes = self._shapes.get(True)
        if shapes is None:
            shapes, lengths = ShapePolicy(buckets=1).fit([0]), [0] * len(loader.dataset)  # type: ignore[arg-type]
        if len(shapes.bounds) == 1 and policy.last_batch != "drop":
            return loader
        drops = policy.last_batch == "drop" or loader.drop_last
        assert lengths is not None
        sampler = shapes.sampler(lengths, rows, seed=self._seed(), drop_last=drops)
        updated: DataLoader[Any] = _update_dataloader(loader, sampler)
        return updated

    def _fit_evaluation(self, policy: ShapePolicy, loader: DataLoader[Any]) -> None:
        """The order of an evaluation stays: what is padded to a bucket are batches."""
        found = lengths_of(loader.dataset, policy.length_of)
        if not found or not found[0]:
            self._notices.without_lengths(policy)
            return
        if not self._lengths_may_change():
            return
        in_order = type(loader.sampler) is SequentialSampler and loader.batch_size
        rows = int(loader.batch_size) if in_order and loader.batch_size else 1
        for longest, lengths in zip(self._longest, found, strict=True):
            longest += [max(part) for part in _parts(lengths or [], rows)]
        lengths, labels = self._longest
        if isinstance(policy.buckets, tuple) and max(lengths) > policy.buckets[-1]:
            # Longer ones stay as they are.
            self._shapes[False] = Shapes.given(policy)
            return
        self._shapes[False] = policy.fit(lengths, labels if len(labels) == len(lengths) else None, limit=self._limit)
        self._notices.announce(self._shapes[False], "loaders whose order stays")

    # ---- batches ---------------------------------------------------------------------------------

    def padded(self, batch: Any, *, trains: bool) -> Any:
        """A batch of a bucket's length.

        Args:
            batch: on the host.
            trains: whether it is one of the training.
        """
        # A training may read its data in order.
        shapes = self._shapes.get(trains, self._shapes.get(False))
        if shapes is None:
            return batch
        # In Fabric a model may be set up after its loaders.
        batch, reason = (batch, self._why_not) if self._why_not else shapes.padded(batch, self._pad_id)
        if reason:
            self._notices.warn(f"a batch keeps its length: {reason}")
        return batch

    def phase(self, batch: Any, *, trains: bool) -> str:
        """What distinguishes the program of a batch from those of other lengths, in words."""
        shapes = self._shapes.get(trains, self._shapes.get(False))
        return "" if shapes is None else shapes.phase(batch)


def _parts(lengths: list[int], rows: int) -> Iterator[list[int]]:
    return (lengths[begin : begin + rows] for begin in range(0, len(lengths), rows))
