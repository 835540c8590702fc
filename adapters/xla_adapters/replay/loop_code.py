"""Whether a replay may leave out the code of a step of one's own, and what that code reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.optim.swa_utils import AveragedModel

from xla_adapters.replay.effects import Proof
from xla_adapters.replay.outside import OF_MODULES, Batch, Knowledge, Unproven, Value, nothing
from xla_adapters.replay.own_code import OwnCode

_KNOWLEDGE = Knowledge(
    packages=None,
    calls={**OF_MODULES, AveragedModel.update_parameters: nothing},
    methods=frozenset({"update", "compute"}),
    properties=dict.fromkeys(("device", "dtype"), nothing),
)


def own_code(function: Callable[..., object], positional: int, options: Sequence[str]) -> OwnCode:
    """The code of a step.

    Args:
        function: the step.
        positional: how many arguments it is called with.
        options: the names of the others.
    """

    def examine(proof: Proof) -> None:
        try:
            batch = Value((Batch(),))
            handed_out = proof.examine(function, [batch] * positional, dict.fromkeys(options, batch))
            if handed_out.varying:
                raise Unproven(f"it hands out {handed_out.varying}")
        except Unproven as error:
            name = getattr(function, "__qualname__", type(function).__qualname__)
            raise Unproven(
                f"a replay would leave out what {name} may do beside tensors: {error}; step_replay=True accepts that"
            ) from None

    return OwnCode(_KNOWLEDGE, examine)
