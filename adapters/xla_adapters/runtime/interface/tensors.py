"""Tensors of the device: `Transfers`, `Values`, and the optional `Spmd`, `CustomKernels` and `AbstractTensors`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from xla_adapters.runtime.tile_assignment import Part, TileAssignment


class Transfers(Protocol):
    """Copies values between host and device, as few transfers as possible."""

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copies a host tensor to the device.

        Returns:
            A tensor without history of the same shape and dtype, in a buffer of its own: no other upload of an equal
            number shares it, and it never becomes a constant of a graph. On every device whole, under SPMD.
        """

    def to_host(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies tensors to the host in one transfer, and waits for it.

        What is pending is executed first, also steps that wait to be executed together. Tensors cut over devices are
        put together. Whatever waits in `piggy_back` is copied too.

        Args:
            tensors: on the device or, unchanged then, on the host.

        Returns:
            New host tensors without history, in the same order.
        """

    def upload_numbers(self, numbers: Sequence[tuple[float, torch.dtype]]) -> list[torch.Tensor]:
        """Uploads numbers as inputs of an executable, in one transfer.

        Args:
            numbers: each with the dtype that it gets.

        Returns:
            Tensors of no dimension, to be passed to `Executables.run` alone.
        """

    def piggy_back(
        self, tensors: Sequence[torch.Tensor], receive: Callable[[list[torch.Tensor]], None], *, must_arrive: bool
    ) -> None:
        """Copies tensors to the host together with the next call of `to_host`, which costs no transfer of its own.

        Args:
            tensors: on the device; kept alive until then.
            receive: called with the copies, in the same order, before that `to_host` returns.
            must_arrive: whether a training may not end without them.
        """

    def deliver_piggy_backed(self, *, at_the_end: bool = False) -> None:
        """Copies now what waits in `piggy_back`; no transfer if nothing does.

        Args:
            at_the_end: of a training: no transfer, too, if nothing waits that must arrive.
        """


# ---- copies that are told -------------------------------------------------------------------------


_listeners: list[Callable[[Sequence[torch.Tensor]], None]] = []


@contextmanager
def copies_told(listener: Callable[[Sequence[torch.Tensor]], None]) -> Iterator[None]:
    """Until the exit, a function is called with the tensors of each copy to the host."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def tell_copy(tensors: Sequence[torch.Tensor]) -> None:
    """Tensors of the device are copied to the host, all at once."""
    for listener in _listeners:
        listener(tensors)


# ---- values ---------------------------------------------------------------------------------------


class Values(Protocol):
    """Takes the value that a tensor has, and gives it another one; the undo log and step replay are built on it.

    A snapshot is a tensor that holds the value itself. The functions of torch that change tensors do not change it,
    with the exceptions named at `second_copy`.
    """

    def snapshot(self, tensor: torch.Tensor) -> torch.Tensor:
        """The present value of a tensor of the device, pending or not. Copies nothing where values are immutable.

        Brings the tensor up to date first, if a view of it was written to.
        """

    def bring_up_to_date(self, tensor: torch.Tensor) -> None:
        """Applies what was written to views of a tensor of the device."""

    def second_copy(self, snapshot: torch.Tensor) -> torch.Tensor:
        """A second snapshot of the same value, safe from operations that change the first.

        Such are batch norm on its running statistics, and `copy_`: they write to the inner tensor itself.
        """

    def rewrite(self, snapshot: torch.Tensor, second_copy: torch.Tensor) -> None:
        """Gives a snapshot that was changed the value of its second copy. (To use that would be another graph.)"""

    def holds(self, tensor: torch.Tensor, snapshot: torch.Tensor, second_copy: torch.Tensor | None = None) -> bool:
        """Whether a tensor still has the value of a snapshot; asked before the pending graph is discarded.

        Args:
            tensor: of the device.
            snapshot: of its value before.
            second_copy: of the snapshot, if an operation may have changed the snapshot itself.
        """

    def restore(self, tensor: torch.Tensor, snapshot: torch.Tensor) -> None:
        """Gives a tensor the value of a snapshot. Its views and aliases see the value too."""

    def write(self, tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        """Gives tensors the values of others, output tensors of an executable say. Views and aliases see them too.

        Args:
            tensors: of the device.
            values: as many, of the same shapes and dtypes; they share their buffers with `tensors` afterwards.
        """

    def copies(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The same values in new buffers; leaves alone what is pending.

        Args:
            tensors: of the device, none of them pending.
        """


# ---- tensors cut over devices ---------------------------------------------------------------------


class Spmd(Protocol):
    """Cuts tensors over the devices that one process drives, and moves their parts. Optional.

    A tensor keeps its full shape in Python; a `TileAssignment` says which device holds which part. All methods need a
    runtime that was started with `Device.initialize(spmd=True)`.
    """

    def shard(self, tensor: torch.Tensor, tiles: TileAssignment) -> None:
        """Cuts a tensor in place that has a value (parameter, optimizer state, batch), unless it is cut so already."""

    def annotate_whole(self, tensor: torch.Tensor) -> None:
        """Annotates a tensor that has a value and no annotation: every device holds all of it."""

    def constrain(
        self, tensor: torch.Tensor, tiles: TileAssignment, *, gradient: TileAssignment | None = None
    ) -> torch.Tensor:
        """Prescribes how an intermediate value of the step is cut.

        Args:
            tensor: pending; stays as it is.
            tiles: how its value is cut.
            gradient: how its gradient is cut; as `tiles` if None.

        Returns:
            The value cut so, to be used in place of `tensor`.
        """

    def tiles_of(self, tensor: torch.Tensor) -> TileAssignment | None:
        """How a tensor is cut; None if it is not annotated, or if every device holds it whole."""

    def layouts(self, tensors: Sequence[torch.Tensor]) -> list[str]:
        """How each tensor lies on the devices, as text to compare."""

    def upload_sharded(self, tensor: torch.Tensor, tiles: TileAssignment) -> torch.Tensor:
        """Copies a host tensor to the devices, to each its own part only; returns a new tensor without history."""

    def plain(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself, if it is a wrapper that shows how it is cut; other tensors unchanged."""

    def gathering_on_host(self) -> AbstractContextManager[None]:
        """A context in which the runtime's own saving puts cut tensors together on the host, as `Transfers.to_host`."""

    def local_parts(self, tensor: torch.Tensor) -> list[Part]:
        """What each device of this process holds of a cut tensor; empty if every device holds it whole.

        Executes what is pending if the tensor is, and waits.
        """

    def parts_to_host(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Copies the parts that `local_parts` lists to the host, in its order and without padding."""

    def upload_parts(self, parts: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """Makes a tensor from its parts; each device receives its own part only.

        Args:
            parts: host tensors, of the sizes and in the order of `local_parts(like)`.
            like: a tensor of the device, cut as the new one is to be.
        """


# ---- computations of extensions -------------------------------------------------------------------


class CustomKernels(Protocol):
    """Adds computations to graphs that no operation of torch expresses. Optional: only extensions use it."""

    def call(self, computation: bytes, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Records a computation as part of the pending graph.

        Args:
            computation: a serialized HloModuleProto.
            inputs: of the device, in the order of its parameters.

        Returns:
            Its results, pending.
        """

    def replaced(self, name: str, kernel: Callable[..., torch.Tensor]) -> AbstractContextManager[None]:
        """A context in which another function computes an operation of aten, also for autograd in C++.

        Only in the thread that enters it. An operation for which the user has registered a kernel stays as it is.

        Args:
            name: of the operation, with its overload: `sum.dim_IntList`.
            kernel: called with a function that computes the operation as before, then the operation's arguments.
        """

    def compute_once(self, tensor: torch.Tensor) -> None:
        """Records a barrier after a pending value, so that the compiler does not compute it again in each reader.

        Does nothing if the tensor has a value.
        """


# ---- tensors without memory -----------------------------------------------------------------------


class AbstractTensors(Protocol):
    """Makes tensors that have a shape and no value, and lowers the graphs that are traced with them. Optional.

    Such a tensor can be traced like any other; whatever executes with it fails.
    """

    def prepare(self) -> None:
        """Makes a device known that is not there, in a process that only traces: before the runtime starts."""

    def placeholder(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor on the device, without memory."""

    def lower(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> tuple[bytes, list[int | None]]:
        """The pending graph of some tensors, before any optimisation.

        Args:
            outputs: pending tensors, in the order of the graph's results.
            inputs: tensors with a value, or without memory.

        Returns:
            A serialized HloModuleProto, or the text of an MLIR module, and the number of each input's parameter (None
            if the graph does not read it). Shardings of tensors without memory, and donations, are not in it.
        """
