"""One change of each kind that replays have overlooked, and a few more: these are always made."""

from __future__ import annotations

from dataclasses import dataclass

from tests.replay.reachable.checks import Pair


@dataclass(frozen=True)
class Pinned:
    """A change of a program.

    Attributes:
        kind: what made it easy to overlook.
        program, path, change: what is changed, and how.
    """

    kind: str
    program: str
    path: str
    change: str

    @property
    def pair(self) -> Pair:
        """The change alone."""
        return Pair(self.path, self.change)

    def __str__(self) -> str:
        return f"{self.kind}-{self.program}"


_OPTIMIZER = "step.<optimizer>.param_groups[0]"
_MODEL = "step.<loss_of>.<model>"
_ROWS = (
    ("containers", "stages_compared", "step.<stages>[0].warm", "True -> False"),
    ("containers", "active_criteria", "step.<criteria>[1].active", "True -> False"),
    ("containers", "shares_added", "step.<shares>[0].value", "0.5 -> 0.25"),
    ("containers", "hf_stages_compared", "programs_hf.STAGES[0].warm", "True -> False"),
    ("optimizers", "topk_optimizer", f"{_OPTIMIZER}['k']", "2 -> 3"),
    ("optimizers", "filled_rate_optimizer", f"{_OPTIMIZER}['lr']", "0.3 -> 0.15"),
    ("optimizers", "partial_optimizer", f"{_OPTIMIZER}['rows']", "2 -> 3"),
    ("callables", "tasks_mapped", "step.<tasks>[0].weight", "1.0 -> 0.5"),
    ("callables", "lightning_tasks_mapped", "module.tasks[0].weight", "1.0 -> 0.5"),
    ("batches", "batch_with_a_method", "programs_batches.NOISE.scale", "1.0 -> 0.5"),
    ("batches", "batch_with_a_property", "Weighted.weight", "another getter"),
    ("batches", "dict_batch_with_attributes", "collator.temperature", "2.0 -> 1.0"),
    ("host buffers", "temperature_on_the_host", f"{_MODEL}.temperature", "filled in place"),
    ("host buffers", "curriculum_by_buffer", f"{_MODEL}.hard", "filled in place"),
    ("modes", "nothing_around", "modes", "saved_tensors_hooks entered"),
    ("modes", "saving_compressed", "saving.on", "False -> True"),
    ("tensor attributes", "quantizer_of_a_weight", f"{_MODEL}.weight.quantizer.levels", "8.0 -> 4.0"),
    ("tensor attributes", "decay_of_parameters", f"{_MODEL}.0.weight.rules['clip']", "True -> False"),
    ("attributes", "numpy_slope", "step.<model>.1.negative_slope", "float32(0.25) -> float32(0.125)"),
    ("attributes", "attribute_dictionary", "programs_attributes.SCALES.factor", "1.0 -> 0.5"),
    ("helpers", "gated_by_helper", "step.<model>.0.gate.value", "1.0 -> 0.5"),
    ("helpers", "meter_of_a_module", "step.<model>.warm", "9 -> 10"),
)
PINNED = tuple(Pinned(*row) for row in _ROWS)
