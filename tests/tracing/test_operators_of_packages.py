"""Operators of other packages that torch_xla computes on the host, in a step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torchvision.ops import nms, roi_align

import xla_adapters
from tests.device import DEVICE
from tests.isolation import isolated
from xla_adapters.errors import HostOperatorError

BOXES = torch.tensor([[0.0, 0, 4, 4], [1, 1, 5, 5], [0, 0, 4, 4]])


def _message(boxes: Tensor, image: Tensor, scores: Tensor | None) -> str:
    with pytest.raises(HostOperatorError) as raised, xla_adapters.step():
        if scores is None:
            roi_align(image * 2, [boxes], 2)
        else:
            nms(boxes, scores, 0.5)
    return str(raised.value)


@isolated
def test_they_are_named_with_a_remedy() -> None:
    with xla_adapters.eager():
        boxes, image, scores = (t.to(DEVICE) for t in (BOXES, torch.ones(1, 3, 8, 8), torch.arange(3.0)))
        said = _message(boxes, image, None)
        assert "the operator torchvision::roi_align, which torch_xla computes on the host" in said
        assert "remedies: (1) torchvision has it in torch's operators, too" in said
        assert f"called from {__file__}:" in said
        # Its arguments are there: nothing is refused, but the device waits.
        said = _message(boxes, image, scores)
        assert "the operator torchvision::nms, which torch_xla computes on the host" in said
        assert "remedies: (1) call it after the step" in said
        assert nms(boxes, scores, 0.5).tolist() == nms(BOXES, torch.arange(3.0), 0.5).tolist()
