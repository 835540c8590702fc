"""`LibraryReads`: reads of known libraries inside a step, which are allowed: without a break of its graph if possible.

A library for plain CPU and CUDA devices reads numbers wherever it likes: to log them, to divide by how many tokens
there were. Reads of other code are met as `on_graph_break` says.
"""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import linecache
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import Any

import torch

from xla_adapters.lowerings import ctc_of_padded_labels
from xla_adapters.runtime import get_runtime
from xla_adapters.runtime.transfers import keep_floats
from xla_adapters.tracing.host_values import HostValues
from xla_adapters.utils.location import Location, is_plumbing, stack_frames
from xla_adapters.utils.patching import replaced, replaced_item

# Their layers look at the integers of the batch (which edges are loops, how many tokens stand for an image) before they
# compute with the rest of it.
_OF_LAYERS = ("torch_geometric", "transformers")
# A tokenizer of transformers reads what it is given to decode. Who gives it is the reader.
# The method of models of transformers that finds the positions of tokens in texts with pictures.
_POSITIONS = "get_rope_index"
_PASSING_ON = ("/transformers/tokenization_utils_base.py", "/transformers/utils/generic.py")


class LibraryReads:
    """Which libraries may read in a step, and what is known of the batch on the host.

    Args:
        folders: of the code of libraries that read in order to log. What the host does not know is deferred, or splits
            the step.
        layers: of the code of libraries of layers. What the host does not know is met as that of other code.
        of_script: whether other code reads as in a loop of its own, whose steps are traced at each batch.
        layer_classes: the classes of the layers.

    Attributes:
        on_host: in a step, calls a function that computes tensors of the batch's integers; see `AllowedReads.on_host`.
    """

    def __init__(
        self,
        folders: list[str],
        layers: list[str] | None = None,
        *,
        of_script: bool = False,
        layer_classes: Iterable[type] = (),
    ) -> None:
        self.of_script = of_script
        self._prefixes = _prefixes(folders)
        self._all_prefixes = (*self._prefixes, *_prefixes(layers or []))
        self.host_values = HostValues()
        self.on_host: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any] | None = None
        self._layers = layer_classes

    def reader(self) -> Location | None:
        """The line of a library that reads in order to log; None if other code is reading."""
        frame = _frame_in(self._prefixes)
        if frame is None:
            return None
        code = frame.f_code
        return Location(filename=code.co_filename, lineno=frame.f_lineno, function=code.co_name, is_user_code=False)

    def is_asked(self) -> bool:
        """Whether one of the libraries is reading."""
        return self.reading_frame() is not None

    def reading_frame(self) -> FrameType | None:
        """The frame of a library that reads; None if other code is reading."""
        return _frame_in(self._all_prefixes)

    def reducing(self) -> list[ModuleType]:
        """The modules of transformers whose losses sum a number over processes, if there is only one."""
        operations = sys.modules.get("accelerate.utils.operations")
        if operations is None or get_runtime().device.world_size() > 1:
            return []
        loaded = [module for name, module in list(sys.modules.items()) if name.startswith("transformers.")]
        return [module for module in loaded if vars(module).get("reduce") is operations.reduce]

    def functions_of_batches(self) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
        """The functions that compute tensors of the batch's integers alone: where they are looked up, name, function.

        They are those that transformers lets its users compute before the step (positions in pictures, windows), and
        the positions of tokens in texts with pictures.
        """
        utils = sys.modules.get("transformers.vision_utils")
        computed = () if utils is None else set(filter(_computes_of_batch, vars(utils).values()))
        modules = {cls.__module__ for cls in self._layers}
        for namespace in (*([] if utils is None else [utils]), *map(sys.modules.get, sorted(modules))):
            for name, value in list(vars(namespace).items()):
                if isinstance(value, FunctionType) and value in computed:
                    yield namespace, name, value
        for cls in {base for layer in self._layers for base in layer.__mro__}:
            positions = vars(cls).get(_POSITIONS)
            # One that also stores something is called as it is.
            if positions is not None and all(code.opname != "STORE_ATTR" for code in dis.get_instructions(positions)):
                yield cls, _POSITIONS, positions


