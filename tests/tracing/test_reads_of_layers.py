"""What layers of a library make of a batch: computed on the host, checked later, or left out, without another graph."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_adapters
from tests.device import DEVICE, ON_TORCH_TPU
from xla_adapters import FailedCheckError, GraphBreakError, TensorReadError
from xla_adapters.runtime.transfers import name_tensors, note_upload
from xla_adapters.tracing import library_reads
from xla_adapters.tracing.library_reads import LibraryReads, allowing_reads

pytestmark = [
    pytest.mark.isolated,
    pytest.mark.skipif(ON_TORCH_TPU, reason="nothing is fetched in a step there"),
]

_LIBRARY = """
import torch

def positions(grid, device_of=None):
    parts = [torch.arange(h * w, device=grid.device) % w for h, w in grid.tolist()]
    return torch.cat(parts), None

def of_positions(values, grid):
    places, _ = positions(grid)
    return values[places]

def real(pictures):
    pixels = pictures.view(-1, *pictures.shape[2:]).to(pictures.dtype)
    mask = (pixels == 0.0).sum(dim=-1) != pixels.shape[1]
    mask[0] |= ~torch.any(mask)
    return (pixels * 2)[mask], torch.masked_select(pixels[:, 0] * 2, mask)

def real_after_a_write(pictures):
    pictures[0] = 1
    return pictures[(pictures == 0.0).sum(dim=-1) != 2]

def counted(values, count):
    number = torch.as_tensor([count], dtype=torch.float, device=values.device)
    return values.sum() / torch.clamp(number / 2, min=1).item()

def ranged(values, labels):
    return values[: torch.arange(labels.sum(), device=values.device).numel()]

def not_negative(values):
    if not (values >= 0).all():
        raise ValueError(f"there are negative ones in {values}")
    return values * 2

def no_nan(values):
    if torch.isnan(values).any():
        raise ValueError("not a number")
    return values * 2

def asserted(values):
    assert (values >= 0).all(), "negative"
    return values * 2

def compared(values):
    if bool((values >= 0).all()) == False:
        raise ValueError("negative")
    return values * 2

def with_another_way(values):
    if (values >= 0).all():
        return values
    raise ValueError("negative")

def both(values):
    if values.ndim and not (values >= 0).all():
        raise ValueError("negative")
    return values * 2

def torchs(values):
    torch._check_tensor_all(values >= 0, lambda: "negative")
    return values * 2

def told(values):
    text = f"the sum is {values.sum()} of {values!r}"
    return values * len(text[:1])

def clamped(hidden_states):
    if not torch.isfinite(hidden_states).all():
        clamp_value = torch.finfo(hidden_states.dtype).max - 1000
        hidden_states = torch.clamp(hidden_states, min=-clamp_value, max=clamp_value)
    return hidden_states

def written_where(values):
    mask = values < 0
    if mask.any():
        values[1:][mask[1:]] = 5.0
        return values
    return values

def without_negatives(values):
    values = values * 1
    is_negative = values[1:] < 0
    if is_negative.any():
        values[1:][is_negative] = float("-inf")
    return values

def otherwise_clamped(hidden_states):
    if not torch.isfinite(hidden_states).all():
        hidden_states = torch.clamp(hidden_states, min=-10, max=10)
    return hidden_states
