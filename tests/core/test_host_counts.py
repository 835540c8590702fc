"""Numbers that an optimizer keeps on the host, set all at once, and seen by whoever uses one of them."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from xla_adapters.packed_state import PackedTensor
from xla_adapters.replay import host_counts
from xla_adapters.replay.host_counts import HostCounts


def counted(dtype: torch.dtype = torch.float32, *, to: float = 2) -> tuple[list[torch.Tensor], HostCounts]:
    tensors = [torch.tensor(1, dtype=dtype) for _ in range(3)]
    counts = HostCounts(tensors)
    counts.set(torch.tensor(to, dtype=dtype))
    return tensors, counts


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bfloat16])
def test_all_of_them_are_set(dtype: torch.dtype) -> None:
    tensors, counts = counted(dtype)
    counts.set(torch.tensor(3, dtype=dtype))
    assert counts.is_ahead
    assert set(map(type, tensors)) == {PackedTensor}
    assert counts.value.item() == 3
    assert counts.is_ahead
    before = counts.version
    assert [tensor.item() for tensor in tensors] == [3] * 3
    assert not counts.is_ahead
    assert set(map(type, tensors)) == {torch.Tensor}
    # Whoever has some of them too sees by it that they changed.
    assert counts.version == before + len(tensors)
    assert counts.value.item() == 3


def _in_a_thread(tensor: torch.Tensor) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(tensor.tolist()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize(
    "use",
    [
        torch.Tensor.tolist,
        torch.Tensor.numpy,
        torch.Tensor.clone,
        copy.deepcopy,
        _in_a_thread,
        lambda tensor: torch._foreach_add([tensor], 0)[0],
        lambda tensor: torch.save([{"step": tensor}], "saved") or torch.load("saved")[0]["step"],
    ],
)
def test_whoever_uses_one_finds_the_value(
    use: Callable[[torch.Tensor], Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tensors, _ = counted()
    found = use(tensors[1])
    assert float(found) == 2
    assert set(map(type, tensors)) == {torch.Tensor}
    assert not (isinstance(found, torch.Tensor) and "_packed_in" in vars(found))


def test_what_is_written_to_one_counts() -> None:
    tensors, counts = counted()
    tensors[1].add_(5)
    assert [tensor.item() for tensor in tensors] == [2, 7, 2]
    assert not counts.are_alike()


def test_those_that_others_have_too() -> None:
    """Two recipes, of which one updates some of the parameters."""
    tensors, all_of_them = counted()
    some = HostCounts(tensors[1:])
    assert some.value.item() == 2
    some.set(torch.tensor(4.0))
    assert some.is_ahead
    assert not all_of_them.is_ahead
    assert not all_of_them.are_alike()
    assert not some.is_ahead
    assert [tensor.item() for tensor in tensors] == [2, 4, 4]
    all_of_them.set(torch.tensor(5.0))
    assert [tensor.item() for tensor in tensors] == [5] * 3


def test_the_version_tells_of_what_another_one_has_not_written_yet() -> None:
    tensors, all_of_them = counted()
    assert [tensor.item() for tensor in tensors] == [2] * 3
    before = all_of_them.version
    HostCounts(tensors[1:]).set(torch.tensor(4.0))
    assert all_of_them.version == before + 2
    assert not all_of_them.are_alike()


def test_a_view_that_is_held_sees_each_value() -> None:
    tensors = [torch.tensor(1.0) for _ in range(3)]
    view = tensors[1].view(1)
    counts = HostCounts(tensors)
    counts.set(torch.tensor(2.0))
    assert not counts.is_ahead
    assert view.tolist() == [2.0]


def test_one_of_a_class_of_its_own_keeps_it() -> None:
    tensors = [torch.tensor(1.0), torch.nn.Parameter(torch.tensor(1.0))]
    counts = HostCounts(tensors)
    counts.set(torch.tensor(2.0))
    assert not counts.is_ahead
    assert list(map(type, tensors)) == [torch.Tensor, torch.nn.Parameter]
    assert [tensor.item() for tensor in tensors] == [2, 2]


def test_an_interrupt_while_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, counts = counted()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(host_counts, "unmark", interrupted)
        tensors[0].tolist()
    assert [tensor.item() for tensor in tensors] == [2] * 3
    counts.set(torch.tensor(3.0))
    assert [tensor.item() for tensor in tensors] == [3] * 3
    assert set(map(type, tensors)) == {torch.Tensor}


def test_one_that_has_got_other_memory() -> None:
    tensors, counts = counted()
    former = tensors[1].data
    tensors[1].data = torch.tensor(7.0)
    assert not counts.are_alike()
    counts.set(torch.tensor(3.0))
    assert [tensor.item() for tensor in tensors] == [3.0] * 3
    assert former.item() == 2.0