def _computes_of_batch(value: Any) -> bool:
    """Whether it is a function of `transformers.vision_utils` that computes tensors of the sizes of pictures."""
    is_public = isinstance(value, FunctionType) and value.__name__.startswith("get_vision_")
    # Those that are given a configuration call the others.
    return is_public and "config" not in inspect.signature(value).parameters


def _prefixes(folders: list[str]) -> tuple[str, ...]:
    return tuple(f"{Path(folder).resolve()}/" for folder in folders)


def _frame_in(prefixes: tuple[str, ...]) -> FrameType | None:
    for frame in stack_frames(sys._getframe(1)):
        filename = frame.f_code.co_filename
        if is_plumbing(filename) or filename.endswith(_PASSING_ON):
            continue
        return frame if str(Path(filename).resolve()).startswith(prefixes) else None
    return None


def reads_of_packages(
    packages: Iterable[str], model: torch.nn.Module | None, *, of_script: bool = False
) -> LibraryReads | None:
    """The reads to allow while a model is trained; None if there are none.

    Args:
        packages: that read in order to log.
        model: reads by known libraries that its layers come from are allowed, too.
        of_script: whether other code reads as in a loop of its own, whose steps are traced at each batch.
    """
    classes = set() if model is None else set(map(type, model.modules()))
    of_layers = {cls.__module__.partition(".")[0] for cls in classes}.intersection(_OF_LAYERS)
    if not packages and not of_layers and not of_script:
        return None
    folders, layers = _folders_of(packages), _folders_of(of_layers)
    return LibraryReads(folders, layers, of_script=of_script, layer_classes=classes)


def _folders_of(packages: Iterable[str]) -> list[str]:
    files = [sys.modules[package].__file__ for package in sorted(packages)]
    return [str(Path(file).parent) for file in files if file is not None]


_present: list[LibraryReads] = []


def library_reads() -> LibraryReads | None:
    """The reads that are allowed now; None if none are."""
    return _present[-1] if _present else None


@contextmanager
def allowing_reads(reads: LibraryReads | None) -> Iterator[None]:
    """Inside the context, steps allow these reads, and models of transformers compute CTC without one.

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
        for owner, name, function in reads.functions_of_batches():
            stack.enter_context(replaced(owner, name, _on_host(function)))
        for module in reads.reducing():
            stack.enter_context(replaced(module, "reduce", _of_one_process))
        _present.append(reads)
        stack.callback(_present.remove, reads)
        stack.callback(keep_floats, keeps=False)
        yield


def _of_one_process(tensor: torch.Tensor) -> torch.Tensor:
    """As `accelerate.utils.reduce` in a single process, where that executes what is pending and changes nothing."""
    return tensor.clone()


@functools.cache
def _on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, computed on the host in steps. The same one at each call: replays compare the code of modules."""
    takes_precomputed = "kwargs" in inspect.signature(function).parameters

    @functools.wraps(function)
    def compute(*args: Any, **kwargs: Any) -> Any:
        reads = library_reads()
        if reads is None or reads.on_host is None:
            return function(*args, **kwargs)
        given = kwargs.get("kwargs")
        if takes_precomputed and given is not None and not given.keys() & set(function.__code__.co_consts):
            kwargs = {**kwargs, "kwargs": None}
        return reads.on_host(function, args, kwargs)

    return compute


# ---- what a read is for ------------------------------------------------------------------------------

