"""Whether a replay may leave out the code of a step of one's own, and what that code reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel

from xla_adapters.replay.effects import Proof
from xla_adapters.replay.outside import Batch, Knowledge, Unproven, Value
from xla_adapters.replay.own_code import OwnCode


def _nothing(owner: Any) -> Iterable[Any]:
    return ()


_KNOWLEDGE = Knowledge(
    packages=None,
    calls={
        **dict.fromkeys(
            (
                torch.nn.Module.parameters,
                torch.nn.Module.named_parameters,
                torch.nn.Module.buffers,
                torch.nn.Module.named_buffers,
                torch.nn.Module.zero_grad,
                # A pass that finds another mode than the one recorded found it is traced.
                torch.nn.Module.train,
                torch.nn.Module.eval,
                AveragedModel.update_parameters,
            ),
            _nothing,
        ),
        torch.nn.Module.modules: torch.nn.Module.modules,
        torch.nn.Module.children: torch.nn.Module.children,
    },
    methods=frozenset({"update", "compute"}),
    properties=dict.fromkeys(("device", "dtype"), _nothing),
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
