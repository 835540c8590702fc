"""The process of `xla-adapters check`: runs a script, and collects what happens in its steps and batches."""

from __future__ import annotations

import json
import pickle
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from xla_adapters import errors
from xla_adapters.config import XLAConfig
from xla_adapters.errors import XLAAdapterError
from xla_adapters.open_step import in_step
from xla_adapters.replay.step_program import StepProgram
from xla_adapters.runtime import Metrics, get_runtime, prepare
from xla_adapters.tools.check_facts import Compile, DtypeUse, Facts, HostOperator, LoaderFacts, Place, StepFacts, Told
from xla_adapters.tools.user_script import FilesWritten, Hand, Stop, put_in, run_command, skipping_saves, warning_only
from xla_adapters.tracing.graph_history import GraphHistory, StepSignature
from xla_adapters.tracing.operation_log import Call, OperationLog, UpdateCall
from xla_adapters.tracing.scope_report import ScopeReport
from xla_adapters.tracing.step import Step
from xla_adapters.utils.child_process import Asked
from xla_adapters.utils.location import current_location, location_of
from xla_adapters.utils.nested_values import tensors_in
from xla_adapters.utils.patching import wrapped

_MASK, _TOKENS = "attention_mask", "input_ids"
# Calls of steps that never update (evaluations); with more of them the script is ended, too.
_OTHER_CALLS = 200
# Dtypes that other devices compute in another way than the CPU.
_DTYPES = {torch.float64, torch.float16, torch.complex64, torch.complex128}


def check_requested(asked: Asked) -> None:
    """What the process of a check does: runs a script, and answers with `Facts` after each step and at the end."""
    steps, command = json.loads(asked.request)
    facts = Facts(asked=steps)
    run(facts, command, asked.folder, lambda: asked.answer(pickle.dumps(facts)))


def run(facts: Facts, command: list[str], folder: Path, changed: Callable[[], None]) -> None:
    """Runs a script until it has done the steps that are asked for.

    Args:
        facts: to fill in.
        command: the script and its arguments; or `-m`, a module and its arguments.
        folder: for temporary files.
        changed: called when there are new facts.
    """
    watch, batches = Watch(facts, changed), Batches(facts)
    watch.when_training_step_ends = batches.training_step_ended
    changed()
    # As an import of an adapter would, before another library starts the runtime.
    prepare()
    with ExitStack() as stack:
        stack.enter_context(watch.watching())
        stack.enter_context(batches.watching())
        stack.enter_context(skipping_saves(folder, watch.skip))
        stack.enter_context(put_in(Hand(folder=folder, change=watch.change, skip=watch.skip)))
        FilesWritten(facts.written.append)
        try:
            run_command(command)
            facts.state = "ended"
        except Stop:
            facts.state = "stopped"
        except SystemExit as error:
            facts.state = "ended" if error.code in (None, 0) else "failed"
            facts.error = f"the script ended with the exit status {error.code}" if facts.state == "failed" else ""
        except BaseException as error:  # noqa: BLE001 (it is reported)
            facts.state = "refused" if isinstance(error, XLAAdapterError) else "failed"
            traceback.print_exception(error)
            facts.error = f"{type(error).__name__}: {error}"
            facts.error_place = Place.of(location_of(error.__traceback__))
    changed()