_NOT_FINITE = re.compile(r"not torch\.isfinite\((\w+)\)\.all\(\)")
_CLAMPED = r"(\w+) = torch\.finfo\({0}\.dtype\)\.max - 1000\n{0} = torch\.clamp\({0}, min=-\1, max=\1\)"
_WRITTEN = r"[\w.\[\]:]+\[{0}\] = -?(\d[\d.e-]*|float\('-?inf'\))"
# Methods that end an expression whose value is what was read.
_VERDICTS = ("all", "any", "item")
# Of these types all finite numbers are in the range to which layers clamp.
_WIDE = (torch.float32, torch.bfloat16, torch.float64)


@functools.cache
def _branch_at(filename: str, lineno: int) -> ast.stmt | None:
    """The statement that decides on a line by what the line reads; None if there is none, or it is not known."""
    source = "".join(linecache.getlines(filename))
    try:
        statements = [node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.If, ast.Assert, ast.Expr))]
    except SyntaxError:
        return None
    for node in statements:
        deciding = node.value if isinstance(node, ast.Expr) else node.test
        if deciding.lineno <= lineno <= (deciding.end_lineno or lineno):
            return node
    return None


def value_that_passes(frame: FrameType) -> bool | None:
    """What a line reads if it only checks something and the check passes; None if it is no check.

    A check is an `if` whose only purpose is to raise, an `assert`, and a call of torch's check of tensors.
    """
    branch = _branch_at(frame.f_code.co_filename, frame.f_lineno)
    if isinstance(branch, ast.Expr):
        return True if ast.unparse(branch).startswith("torch._check_tensor_all(") else None
    if not isinstance(branch, (ast.If, ast.Assert)):
        return None
    if isinstance(branch, ast.If) and (branch.orelse or [type(one) for one in branch.body] != [ast.Raise]):
        return None
    is_negated = isinstance(branch.test, ast.UnaryOp) and isinstance(branch.test.op, ast.Not)
    read = branch.test.operand if isinstance(branch.test, ast.UnaryOp) and is_negated else branch.test
    # What is read must be what decides: nothing is made of it.
    is_comparison = isinstance(read, ast.Compare) and len(read.ops) == 1 and not _calls_a_name(read)
    is_method = isinstance(read, ast.Call) and isinstance(read.func, ast.Attribute) and read.func.attr in _VERDICTS
    if not is_comparison and not (is_method and not _calls_a_name(read)):
        return None
    return is_negated is isinstance(branch, ast.If)


def _calls_a_name(expression: ast.expr) -> bool:
    """Whether it calls `bool` or the like, or reads by itself; not a method of a tensor, or a function of torch."""
    called = [node.func for node in ast.walk(expression) if isinstance(node, ast.Call) and node is not expression]
    return any(not isinstance(function, ast.Attribute) or function.attr == "item" for function in called)


def only_clamps(frame: FrameType) -> bool:
    """Whether a line only decides if numbers are clamped to the finite ones, which changes no finite number."""
    branch = _branch_at(frame.f_code.co_filename, frame.f_lineno)
    found = (
        _NOT_FINITE.fullmatch(ast.unparse(branch.test)) if isinstance(branch, ast.If) and not branch.orelse else None
    )
    if found is None or not isinstance(branch, ast.If):
        return False
    clamped = frame.f_locals.get(found[1])
    body = "\n".join(map(ast.unparse, branch.body))
    return (
        re.fullmatch(_CLAMPED.format(found[1]), body) is not None
        and isinstance(clamped, torch.Tensor)
        and clamped.dtype in _WIDE
    )


def only_writes_where(frame: FrameType) -> bool:
    """Whether a line only decides if a number is written where a mask is true; where it nowhere is, nothing changes."""
    branch = _branch_at(frame.f_code.co_filename, frame.f_lineno)
    if not isinstance(branch, ast.If) or branch.orelse:
        return False
    mask = re.fullmatch(r"(\w+)\.any\(\)", ast.unparse(branch.test))
    body = "\n".join(map(ast.unparse, branch.body))
    return mask is not None and re.fullmatch(_WRITTEN.format(mask[1]), body) is not None


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
