"""`PlaceholderTraceOrReplay`: decides for each call of a step whether it is traced with placeholders, or replayed."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch

from xla_adapters.replay.call_spec import CallSpec
from xla_adapters.replay.placeholders.capture import Outcome, PlaceholderCapture
from xla_adapters.replay.placeholders.traced_call import OTHER_GRADIENTS, PlaceholderLauncher
from xla_adapters.replay.replayed_call import ReplayedCall
from xla_adapters.replay.tensor_places import CannotReplay
from xla_adapters.replay.trace_or_replay import TraceOrReplay
from xla_adapters.replay.verification import next_due
from xla_adapters.runtime import Runtime
from xla_adapters.runtime.rng import StepSeed
from xla_adapters.tracing.placeholders.scope import PlaceholderScope
from xla_adapters.tracing.scope_report import NOTHING_COMPILED, ScopeReport


class PlaceholderReplay(ReplayedCall):
    """A `ReplayedCall` that runs a program of placeholders."""

    def _like_output(self, index: int) -> torch.Tensor:
        call: Any = self._launcher.call
        shape, dtype = call.forms[index]
        return self._runtime.placeholders.stand_in(torch.empty(shape, dtype=dtype, device="meta"))

    def _execute(self) -> ScopeReport:
        launcher: Any = self._launcher
        runtime, tensors = self._runtime, self._tensors
        self._restores.close()
        self._restore_groups()
        if self._seed is not None:
            runtime.random.set_seed(self._seed.value())
        launcher.call.updates = list(self._updates)
        results = launcher.run(tensors, self._numbers, runtime)
        self._executed = True
        self._done()
        launcher.write_back(results, tensors, runtime)
        for tensor, index in self._pending:
            tensor.__class__ = torch.Tensor
            tensor.data = results[index]
        for update in self._updates:
            update.advance()
        self._is_open = False
        return NOTHING_COMPILED


@dataclass
class PlaceholderVerification:
    """Verifies a call that is traced, although it could be replayed: its program and its inputs must be the same.

    Then the results are the same to the last bit, and need not be compared.

    Attributes:
        launcher: what replays call.
        numbers: that a replay would give the program.
        agrees: whether the traced call is the same; set by `compare`.
        found: how it differs, in words.
    """

    launcher: PlaceholderLauncher
    numbers: list[float]
    agrees: bool = False
    found: str | None = None

    def compare(self, traced: Outcome) -> None:
        """To be called when the call was traced."""
        if isinstance(traced, CannotReplay):
            self.found = f"the program ({traced})"
            return
        difference = traced.difference(self.launcher.call)
        if difference is not None:
            self.found = f"the program ({difference})"
        elif self.launcher.new_numbers(traced.updates) != self.numbers:
            self.found = "a number of the optimizer"
        self.agrees = self.found is None

    def difference(self, returned: dict[str, list[object]], runtime: Runtime) -> str | None:
        """How the traced call differs from its replay, in words; None if it does not."""
        return self.found


@dataclass
class PlaceholderTraceOrReplay(TraceOrReplay):
    """A `TraceOrReplay` of programs of placeholders."""

    # How often calls have differed in which gradients were there. The first call of many trainings does, once; those
    # of a user's own accumulation do again and again.
    _by_gradients: int = 0

    def _gradients(self, spec: CallSpec) -> Hashable:
        if self._by_gradients < 2:
            return ()
        return tuple(leaf.grad is not None for module in spec.modules for leaf in module.parameters())

    def note(self, reason: str) -> None:
        """See `TraceOrReplay`."""
        self._by_gradients += reason.startswith(OTHER_GRADIENTS)
        super().note(reason)

    def _uncaptured(self, record: Any, spec: CallSpec, **options: Any) -> PlaceholderScope:
        # Not a plain `PlaceholderScope`: its program would have other arguments for the numbers of updates.
        return PlaceholderCapture(spec, lambda outcome: None, **options)

    def refused(self, spec: CallSpec, **options: Any) -> Any:
        """See `TraceOrReplay`. Its calls, too, have other arguments than a plain scope's."""
        return self._uncaptured(None, spec, **options) if self._records else None

    def _replayed(self, name: str, launcher: Any, **options: Any) -> ReplayedCall:
        if isinstance(options["numbers"], str):
            raise CannotReplay(options["numbers"])
        return PlaceholderReplay(name, launcher, **options)

    def _verification(
        self, launcher: Any, spec: CallSpec, numbers: Any, seed: StepSeed | None, runtime: Runtime
    ) -> Any:
        if isinstance(numbers, str):
            raise CannotReplay(numbers)
        return PlaceholderVerification(launcher, numbers)

    def _capturing(self, spec: CallSpec, done: Callable[..., None], verification: Any, **options: Any) -> Any:
        def take(outcome: Outcome) -> None:
            if verification is not None:
                verification.compare(outcome)
            done(outcome, True)

        return PlaceholderCapture(spec, take, **options)

    def _prepare(self, record: Any, call: Any, before: Any, spec: CallSpec) -> None:
        record.begin_replays(PlaceholderLauncher(call))
        record.waited = 0
        # This call was traced as well.
        record.due, record.trusted = next_due(0, self.verify_every), self.calls() + 1