"""


@pytest.fixture
def library(tmp_path: Path) -> Any:
    folder = tmp_path / "library"
    folder.mkdir()
    (folder / "layers.py").write_text(_LIBRARY)
    spec = importlib.util.spec_from_file_location("layers", folder / "layers.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def reads(tmp_path: Path) -> LibraryReads:
    return LibraryReads([], layers=[str(tmp_path / "library")])


def _uploaded(tensor: torch.Tensor) -> torch.Tensor:
    on_device = tensor.to(DEVICE)
    note_upload(tensor, on_device)
    name_tensors({"batch": on_device})
    return on_device


def test_what_a_function_makes_of_the_batch_is_no_part_of_the_graph(library: Any, reads: LibraryReads) -> None:
    """Grids of other sizes and as many positions are one graph."""
    library.positions = library_reads._on_host(library.positions)
    values = torch.arange(12.0)
    found = []
    with allowing_reads(reads), xla_adapters.count() as counts:
        for grid in ([[2, 3], [1, 4]], [[1, 4], [2, 3]], [[5, 2], [0, 9]]):
            on_device, on_host = values.to(DEVICE), torch.tensor(grid)
            labels = _uploaded(on_host)
            with xla_adapters.step():
                result = library.of_positions(on_device * 1, labels)
            found.append((result.cpu(), library.of_positions(values, on_host)))
    for result, expected in found:
        assert torch.equal(result, expected)
    assert (counts.compiles, counts.executions) == (1, 3)
    # What is not known on the host is computed as it is: here, by a read.
    with allowing_reads(reads), pytest.raises(TensorReadError), xla_adapters.step():
        library.of_positions(values.to(DEVICE), torch.tensor([[2, 3]]).to(DEVICE) * values.to(DEVICE)[:2].long())


def test_a_mask_of_floats_of_the_batch_is_known(library: Any, reads: LibraryReads) -> None:
    """The values are fetched once; of later batches the host keeps them."""
    generator = torch.Generator().manual_seed(0)
    transfers = []
    with allowing_reads(reads):
        for empty in (((0, 1), (1, 2)), ((1, 0), (0, 0)), ((0,), (1,))):
            pictures = torch.randn(2, 3, 4, generator=generator)
            for place in empty:
                pictures[place] = 0
            on_device = _uploaded(pictures)
            with xla_adapters.count() as counts, xla_adapters.step():
                result = library.real(on_device)
            transfers.append((counts.executions, counts.transfers_to_host))
            for one, expected in zip(result, library.real(pictures), strict=True):
                assert torch.equal(one.cpu(), expected)
    assert transfers == [(1, 1), (1, 0), (1, 0)]
    # The same batch again, in whose first step nobody asks for its values.
    on_device = _uploaded(pictures)
    with allowing_reads(reads):
        with xla_adapters.step():
            looked_at = on_device.view(-1, 4) == 0.0
        with xla_adapters.step():
            result = library.real(on_device)
            with pytest.raises(GraphBreakError):
                result[0][looked_at[:, 0]].tolist()
    assert torch.equal(result[0].cpu(), library.real(pictures)[0])


def test_what_is_no_batch_is_not_fetched(library: Any, reads: LibraryReads) -> None:
    values = torch.ones(2, 3, 4).to(DEVICE)
    with allowing_reads(reads), pytest.raises(GraphBreakError), xla_adapters.step():
        library.real(values)
    with allowing_reads(reads), pytest.raises(GraphBreakError), xla_adapters.step():
        library.real(_uploaded(torch.ones(2, 3, 4)) * values)
    with allowing_reads(reads), pytest.raises(GraphBreakError), xla_adapters.step():
        library.real_after_a_write(_uploaded(torch.zeros(3, 2)))


def test_numbers_that_the_code_makes_are_known(library: Any, reads: LibraryReads) -> None:
    values, labels = torch.arange(6.0), torch.tensor([1, 2])
    with allowing_reads(reads), xla_adapters.count() as counts, xla_adapters.step():
        total = library.counted(values.to(DEVICE), 10)
        some = library.ranged(values.to(DEVICE), _uploaded(labels))
    assert (counts.executions, counts.transfers_to_host) == (1, 0)
    assert (total.item(), some.tolist()) == (library.counted(values, 10).item(), [0.0, 1.0, 2.0])


@pytest.mark.parametrize("name", ["not_negative", "no_nan", "asserted", "torchs"])
def test_a_check_is_compared_when_values_come_to_the_host(library: Any, reads: LibraryReads, name: str) -> None:
    check = getattr(library, name)
    bad = float("nan") if name == "no_nan" else -1.0
    with allowing_reads(reads), xla_adapters.count() as counts, xla_adapters.step():
        result = check(torch.tensor([1.0, 2.0]).to(DEVICE) * 1)
    assert result.tolist() == [2.0, 4.0]
    assert counts.executions == 1
    with pytest.raises((ValueError, AssertionError, RuntimeError)):
        check(torch.tensor([1.0, bad]))
    with allowing_reads(reads), xla_adapters.step():
        result = check(torch.tensor([1.0, bad]).to(DEVICE) * 1)
    with pytest.raises(FailedCheckError, match=rf"layers\.py:\d+ in {name}"):
        xla_adapters.get_runtime().transfers.to_host([result])


@pytest.mark.parametrize("name", ["compared", "with_another_way", "both", "otherwise_clamped", "written_where"])
def test_what_decides_something_else_is_no_check(library: Any, reads: LibraryReads, name: str) -> None:
    with allowing_reads(reads), pytest.raises(TensorReadError), xla_adapters.step():
        getattr(library, name)(torch.tensor([1.0, 2.0]).to(DEVICE) * 1)


@pytest.mark.parametrize("values", [[1.0, -2.0, 3.0], [1.0, 2.0, 3.0]])
def test_what_is_written_where_a_mask_is_true_needs_no_value(
    library: Any, reads: LibraryReads, values: list[float]
) -> None:
    on_device = torch.tensor(values).to(DEVICE).requires_grad_()
    with allowing_reads(reads), xla_adapters.count() as counts, xla_adapters.step():
        result = library.without_negatives(on_device * 1)
    host = torch.tensor(values)
    assert (result.tolist(), counts.executions) == (library.without_negatives(host).tolist(), 1)


def test_a_message_needs_no_value(library: Any, reads: LibraryReads) -> None:
    with allowing_reads(reads), xla_adapters.count() as counts, xla_adapters.step():
        result = library.told(torch.tensor([1.0, 2.0]).to(DEVICE) * 1)
    assert (result.tolist(), counts.executions) == ([1.0, 2.0], 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_clamp_to_finite_numbers_is_always_computed(library: Any, reads: LibraryReads, dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    for values in ([1.0, largest, -largest], [1.0, float("inf"), -float("inf")]):
        on_host = torch.tensor(values, dtype=dtype, requires_grad=True)
        expected = library.clamped(on_host * 1)
        expected.sum().backward()
        with allowing_reads(reads), xla_adapters.count() as counts, xla_adapters.step():
            leaf = torch.tensor(values, dtype=dtype).to(DEVICE).requires_grad_()
            found = library.clamped(leaf * 1)
            found.sum().backward()
        assert counts.executions == 1
        assert torch.equal(found.detach().cpu(), expected.detach())
        assert leaf.grad is not None
        assert on_host.grad is not None
        assert torch.equal(leaf.grad.cpu(), on_host.grad)
    with allowing_reads(reads), pytest.raises(TensorReadError), xla_adapters.step():
        # Of half precision a number may be finite and outside of the range.
        library.clamped(torch.ones(2, dtype=torch.float16).to(DEVICE) * 1)
