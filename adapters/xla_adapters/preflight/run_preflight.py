"""`RunPreflight`: what all steps of a training need on a slice of TPUs, as text and as plain values."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from xla_adapters.preflight.report import PreflightReport
from xla_adapters.sharding import human_bytes, human_seconds, table


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What is known of a step that was traced and not compiled.

    Attributes:
        step: which one.
        argument_bytes: of parameters, state and batch on one device, without padding.
        flops: of matrix products and convolutions on one device; None if not known.
        seconds: these at the published peak of the device; None if not known.
    """

    step: str
    argument_bytes: int
    flops: float | None
    seconds: float | None


@dataclass(frozen=True, kw_only=True)
class RunPreflight:
    """What a training needs on a slice of TPUs.

    Attributes:
        what: the script or the trainer.
        topology: the slice.
        graphs: of each graph of the run: the training step first, then micro batches without an update, then the
            evaluation step.
        problem: why there is no graph, or not all; empty if there is none.
        notes: what was changed for the pre-flight, in words.
        estimates: of each graph, if nothing was compiled.
        hbm_bytes: memory of a device, for the estimates.
        invalid: whether the problem is an option that cannot work.
    """

    what: str
    topology: str
    graphs: tuple[PreflightReport, ...] = ()
    problem: str = ""
    notes: tuple[str, ...] = ()
    estimates: tuple[Estimate, ...] = ()
    hbm_bytes: int = 0
    invalid: bool = False

    @property
    def needed_bytes(self) -> int:
        """Of a device's memory, by the largest of its graphs; 0 if not known.

        What the training step is given (parameters, optimizer state) stays there while other graphs run.
        """
        held = [graph.memory.arguments for graph in self.graphs if graph.memory is not None]
        return max((self._needed(graph, max(held, default=0)) for graph in self.graphs), default=0)

    @property
    def fits(self) -> bool:
        """Whether all graphs were compiled, and fit the memory of a device beside the state of the training."""
        compiled = bool(self.graphs) and not self.problem and all(graph.fits for graph in self.graphs)
        return compiled and self.needed_bytes <= self.graphs[0].hbm_bytes

    @property
    def status(self) -> int:
        """Exit status: 0 it fits, 1 it does not, 2 it cannot be said."""
        if self.fits:
            return 0
        too_large = any(graph.status == 1 for graph in self.graphs)
        known = bool(self.graphs) and all(graph.memory is not None for graph in self.graphs)
        return 1 if too_large or (known and self.needed_bytes > self.graphs[0].hbm_bytes) else 2

    def as_values(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "what": self.what,
            "topology": self.topology,
            "fits": self.fits,
            "needed_bytes": self.needed_bytes,
            "problem": self.problem,
            "notes": list(self.notes),
            "graphs": [graph.as_values() for graph in self.graphs],
            "estimates": [dataclasses.asdict(estimate) for estimate in self.estimates],
        }

    def text(self, *, width: int = 110) -> str:
        """The report for people.

        Args:
            width: the maximal number of characters per line of tables.
        """
        lines = [f"{self.what} on {self.topology}", self.verdict]
        lines += [f"  put in for the pre-flight: {note}" for note in self.notes]
        if self.estimates:
            lines += ["", *self.estimate_lines(width)]
        for graph in self.graphs:
            lines += ["", graph.text(width=width)]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()

    @staticmethod
    def _needed(graph: PreflightReport, held: int) -> int:
        if graph.memory is None:
            return graph.needed_bytes
        return graph.memory.needed - graph.memory.arguments + held

    @property
    def verdict(self) -> str:
        """Whether it fits, in a line."""
        if self.problem:
            return f"{'NOT COMPILED' if not self.graphs else 'NOT ALL COMPILED'}: {self.problem}"
        known = f"{human_bytes(self.needed_bytes)} of {human_bytes(self.graphs[0].hbm_bytes)} on each device"
        if self.fits:
            return f"FITS: {known}, with {len(self.graphs)} {'graph' if len(self.graphs) == 1 else 'graphs'}"
        if all(graph.memory is not None or graph.out_of_memory for graph in self.graphs):
            return f"DOES NOT FIT: {known}"
        return "DOES NOT COMPILE: see the graphs below"

    def estimate_lines(self, width: int) -> list[str]:
        """The estimates as lines of a table."""
        rows = [
            [
                item.step,
                human_bytes(item.argument_bytes),
                "unknown" if item.flops is None else f"{item.flops:.3g}",
                "unknown" if item.seconds is None else human_seconds(item.seconds),
            ]
            for item in self.estimates
        ]
        title = (
            f"Estimated without a compiler, of {human_bytes(self.hbm_bytes)} on each device; temporary values, which "
            "are not known, come on top"
        )
        header = ["step", "arguments", "operations", "time at the peak"]
        return [title, *table(header, rows, width=width, right=[1, 2, 3])]
