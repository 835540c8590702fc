"""`LibraryReads`: reads of known libraries inside a step, answered without a break of its graph if they can be.

A library for plain CPU and CUDA devices reads numbers wherever it likes: to log them, to divide by how many tokens
there were. Reads of other code are met as `on_graph_break` says.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from xla_adapters.lowerings import ctc_of_padded_labels
from xla_adapters.tracing.host_values import HostValues
from xla_adapters.utils.location import Location, is_plumbing, stack_frames
from xla_adapters.utils.patching import replaced, replaced_item

# Their layers look at the integers of the batch (which edges are loops, how many tokens stand for an image) before they
# compute with the rest of it.
_OF_LAYERS = ("torch_geometric", "transformers")
# A tokenizer of transformers reads what it is given to decode. Who gives it is the reader.
_PASSING_ON = ("/transformers/tokenization_utils_base.py", "/transformers/utils/generic.py")


class LibraryReads:
    """Which libraries' reads are answered, and what is known of the batch on the host.

    Args:
        folders: of the code of libraries that read in order to log. What has no answer is deferred, or splits the step.
        layers: of the code of libraries of layers. What has no answer is met as that of other code.
        defers_all: whether what other code reads by `.item()` is deferred, too.
    """

    def __init__(self, folders: list[str], layers: list[str] | None = None, *, defers_all: bool = False) -> None:
        self.defers_all = defers_all
        self._prefixes = _prefixes(folders)
        self._all_prefixes = (*self._prefixes, *_prefixes(layers or []))
        self.host_values = HostValues()

    def reader(self) -> Location | None:
        """The line of a library that reads in order to log; None if other code is reading."""
        return _location_in(self._prefixes)

    def is_asked(self) -> bool:
        """Whether one of the libraries is reading."""
        return _location_in(self._all_prefixes) is not None


def _prefixes(folders: list[str]) -> tuple[str, ...]:
    return tuple(f"{Path(folder).resolve()}/" for folder in folders)


def _location_in(prefixes: tuple[str, ...]) -> Location | None:
    for frame in stack_frames(sys._getframe(1)):
        filename = frame.f_code.co_filename
        if is_plumbing(filename) or filename.endswith(_PASSING_ON):
            continue
        if not str(Path(filename).resolve()).startswith(prefixes):
            return None
        return Location(filename=filename, lineno=frame.f_lineno, function=frame.f_code.co_name, is_user_code=False)
    return None


def reads_of_packages(
    packages: Iterable[str], model: torch.nn.Module | None, *, defers_all: bool = False
) -> LibraryReads | None:
    """The reads to answer while a model is trained; None if there are none.

    Args:
        packages: that read in order to log.
        model: reads by known libraries that its layers come from are answered, too.
        defers_all: whether what other code reads by `.item()` is deferred, too.
    """
    layers = () if model is None else model.modules()
    of_layers = {type(layer).__module__.partition(".")[0] for layer in layers}.intersection(_OF_LAYERS)
    if not packages and not of_layers and not defers_all:
        return None
    return LibraryReads(_folders_of(packages), _folders_of(of_layers), defers_all=defers_all)


def _folders_of(packages: Iterable[str]) -> list[str]:
    files = [sys.modules[package].__file__ for package in sorted(packages)]
    return [str(Path(file).parent) for file in files if file is not None]


_present: list[LibraryReads] = []


def library_reads() -> LibraryReads | None:
    """The reads that are answered now; None if none are."""
    return _present[-1] if _present else None


@contextmanager
def answering(reads: LibraryReads | None) -> Iterator[None]:
    """Inside the context, steps answer these reads, and models of transformers compute CTC without one.

    Args:
        reads: which; None to change nothing.
    """
    if reads is None:
        yield
        return
    losses, checks = map(sys.modules.get, ("transformers.loss.loss_utils", "transformers.utils.import_utils"))
    with ExitStack() as stack:
        if losses is not None:
            stack.enter_context(replaced_item(losses.LOSS_MAPPING, "ForCTC", ctc_of_padded_labels))
        if checks is not None:
            # Its checks of the batch raise without a message where it is traced, which only dynamo needs.
            stack.enter_context(replaced(checks, "is_tracing", lambda *_: torch.compiler.is_dynamo_compiling()))
        _present.append(reads)
        stack.callback(_present.remove, reads)
        yield


class MaskedSelection:
    """What `values[mask]` selects, before it is known how many elements these are.

    Sums and means need no selection: what is masked out counts as zero. Any other use selects.

    Args:
        values: what is selected from.
        mask: of booleans; its shape is that of the first dimensions of `values`.
        select: selects, which may execute a part of the step.
    """

    def __init__(
        self, values: torch.Tensor, mask: torch.Tensor, select: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> None:
        self._values = values
        self._mask = mask
        self._select = select
        self._selected: torch.Tensor | None = None
        self.dtype = values.dtype
        self.device = values.device

    def selected(self) -> torch.Tensor:
        """The selected elements, as torch's own index would return them."""
        if self._selected is None:
            self._selected = self._select(self._values, self._mask)
        return self._selected

    def _masked(self) -> torch.Tensor:
        mask = self._mask.reshape(*self._mask.shape, *[1] * (self._values.ndim - self._mask.ndim))
        return self._values.masked_fill(~mask, 0)

    def sum(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As `Tensor.sum`."""
        return self.selected().sum(*args, **kwargs) if args or kwargs else self._masked().sum()

    def mean(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As `Tensor.mean`."""
        if args or kwargs or not self._values.is_floating_point():
            return self.selected().mean(*args, **kwargs)
        elements = self._values.numel() // max(self._mask.numel(), 1)
        # The sum of low-precision values is rounded only once, as in a mean.
        wide = torch.float32 if self.dtype.itemsize < 4 else self.dtype
        return (self._masked().sum(dtype=wide) / (self._mask.sum() * elements)).to(self.dtype)

    def __hash__(self) -> int:
        return id(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.selected(), name)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = with_selections(args), with_selections(kwargs or {})
        return function(*args, **kwargs)


def _add_operators() -> None:
    # Python looks up operators in the class.
    names = "add radd sub rsub mul rmul truediv rtruediv pow neg abs eq ne lt le gt ge getitem len bool float int iter"
    for name in names.split():

        def operate(self: MaskedSelection, *args: Any, _name: str = f"__{name}__") -> Any:
            return getattr(self.selected(), _name)(*with_selections(args))

        setattr(MaskedSelection, f"__{name}__", operate)


_add_operators()


def with_selections(value: Any) -> Any:
    """A value with what `MaskedSelection`s in it select in their places."""
    if isinstance(value, MaskedSelection):
        return value.selected()
    if isinstance(value, (list, tuple)):
        return type(value)(with_selections(item) for item in value)
    if isinstance(value, dict):
        return {name: with_selections(item) for name, item in value.items()}
    return value
