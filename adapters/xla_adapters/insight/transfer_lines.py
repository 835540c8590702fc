"""`TransferLines`: which lines of the user copy tensors between host and device during a training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from xla_adapters.open_step import in_step
from xla_adapters.runtime.interface.tensors import copies_told
from xla_adapters.tracing.step_mode import FROM_NUMBERS, MOVES, READS
from xla_adapters.utils.location import line_of_user
from xla_adapters.utils.torch_modes import device_type, function_called, is_of_torch

TO_HOST, TO_DEVICE = "to the host", "to the device"
# Callbacks of the first steps are looked at, and of one of so many later ones.
_FIRST, _EVERY = 8, 32
# Lines that are kept.
_KEPT = 200


@dataclass(kw_only=True)
class TransferLine:
    """The copies of one line.

    Attributes:
        line: file and line of the user; empty if none led to them.
        direction: `to the host` or `to the device`.
        call: what copied: a call of torch, or the trainer.
        count: how many copies were seen.
        bytes: how much they copied.
        is_sampled: whether only some steps were looked at.
    """

    line: str
    direction: str
    call: str
    count: int = 0
    bytes: int = 0
    is_sampled: bool = False


class TransferLines:
    """Notes copies that adapters make, all of them, and those of callbacks, in some of the steps.

    To see those of callbacks each call of torch in them is looked at, which a step that is replayed should not pay.

    Attributes:
        looks: whether the callbacks of the present step are looked at.
        looked_at: in how many steps they were.
    """

    def __init__(self) -> None:
        self._lines: dict[tuple[str, str, str], TransferLine] = {}
        self._mode = _CopyMode(self)
        self.looks = True
        self.looked_at = 0

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Around a training: begins anew, and notes what adapters copy until the exit."""
        self._lines = {}
        self.looks, self.looked_at = True, 0
        with copies_told(self._copied):
            yield

    def step_ended(self, steps: int) -> None:
        """A step has ended, with its callbacks.

        Args:
            steps: how many have.
        """
        self.looked_at += self.looks
        self.looks = steps < _FIRST or steps % _EVERY == 0

    def looked_through(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a function that calls callbacks, and notes their copies; not in a step, where they are graph breaks."""
        if in_step() or self._mode.is_on:
            return function(*args, **kwargs)
        with self._mode:
            return function(*args, **kwargs)

    def note(self, direction: str, call: str, size: int, *, is_sampled: bool) -> None:
        """Notes one copy.

        Args:
            direction: `TO_HOST` or `TO_DEVICE`.
            call: what copies.
            size: in bytes.
            is_sampled: whether copies of other steps are not seen.
        """
        key = line_of_user(), direction, call
        found = self._lines.get(key)
        if found is None:
            if len(self._lines) >= _KEPT:
                return
            found = self._lines[key] = TransferLine(line=key[0], direction=direction, call=call, is_sampled=is_sampled)
        found.count += 1
        found.bytes += size

    def _copied(self, tensors: Sequence[torch.Tensor]) -> None:
        with torch._C.DisableTorchFunction():
            size = sum(tensor.nbytes for tensor in tensors)
        self.note(TO_HOST, "the trainer", size, is_sampled=False)

    def lines(self) -> list[TransferLine]:
        """The lines, those that copied most often first."""
        return sorted(self._lines.values(), key=lambda item: (-item.count, item.line))


class _CopyMode(TorchFunctionMode):
    """Sees the calls of torch in callbacks.

    Attributes:
        only_looks: it changes nothing, so that steps inside (an evaluation) may be replayed.
    """

    only_looks = True

    def __init__(self, lines: TransferLines) -> None:
        super().__init__()
        self._noted = lines
        self.is_on = False

    def __enter__(self) -> _CopyMode:
        self.is_on = True
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.is_on = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not is_of_torch(func):
            func = function_called(func)
        result = func(*args, **(kwargs or {}))
        if func in READS or func in MOVES or func in FROM_NUMBERS:
            self._look(func, args[0] if args else None, result)
        return result

    def _look(self, func: Callable[..., Any], source: Any, result: Any) -> None:
        kind = device_type()
        on_device = isinstance(source, torch.Tensor) and source.device.type == kind
        made = isinstance(result, torch.Tensor) and result.device.type == kind
        if on_device and not made:
            assert isinstance(source, torch.Tensor)
            self._noted.note(TO_HOST, _name(func), source.nbytes, is_sampled=True)
        elif made and not on_device:
            assert isinstance(result, torch.Tensor)
            self._noted.note(TO_DEVICE, _name(func), result.nbytes, is_sampled=True)


def _name(func: Callable[..., Any]) -> str:
    return READS[func] if func in READS else str(getattr(func, "__name__", "a call"))
