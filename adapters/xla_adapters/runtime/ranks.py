"""`Ranks`: processes that train together, each with one device, as `torchrun` starts them.

Each rank runs the same program on its own part of the batch. A rank that launches another program than the others
would have all of them wait forever in a collective. So before each launch ranks tell each other on the host, through
gloo, what they are about to launch. The device works on earlier steps meanwhile.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from xla_adapters.errors import ConfigError, RankError
from xla_adapters.utils.location import described

# That of torch.distributed, which no wait exceeds.
_LONGEST_WAIT = timedelta(minutes=30)
# How long a rank that fails waits for the others to hear of it.
_GOODBYE = timedelta(seconds=5)
_LAUNCH, _ERROR, _END, _SUM, _VALUE = range(5)
_KINDS = {
    _LAUNCH: "launches",
    _ERROR: "has failed",
    _END: "has ended",
    _SUM: "is at",
    _VALUE: "is at",
}
# What is done, the program, its numbers, how many of them there are, and how long the text is.
_HEAD = struct.Struct("<B32s16sHH")
_SIZE = 1024
# The first numbers are told, too, to say which one differs.
_NUMBERS = 48


@dataclass(frozen=True)
class _Message:
    """What a rank tells the others.

    Attributes:
        kind: whether it launches a program, has failed, has ended, or gives a number to a sum or a value to the others.
        program: names the program.
        numbers: names the numbers that the program is given; in a sum the number itself.
        text: in words.
        values: the first numbers.
    """

    kind: int
    program: bytes = b""
    numbers: bytes = b""
    text: str = ""
    values: tuple[float, ...] = ()

    def packed(self) -> torch.Tensor:
        """As bytes of a fixed size."""
        values = struct.pack(f"<{len(self.values)}d", *self.values)
        text = self.text.encode()[: _SIZE - _HEAD.size - len(values)]
        packed = _HEAD.pack(self.kind, self.program, self.numbers, len(self.values), len(text)) + values + text
        return torch.frombuffer(bytearray(packed.ljust(_SIZE, b"\0")), dtype=torch.uint8)

    @classmethod
    def unpacked(cls, packed: torch.Tensor) -> _Message:
        """From its bytes."""
        data = packed.numpy().tobytes()
        kind, program, numbers, count, length = _HEAD.unpack_from(data)
        begin = _HEAD.size + 8 * count
        values = struct.unpack_from(f"<{count}d", data, _HEAD.size)
        return cls(kind, program, numbers, data[begin : begin + length].decode(errors="ignore"), values)

    def agrees(self, other: _Message) -> bool:
        """Whether two ranks do the same."""
        if self.kind != other.kind or self.kind == _ERROR:
            return self.kind == other.kind
        if self.kind == _LAUNCH:
            return (self.program, self.numbers) == (other.program, other.numbers)
        return self.text == other.text


class Ranks:
    """The ranks of this training.

    Attributes:
        rank: of this process, from 0.
        size: number of ranks.
        before_update: called with an optimizer that is about to step.
        around_call: makes a call of a function of torch in a traced step; None if nothing is different for ranks.
        for_saving: a group of torch that only a save, perhaps in the background, uses.
    """

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._deadline = _LONGEST_WAIT
        # Of their own: what a program does with the default group does not get between.
        self._messages, self._values, self.for_saving = (dist.new_group(backend="gloo") for _ in range(3))
        self.before_update: Callable[[torch.optim.Optimizer], None] = _refuse_update
        self.around_call: Callable[..., Any] | None = None
        register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: self.before_update(optimizer))
        self._tell_uncaught_errors()
        self._is_over = False

    @property
    def deadline(self) -> timedelta:
        """How long a rank waits for the others; at most 30 minutes."""
        return self._deadline

    @deadline.setter
    def deadline(self, given: timedelta) -> None:
        self._deadline = min(given, _LONGEST_WAIT)

    def _tell_uncaught_errors(self) -> None:
        """Has an error that ends this process told to the others, for loops of one's own."""
        shown = sys.excepthook

        def tell(kind: type[BaseException], error: BaseException, trace: Any) -> None:
            self.failed(error)
            shown(kind, error, trace)

        sys.excepthook = tell

    # ---- values on the host ----------------------------------------------------------------------

    def gather(self, value: Any, what: str = "a value of each rank") -> list[Any]:
        """The values of all ranks, in their order. All ranks call it.

        Args:
            value: can be pickled.
            what: it is, in words; the same on all ranks.

        Raises:
            RankError: a rank is gone, or does not come within the deadline.
        """
        values: list[Any] = [None] * self.size
        self._waiting(lambda: dist.all_gather_object(values, value, group=self._values), what)
        return values

    def gather_tensor(self, tensor: torch.Tensor, what: str, *, to_all: bool) -> list[torch.Tensor]:
        """The tensors of all ranks, in their order. All ranks call it.

        Args:
            tensor: on the host, of the same shape and dtype on each rank.
            what: it is, in words; the same on all ranks.
            to_all: whether other ranks than the first get them; otherwise these get an empty list.

        Raises:
            RankError: a rank is gone, or does not come within the deadline.
        """
        gets = to_all or not self.rank
        values = [torch.empty(tensor.shape, dtype=tensor.dtype) for _ in range(self.size if gets else 0)]
        # In bytes: gloo does not know all dtypes.
        sent, *received = (each.contiguous().view(-1).view(torch.uint8) for each in (tensor, *values))

        def gather() -> None:
            if to_all:
                dist.all_gather(received, sent, group=self._values)
            else:
                dist.gather(sent, received or None, group=self._values)

        self._waiting(gather, what)
        return values

    def wait(self, what: str) -> None:
        """Waits until all ranks have come to the same place.

        Args:
            what: it is, in words; the same on all ranks.

        Raises:
            RankError: another rank is elsewhere; says where.
        """
        self._exchange(_Message(_VALUE, text=what), self.deadline)

    def same_values(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Gives tensors on the host the values of the first rank; returns whether they had them already.

        Args:
            tensors: of the same shapes on each rank, in the same order; changed in place.
        """
        sums = [_checksum(tensor) for tensor in tensors]
        each = self.gather(sums, "what is in the model")
        first = each[0]
        for rank, other in enumerate(each):
            forms, of_first = ([form for *form, _, _ in sums] for sums in (other, first))
            if forms != of_first:
                same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(forms, of_first, strict=False))
                raise _told(
                    RankError(
                        f"rank {rank} has another model than rank 0: of {len(forms)} tensors, and not {len(of_first)}, "
                        f"or of other shapes or types from tensor {len(list(same))} on. All must make the same model"
                    )
                )
        if all(sums == first for sums in each):
            return True
        for tensor in tensors:
            values = tensor.detach().contiguous()
            self._waiting(functools.partial(dist.broadcast, values, 0, group=self._values), "the first rank's model")
            with torch.no_grad():
                tensor.copy_(values)
        return False

    def _waiting(self, call: Callable[[], Any], what: str) -> None:
        # So that an error of another rank is heard of.
        self.wait(what)
        try:
            call()
        except RuntimeError as error:
            lost = self.lost_by(error)
            if lost is None:
                raise
            raise lost from error

    # ---- launches --------------------------------------------------------------------------------

    def launches(self, program: str, numbers: Sequence[float], text: str) -> None:
        """Waits until all ranks are about to launch the same program with collectives.

        Args:
            program: names it.
            numbers: that it is given, which must be the same on all ranks.
            text: which one it is, in words.

        Raises:
            RankError: another rank does something else; says what.
        """
        named = hashlib.sha256(program.encode()).digest()
        given = hashlib.blake2b(struct.pack(f"<{len(numbers)}d", *numbers), digest_size=16).digest()
        self._exchange(_Message(_LAUNCH, named, given, text, tuple(numbers[:_NUMBERS])), self.deadline)

    def total(self, value: float, text: str) -> float:
        """The sum over the ranks of a number of each step; tells an error of another rank at once.

        Args:
            value: of this rank.
            text: what it is, in words.

        Raises:
            RankError: another rank does something else; says what.
        """
        messages = self._exchange(_Message(_SUM, numbers=struct.pack("<d8x", value), text=text), self.deadline)
        values: list[float] = [struct.unpack_from("<d", message.numbers)[0] for message in messages]
        return sum(values)

    def failed(self, error: BaseException, raised_for: BaseException | None = None) -> None:
        """Tells the other ranks that a step of this one, or what was around it, has raised an error.

        Args:
            error: which one.
            raised_for: another error in whose place it is raised.
        """
        if self._is_over or not isinstance(error, Exception) or _was_told(error) or _was_told(raised_for):
            return
        vars(error)["told_to_ranks"] = True
        # The others have failed, too, or are gone; or they are busy, and hear of it when this process has ended.
        with contextlib.suppress(RankError):
            self._exchange(_Message(_ERROR, text=described(error)), _GOODBYE)

    def ends(self, text: str) -> None:
        """Waits until all ranks have come here, and launch nothing more for now.

        Args:
            text: what has ended, in words.

        Raises:
            RankError: another rank goes on.
        """
        self._exchange(_Message(_END, text=text), self.deadline)

    def _exchange(self, mine: _Message, deadline: timedelta) -> list[_Message]:
        """The messages of all ranks, which must agree with that of this one."""
        if self._is_over:
            raise self._lost(mine.text)
        packed = [torch.empty(_SIZE, dtype=torch.uint8) for _ in range(self.size)]
        try:
            dist.all_gather(packed, mine.packed(), group=self._messages, async_op=True).wait(deadline)
        except RuntimeError as error:
            raise self._lost(mine.text) from error
        messages = list(map(_Message.unpacked, packed))
        other = next((rank for rank, message in enumerate(messages) if not mine.agrees(message)), None)
        if other is not None:
            raise _told(RankError(_difference(self.rank, mine, other, messages[other])))
        return messages

    def lost_by(self, error: BaseException) -> RankError | None:
        """The error to raise in place of one that gloo has raised in code of others; None for another kind."""
        gone = ("closed by peer", "Connection reset", "Timed out waiting", "Broken pipe")
        if isinstance(error, RuntimeError) and "gloo" in str(error) and any(text in str(error) for text in gone):
            return self._lost("exchanges values on the host")
        return None

    def _lost(self, what: str) -> RankError:
        self._is_over = True
        return _told(
            RankError(
                f"rank {self.rank} ({what}) has lost another rank: it has ended, was killed, or did not come within "
                f"{self.deadline}. Its own output says why; start all ranks again, and resume from the newest "
                "checkpoint"
            )
        )


def exchange_on_host(device_type: str) -> None:
    """Lets the default group exchange tensors on the host, too: accelerate makes it for those of the device alone.

    Args:
        device_type: of the device.

    Raises:
        ConfigError: it is for the host alone.
    """
    world: Any = dist.group.WORLD
    if all(device.type != device_type for device in world._device_types):
        raise ConfigError(
            f"torch.distributed was initialized before the ranks have met, and not for the device {device_type!r}: "
            f"leave that to xla_adapters, or call init_process_group('cpu:gloo,{device_type}:tpu_dist')"
        )
    cpu = torch.device("cpu")
    if cpu not in world._device_types:
        name, gloo = world.group_name, cast(Any, dist.new_group(backend="gloo"))
        world._register_backend(cpu, dist.ProcessGroup.BackendType.GLOO, gloo._get_backend(cpu))
        # Otherwise it has that of gloo's group, by which functional collectives find it.
        world._set_group_name(name)


def _difference(index: int, mine: _Message, other: int, theirs: _Message) -> str:
    """How two ranks differ, in words."""
    if theirs.kind == _ERROR or mine.kind == _ERROR:
        failed, said = (other, theirs) if theirs.kind == _ERROR else (index, mine)
        busy, doing = (index, mine) if failed == other else (other, theirs)
        return (
            f"rank {failed} has failed: {said.text}\n  Rank {busy}, which {_KINDS[doing.kind]} {doing.text}, would "
            "wait for it. Start all ranks again, and resume from the newest checkpoint"
        )
    if mine.kind != theirs.kind or mine.kind != _LAUNCH:
        return (
            f"rank {index} {_KINDS[mine.kind]}: {mine.text}. Rank {other} {_KINDS[theirs.kind]}: {theirs.text}. All "
            "ranks must take the same steps, and as many: give each the same number of batches"
        )
    if mine.program == theirs.program:
        pairs = [pair for pair in zip(mine.values, theirs.values, strict=True) if pair[0] != pair[1]]
        shown = ", ".join(f"{here:.12g} here and {there:.12g} on rank {other}" for here, there in pairs[:4])
        return (
            f"rank {index} launches {mine.text}, and other numbers are given to it than on rank {other}: "
            f"{shown or 'later ones than are compared here'}. A learning rate, a weight decay and the like must be the "
            "same on all ranks: compute them from what all ranks know"
        )
    begin = f"rank {index} launches {mine.text}, and rank {other} {theirs.text}: "
    if mine.text == theirs.text:
        return begin + (
            "their operations differ, and each would wait forever for the other. All ranks must run the same code. "
            "Look for a condition on the rank, for a Python number that differs (the rank itself: make it a tensor on "
            "the device), and for layers that only some rows use"
        )
    return begin + (
        "these are different programs, and each would wait forever for the other. All ranks must run the same code on "
        "batches of the same shape: pad them to one length (padding='max_length', or pad_to_multiple_of)"
    )


def _refuse_update(optimizer: torch.optim.Optimizer) -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(parameter.grad is not None and parameter.device.type != "cpu" for parameter in parameters):
        raise RankError(
            f"{type(optimizer).__name__} is about to update a model by the gradients of this rank alone, so that the "
            "ranks would go apart: give it to xla_adapters.distribute_module(model, partition_fn='dp')"
        )


def _checksum(tensor: torch.Tensor) -> tuple[Any, ...]:
    value = tensor.detach().contiguous()
    if value.storage_offset() * value.element_size() % 8:
        value = value.clone()
    whole = value.numel() * value.element_size() // 8
    flat = value.view(-1).view(torch.uint8)
    words, rest = flat[: whole * 8].view(torch.int64), flat[whole * 8 :]
    # The order counts: twice the same values in other places are another sum.
    weighted = (words * torch.arange(1, whole + 1)).sum().item() if whole else 0
    return tuple(tensor.shape), str(tensor.dtype), weighted, rest.tolist()


def _told(error: RankError) -> RankError:
    vars(error)["told_to_ranks"] = True
    return error


def _was_told(error: BaseException | None) -> bool:
    """Whether the other ranks know of an error already, or of the one that it was raised for."""
    while error is not None:
        if "told_to_ranks" in vars(error):
            return True
        error = error.__cause__
    return False