class Watch:
    """Collects facts about steps. What it replaces in this package is put back at the exit of `watching`.

    Args:
        facts: to fill in.
        changed: called when there are new ones.
    """

    def __init__(self, facts: Facts, changed: Callable[[], None]) -> None:
        self.facts = facts
        self._changed = changed
        self._began = time.perf_counter()
        self._in_program = self._replay_given = False
        # When the call before ended, by step; eager operations until now are those between two calls.
        self._ended: dict[str, Metrics] = {}
        self._opened: Metrics | None = None
        self._host_operators: dict[str, int] = {}
        # Where the last backward is, until something else is called at another line.
        self._backward: Place | None = None
        self.when_training_step_ends: Callable[[], None] = lambda: None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A context in which steps are watched, and graph breaks are warnings."""
        around: list[tuple[Any, str, Callable[[Any], Any]]] = [
            (XLAConfig, "__post_init__", warning_only(self.change)),
            (StepProgram, "open", self._open),
            (StepProgram, "close", self._close),
            (Step, "__enter__", self._enter),
            (GraphHistory, "ended", self._note_end),
            (OperationLog, "device_call", self._operation),
            (warnings, "warn", self._warn),
            (warnings, "warn_explicit", self._warn_explicit),
        ]
        with wrapped(*around):
            yield

    # ---- what is wrapped -------------------------------------------------------------------------

    def _open(self, opened: Callable[..., None]) -> Callable[..., None]:
        def open_program(program: StepProgram, **options: Any) -> None:
            self._begin(program.name)
            self._replay_given = options.get("replay") is not None
            opened(program, **options)

        return open_program

    def _close(self, closed: Callable[[StepProgram], ScopeReport]) -> Callable[[StepProgram], ScopeReport]:
        def close_program(program: StepProgram) -> ScopeReport:
            replays, self._in_program = program.replays, True
            try:
                report = closed(program)
            finally:
                self._in_program = False
            if in_step():
                return report
            step = self._step(program.name)
            step.is_managed = True
            step.may_replay |= self._replay_given or bool(program.replay_reasons)
            step.replays += program.replays - replays
            step.reasons.update(program.replay_reasons)
            self._end(program.name, report)
            return report

        return close_program

    def _enter(self, enter: Callable[[Step], Step]) -> Callable[[Step], Step]:
        def enter_step(step: Step) -> Step:
            # Adapters give it a program, which has been counted.
            if type(step) is Step:
                self._begin(step._name or "step")
            return enter(step)

        return enter_step

    def _note_end(self, ended: Callable[..., None]) -> Callable[..., None]:
        def history_ended(
            history: GraphHistory, name: str, signature: StepSignature, report: ScopeReport, *args: Any, **options: Any
        ) -> None:
            is_first = not history.has_graph_of(signature.phase)
            ended(history, name, signature, report, *args, **options)
            if report.compiles:
                call, reason = self._step(name).calls + 1, history.events[-1].reason
                self.facts.compiles.append(
                    Compile(step=name, call=call, seconds=report.compile_seconds, reason=reason, is_first=is_first)
                )
                self._note_dtypes(signature, report.operations)
            if not self._in_program and not in_step():
                self._end(name, report)

        return history_ended

    def _operation(self, call: Callable[..., None]) -> Callable[..., None]:
        def noted(log: OperationLog, function: Any, *args: Any) -> None:
            call(log, function, *args)
            counts = get_runtime().counters.host_operators()
            names = sorted(name for name, count in counts.items() if count > self._host_operators.get(name, 0))
            self._host_operators = counts
            place = Place.of(current_location())
            if names:
                # A backward is noted when it begins, other calls when they have ended.
                self._note_host_operators(names, self._backward or place)
            if function is torch.Tensor.backward:
                self._backward = place
            elif place != self._backward:
                self._backward = None

        return noted

    def _warn(self, warn: Callable[..., None]) -> Callable[..., None]:
        def noted(
            message: Any, category: type[Warning] | None = None, stacklevel: int = 1, source: Any = None, **options: Any
        ) -> None:
            self._note_warning(message, category)
            warn(message, category, stacklevel=stacklevel + 1, source=source, **options)

        return noted

    def _warn_explicit(self, warn: Callable[..., None]) -> Callable[..., None]:
        def noted(message: Any, category: type[Warning], *args: Any, **options: Any) -> None:
            self._note_warning(message, category)
            warn(message, category, *args, **options)

        return noted

    def _note_warning(self, message: Any, category: type[Warning] | None) -> None:
        kind = type(message) if isinstance(message, Warning) else category
        if kind is not None and kind.__module__ == errors.__name__:
            text = str(message)
            told = Told(category=kind.__name__, message=text, place=Place.named_in(text))
            if told not in self.facts.told:
                self.facts.told.append(told)

    # ---- what is noted ---------------------------------------------------------------------------

    def change(self, text: str) -> None:
        """Notes that something of the script was replaced."""
        if text not in self.facts.changed:
            self.facts.changed.append(text)

    def skip(self, text: str) -> None:
        """Notes that something was not saved."""
        if text not in self.facts.skipped:
            self.facts.skipped.append(text)

    def _step(self, name: str) -> StepFacts:
        return self.facts.steps.setdefault(name, StepFacts())

    def _begin(self, name: str) -> None:
        if in_step():
            # It is a part of the outer step, in which nothing may wait for the device.
            return
        others = sum(step.calls for step in self.facts.steps.values() if not step.updates)
        if self.facts.done >= self.facts.asked or others >= _OTHER_CALLS:
            raise Stop
        runtime = get_runtime()
        if not runtime.device.started():
            return
        self._opened = runtime.counters.metrics()
        self._host_operators = runtime.counters.host_operators()
        if name in self._ended:
            between = self._opened.eager_ops - self._ended[name].eager_ops
            self._step(name).eager_operations.append(between)

    def _end(self, name: str, report: ScopeReport) -> None:
        step = self._step(name)
        step.calls += 1
        if step.updates or any(isinstance(entry, UpdateCall) for entry in report.operations.entries):
            step.updates += 1
            self.when_training_step_ends()
        now = get_runtime().counters.metrics()
        if self._opened is not None:
            step.executions.append(now.executions - self._opened.executions)
        self._ended[name] = now
        self.facts.seconds = time.perf_counter() - self._began
        self._changed()

    def _note_host_operators(self, names: list[str], place: Place) -> None:
        known = next((item for item in self.facts.host_operators if item.names == names and item.place == place), None)
        if known is not None:
            known.calls += 1
        else:
            self.facts.host_operators.append(HostOperator(names=names, place=place))

    def _note_dtypes(self, signature: StepSignature, operations: OperationLog) -> None:
        wanted = {str(dtype).removeprefix("torch."): dtype for dtype in _DTYPES}
        for name, form in signature.inputs:
            dtype = form.rpartition(" ")[2]
            if dtype in wanted:
                self._note_dtype(dtype, f"the batch ({name})", Place())
        for entry in operations.entries:
            if isinstance(entry, Call) and isinstance(entry.form, tuple) and len(entry.form) == 3:
                dtype = str(entry.form[1]).removeprefix("torch.")
                if dtype in wanted:
                    name = getattr(entry.function, "__name__", str(entry.function))
                    self._note_dtype(dtype, name, Place(file=entry.file, line=entry.line))

    def _note_dtype(self, dtype: str, what: str, place: Place) -> None:
        # What comes after has it from the first.
        for use in self.facts.dtypes:
            if use.dtype == dtype and (use.place.line > 0) == (place.line > 0) and (place.line or use.what == what):
                use.count += 1
                return
        self.facts.dtypes.append(DtypeUse(dtype=dtype, what=what, place=place))


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
        with wrapped(*around):
            yield

    def training_step_ended(self) -> None:
        """The loader that gave the last batch feeds training steps."""
        if self._last is not None:
            self._last.trains = True

    # ---- what is wrapped -------------------------------------------------------------------------

    def _init(self, init: Callable[..., None]) -> Callable[..., None]:
        def init_loader(loader: DataLoader[Any], *args: Any, **options: Any) -> None:
            init(loader, *args, **options)
            self._made[loader] = Place.of(current_location())

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
