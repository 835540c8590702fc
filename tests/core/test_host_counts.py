"""Numbers that an optimizer keeps on the host, set all at once."""

from __future__ import annotations

import pytest
import torch

from xla_adapters.replay.host_counts import HostCounts


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bfloat16])
def test_all_of_them_are_set(dtype: torch.dtype) -> None:
    tensors = [torch.tensor(1, dtype=dtype) for _ in range(3)]
    counts = HostCounts(tensors)
    before = counts.version
    for value in (2, 3):
        counts.set(torch.tensor(value, dtype=dtype))
        assert [tensor.item() for tensor in tensors] == [value] * 3
    assert counts.version == before + 2 * len(tensors)


def test_one_that_has_got_other_memory() -> None:
    tensors = [torch.tensor(1.0) for _ in range(3)]
    counts = HostCounts(tensors)
    counts.set(torch.tensor(2.0))
    former = tensors[1].data
    tensors[1].data = torch.tensor(7.0)
    assert not counts.are_alike()
    counts.set(torch.tensor(3.0))
    assert counts.are_alike()
    assert [tensors[1].item(), former.item()] == [3.0, 2.0]
