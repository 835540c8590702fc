"""Recurrent layers over packed sequences, for which torch_xla 2.9 has nothing, and the GRUs that its own refuses.

The lengths of packed sequences are numbers on the host: each list of lengths has a graph of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from xla_adapters.errors import HostTensorError

_Tensor = torch.Tensor
# Hidden state, and for LSTMs the cell state.
_State = tuple[_Tensor, ...]
# (what comes from the input, state, weights) -> state
_Cell = Callable[[_Tensor, _State, "_Weights"], _State]


class _Weights:
    """Of one layer in one direction."""

    def __init__(self, given: Sequence[_Tensor], has_biases: bool) -> None:
        self.input, self.hidden = given[:2]
        self.input_bias: _Tensor | None
        self.hidden_bias: _Tensor | None
        self.input_bias, self.hidden_bias = given[2:4] if has_biases else (None, None)
        # Of LSTMs with `proj_size`.
        rest = given[4 if has_biases else 2 :]
        self.projection = rest[0] if rest else None

    def from_hidden(self, hidden: _Tensor) -> _Tensor:
        return functional.linear(hidden, self.hidden, self.hidden_bias)


def _elman(activation: Callable[[_Tensor], _Tensor], given: _Tensor, state: _State, weights: _Weights) -> _State:
    return (activation(given + weights.from_hidden(state[0])),)


def _gru(given: _Tensor, state: _State, weights: _Weights) -> _State:
    reset, update, new = given.chunk(3, 1)
    hidden_reset, hidden_update, hidden_new = weights.from_hidden(state[0]).chunk(3, 1)
    candidate = torch.tanh(new + torch.sigmoid(reset + hidden_reset) * hidden_new)
    return ((state[0] - candidate) * torch.sigmoid(update + hidden_update) + candidate,)


def _lstm(given: _Tensor, state: _State, weights: _Weights) -> _State:
    enter, forget, new, leave = (given + weights.from_hidden(state[0])).chunk(4, 1)
    cell = torch.sigmoid(forget) * state[1] + torch.sigmoid(enter) * torch.tanh(new)
    hidden = torch.sigmoid(leave) * torch.tanh(cell)
    return (hidden if weights.projection is None else functional.linear(hidden, weights.projection)), cell


def _forward(cell: _Cell, given: Sequence[_Tensor], start: _State, weights: _Weights) -> tuple[_Tensor, _State]:
    """Sequences end, the shortest first: at each time the rows are those that go on."""
    state, ended, outputs = start, [], []
    for rows in given:
        if len(rows) < len(state[0]):
            ended.append([part[len(rows) :] for part in state])
        state = cell(rows, tuple(part[: len(rows)] for part in state), weights)
        outputs.append(state[0])
    last = tuple(torch.cat(parts) for parts in zip(state, *reversed(ended), strict=True))
    return torch.cat(outputs), last


def _backward(cell: _Cell, given: Sequence[_Tensor], start: _State, weights: _Weights) -> tuple[_Tensor, _State]:
    """From the end, where the shorter sequences join later."""
    state, outputs = tuple(part[:0] for part in start), []
    for rows in reversed(given):
        joined = slice(len(state[0]), len(rows))
        state = tuple(torch.cat([part, first[joined]]) for part, first in zip(state, start, strict=True))
        state = cell(rows, state, weights)
        outputs.append(state[0])
    return torch.cat(outputs[::-1]), state


def _packed(
    cell: _Cell,
    data: _Tensor,
    batch_sizes: _Tensor,
    hx: Any,
    params: Sequence[_Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> tuple[_Tensor, ...]:
    """`lstm.data` and the like: of shape (all times of all sequences, features), and the last states."""
    sizes = batch_sizes.tolist()
    states = hx if isinstance(hx, (list, tuple)) else [hx]
    directions = (_forward, _backward) if bidirectional else (_forward,)
    count = len(params) // (num_layers * len(directions))
    last: list[_State] = []
    for layer in range(num_layers):
        outputs = []
        for run in directions:
            place = len(last)
            weights = _Weights(params[place * count : (place + 1) * count], has_biases)
            given = functional.linear(data, weights.input, weights.input_bias).split(sizes)
            output, end = run(cell, given, tuple(state[place] for state in states), weights)
            outputs.append(output)
            last.append(end)
        data = torch.cat(outputs, 1)
        if layer < num_layers - 1:
            data = functional.dropout(data, dropout, train)
    return data, *(torch.stack(parts) for parts in zip(*last, strict=True))


def _pack(input: _Tensor, lengths: _Tensor, batch_first: bool) -> tuple[_Tensor, _Tensor]:
    """`_pack_padded_sequence`. What torch itself makes of it for the device are sizes that no layer can read.

    Raises:
        HostTensorError: the lengths are on the device.
        ValueError: the lengths are not of these sequences, not sorted, or not positive.
    """
    if lengths.device.type != "cpu":
        raise HostTensorError(
            "pack_padded_sequence was given lengths that are on the device, but the shape of a packed sequence depends "
            "on them. Give it a list or a tensor on the CPU: there each list of lengths has a graph of its own. Or "
            "leave the batch padded, and ignore by a mask what stands behind the ends"
        )
    ends: list[int] = lengths.tolist()
    times_first = input.transpose(0, 1) if batch_first else input
    if len(ends) != times_first.shape[1]:
        raise ValueError(f"there are {len(ends)} lengths for a batch of {times_first.shape[1]} sequences")
    if sorted(ends, reverse=True) != ends or not ends or ends[-1] <= 0:
        raise ValueError(f"the lengths of packed sequences are positive, the longest first, unlike {ends}")
    parts, sizes, start = [], [], 0
    for count in range(len(ends), 0, -1):
        # The times at which this many sequences go on.
        end = ends[count - 1]
        if end > start:
            parts.append(times_first[start:end, :count].flatten(0, 1))
            sizes += [count] * (end - start)
            start = end
    return torch.cat(parts), torch.tensor(sizes)


def complete_gru() -> None:
    """torch_xla puts a GRU of its own in the place of `torch.nn.GRU`; torch's computes what that one refuses.

    It also refuses tensors on the CPU, and leaves out the second direction if `bidirectional` is given by its position.
    """
    replacement: Any = torch.nn.GRU
    torchs = replacement.__base__
    if torchs is torch.nn.RNNBase:
        return
    scanned = replacement.forward

    def forward(self: Any, input: Any, hx: _Tensor | None = None) -> Any:
        is_packed = isinstance(input, torch.nn.utils.rnn.PackedSequence)
        if is_packed or self.bidirectional or input.device.type != "xla":
            return torchs.forward(self, input, hx)
        return scanned(self, input, hx)

    replacement.__init__, replacement.forward = torchs.__init__, forward


KERNELS: Mapping[str, Callable[..., tuple[_Tensor, ...]]] = {
    "_pack_padded_sequence": _pack,
    "rnn_tanh.data": partial(_packed, partial(_elman, torch.tanh)),
    "rnn_relu.data": partial(_packed, partial(_elman, torch.relu)),
    "gru.data": partial(_packed, _gru),
    "lstm.data": partial(_packed, _lstm),
}
