"""Batch, layer and group norms, recurrent layers, CTC, decompositions and products of matrices.

What torch_xla 2.9 does otherwise:
- Batch norm in eval mode has no backward. In training it updates the running variance with the biased one of the batch.
- XLA's operation takes the mean of the squares less the square of the mean for the variance, which is wrong by a tenth
  where the mean is a thousand times the deviation (float32): a column of years, a temperature in kelvin. Layer, group
  and instance norms are made of it.
- It has nothing for recurrent layers over packed sequences, and refuses some GRUs. The lengths of packed sequences are
  numbers on the host: each list of lengths has a graph of its own.
- It computes CTC (connectionist temporal classification) on the host.
- It gives no decomposition with the logarithms of determinants, so that the backward fails, and the singular values of
  several matrices in a wrong shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import torch
from torch.nn import functional

from xla_adapters.errors import HostTensorError
from xla_adapters.open_step import in_step
from xla_adapters.runtime.torch_xla.operators.registration import Kernels
from xla_adapters.runtime.torch_xla.patches import computes_at_once, loop
from xla_adapters.utils.location import line_of_user

_Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
# Along a dimension.
_SAMPLED = 8
_Tensor = torch.Tensor
# Hidden state, and for LSTMs the cell state.
_State = tuple[_Tensor, ...]
# (what comes from the input, state, weights) -> state
_Cell = Callable[[_Tensor, _State, "_Weights"], _State]
_Determinant = tuple[torch.Tensor, torch.Tensor]


# ---- norms ----------------------------------------------------------------------------------------


def _batch_norm(
    stock: Callable[..., _Tensors],
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> _Tensors:
    """`native_batch_norm`, written with operators that have a backward."""
    if running_mean is None or running_var is None:
        return stock(input, weight, bias, running_mean, running_var, training, momentum, eps)
    if training:
        return _batch_norm_legit(input, weight, bias, running_mean, running_var, training, momentum, eps)
    if not torch.is_grad_enabled():
        return stock(input, weight, bias, running_mean, running_var, training, momentum, eps)
    return _frozen_batch_norm(input, weight, bias, running_mean, running_var, momentum, eps)


def _frozen_batch_norm(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    momentum: float,
    eps: float,
) -> _Tensors:
    """With these statistics; also `_native_batch_norm_legit_no_training`, for which `momentum` is nothing either."""
    shape = [-1] + [1] * (input.ndim - 2)
    factor = (running_var + eps).rsqrt()
    if weight is not None:
        factor = factor * weight
    result = (input - running_mean.reshape(shape)) * factor.reshape(shape)
    if bias is not None:
        result = result + bias.reshape(shape)
    nothing = input.new_empty(0)
    return result.to(input.dtype), nothing, nothing


def _batch_norm_legit(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> _Tensors:
    """`_native_batch_norm_legit`, which torch_xla computes with the biased variance."""
    if not training:
        return _frozen_batch_norm(input, weight, bias, running_mean, running_var, momentum, eps)
    result, mean, inverse = torch.native_batch_norm(input, weight, bias, None, None, True, 0.0, eps)
    values = input.numel() // input.shape[1]
    with torch.no_grad():
        variance = (inverse.pow(-2) - eps) * (values / max(values - 1, 1))
        running_mean.mul_(1 - momentum).add_(mean * momentum)
        running_var.mul_(1 - momentum).add_(variance * momentum)
    return result, mean, inverse


def _centred_batch_norm(
    stock: Callable[..., _Tensors],
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    *factors: float,
) -> _Tensors:
    """`native_batch_norm` of what is left when about the mean of each channel is subtracted."""
    # Less precise values have no digits left for a deviation that small, and would be rounded once more.
    if not training or running_mean is not None or input.dtype.itemsize < 4 or not input.numel():
        return stock(input, weight, bias, running_mean, running_var, training, *factors)
    shift = _about_the_mean(input)
    result, mean, inverse_deviation = stock(input - shift, weight, bias, None, None, training, *factors)
    return result, mean + shift.reshape(-1).to(mean.dtype), inverse_deviation


def _about_the_mean(input: torch.Tensor) -> torch.Tensor:
    """Of a few values of each channel, so that the others need not be read twice."""
    inner = [slice(1)] * (input.ndim - 3) + [slice(_SAMPLED)] * (input.ndim > 2)
    few = input[(slice(_SAMPLED), slice(None), *inner)]
    return few.mean([dim for dim in range(input.ndim) if dim != 1], keepdim=True)


def _norm_in_the_wider_dtype(
    stock: Callable[..., Sequence[torch.Tensor]], input: torch.Tensor, *args: Any
) -> Sequence[torch.Tensor]:
    """`native_layer_norm` and the like with weights of a wider dtype: computed in it, and rounded to the input's."""
    weights = (value.dtype for value in args if isinstance(value, torch.Tensor))
    wide = reduce(torch.promote_types, weights, input.dtype)
    if wide is input.dtype:
        return stock(input, *args)
    result, *statistics = stock(input.to(wide), *args)
    return result.to(input.dtype), *statistics


# ---- recurrent layers -----------------------------------------------------------------------------


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


# ---- determinants, singular values and products ---------------------------------------------------


class _LogDeterminant(torch.autograd.Function):
    """Sign and logarithm. The gradient of the logarithm is the transposed inverse, by singular values."""

    @staticmethod
    def forward(ctx: Any, matrices: torch.Tensor, stock: Callable[..., Any]) -> _Determinant:
        ctx.save_for_backward(matrices)
        sign, logarithm, *_ = stock(matrices)
        ctx.mark_non_differentiable(sign)
        return sign, logarithm

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (matrices,) = ctx.saved_tensors
        return gradients[1][..., None, None] * torch.linalg.pinv(matrices).mT, None


def _log_determinant(stock: Callable[..., Any], matrices: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """`_linalg_slogdet`. Its last two results are for torch's own gradient, which is not used."""
    sign, logarithm = _LogDeterminant.apply(matrices, stock)  # type: ignore[no-untyped-call]
    return sign, logarithm, matrices.detach(), torch.zeros(matrices.shape[:-1], dtype=torch.int32, device=sign.device)


def _singular_values(
    stock: Callable[..., Any], matrices: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, ...]:
    """`_linalg_svd`, one matrix after the other."""
    if matrices.ndim == 2:
        found: tuple[torch.Tensor, ...] = stock(matrices, *args, **kwargs)
        return found
    leading = matrices.shape[:-2]
    flat = matrices.reshape(-1, *matrices.shape[-2:])
    each = [stock(torch.select_copy(flat, 0, place), *args, **kwargs) for place in range(flat.shape[0])]
    return tuple(torch.stack(parts).reshape(*leading, *parts[0].shape) for parts in zip(*each, strict=True))


def _add_products(
    self: torch.Tensor, batch1: torch.Tensor, batch2: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    """`addbmm`."""
    products = torch.bmm(batch1, batch2).sum(0) * alpha
    return products if beta == 0 else self * beta + products


def _batched_products(
    stock: Callable[..., torch.Tensor],
    self: torch.Tensor,
    batch1: torch.Tensor,
    batch2: torch.Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> torch.Tensor:
    """`baddbmm`. With a factor of zero, what `self` has that is not finite does not count."""
    if beta == 0:
        self = torch.zeros_like(self)
    return stock(self, batch1, batch2, beta=beta, alpha=alpha)


def _einsum(
    stock: Callable[..., torch.Tensor], equation: str, tensors: Sequence[torch.Tensor], *, path: Any = None
) -> torch.Tensor:
    """`einsum`, by torch's composition where torch_xla errs.

    That is for an index that one of the tensors has twice, and in gradients of complex numbers.
    """
    if any(tensor.is_complex() for tensor in tensors):
        return _composed_einsum(equation, tensors, path)
    for indices in equation.partition("->")[0].split(","):
        letters = indices.replace(" ", "").replace("...", "")
        if len(set(letters)) < len(letters):
            return _composed_einsum(equation, tensors, path)
    return stock(equation, tensors, path=path)


def _composed_einsum(equation: str, tensors: Sequence[torch.Tensor], path: Any) -> torch.Tensor:
    result: torch.Tensor = torch.ops.aten.einsum.default.decompose(equation, tensors, path=path)
    return result


# ---- CTC ------------------------------------------------------------------------------------------


class _Alignments:
    """The alignments of frames and labels that CTC sums over: of a text with L labels, paths through 2 L + 1 states.

    The states are the labels, each between two blanks. Source: Graves et al. 2006, "Connectionist temporal
    classification", section 4.1.

    Args:
        log_probs: (frames, batch, classes).
        targets: (batch, longest text), or the labels of all texts in one dimension.
        lengths: frames and labels of each text, as lists of numbers or as tensors, which are read in eager mode only.
        blank: the class that stands for no label.
    """

    def __init__(self, log_probs: _Tensor, targets: _Tensor, lengths: tuple[Any, Any], blank: int) -> None:
        device = log_probs.device
        if computes_at_once():
            frames, labels = (length.tolist() if isinstance(length, _Tensor) else length for length in lengths)
            lengths = frames, labels
        _check_lengths(log_probs, targets, lengths, blank)
        self.frames, self.labels = (torch.as_tensor(length, device=device).reshape(-1) for length in lengths)
        # How long the longest text is can be known without a read from numbers only.
        longest = targets.shape[-1] if isinstance(lengths[1], _Tensor) else max(lengths[1], default=0)
        position = torch.arange(longest, device=device)
        if targets.ndim == 1 and longest:
            index = (self.labels.cumsum(0) - self.labels)[:, None] + position
            targets = targets[index.clamp(max=len(targets) - 1)]
        targets = targets.reshape(log_probs.shape[1], -1)[:, :longest]
        targets = targets.masked_fill(position >= self.labels[:, None], blank)
        pairs = torch.stack([torch.full_like(targets, blank), targets], 2).flatten(1)
        self.states = functional.pad(pairs, (0, 1), value=blank).expand(len(log_probs), -1, -1)
        self.emitted = log_probs.gather(2, self.states)
        state, one = torch.arange(self.states.shape[2], device=device), self.states[0]
        self._begins = (state < 2).expand_as(one)
        self.ends = (state == 2 * self.labels[:, None]) | (state == 2 * self.labels[:, None] - 1)
        # Over the blank between two labels that differ.
        self._skips = (one != functional.pad(one, (2, 0), value=blank)[:, :-2]) & (one != blank)
        self.frame = torch.arange(len(log_probs), device=device)[:, None]

    def before(self) -> _Tensor:
        """The logarithm of the probability of all paths up to each frame and state: as `emitted`."""
        return _along_frames(self.emitted, (self.frame == 0).expand(-1, len(self.labels)), self._begins, self._skips)

    def after(self) -> _Tensor:
        """The same, of all paths from there to the end of the text."""
        # As an index, torch_xla would upload the positions.
        skips = torch.cat([torch.slice_copy(self._skips, 1, 2), torch.zeros_like(self._skips[:, :2])], 1)
        last = (self.frame == self.frames - 1).flip(0)
        return _along_frames(self.emitted.flip(0, 2), last, self.ends.flip(1), skips.flip(1)).flip(0, 2)


def _check_lengths(log_probs: _Tensor, targets: _Tensor, lengths: tuple[Any, Any], blank: int) -> None:
    """Refuses numbers that torch refuses on the CPU. Those in tensors are compared while a step is traced."""
    if not 0 <= blank < log_probs.shape[2]:
        raise RuntimeError(f"ctc_loss: blank is {blank}, and there are {log_probs.shape[2]} classes")
    for name, given, most in zip(
        ("input_lengths", "target_lengths"), lengths, (len(log_probs), targets.shape[-1]), strict=True
    ):
        count = given.numel() if isinstance(given, _Tensor) else len(given)
        if count != log_probs.shape[1]:
            raise RuntimeError(f"ctc_loss: {name} has {count} numbers, and the batch has {log_probs.shape[1]} texts")
        if not isinstance(given, _Tensor) and not all(0 <= length <= most for length in given):
            raise RuntimeError(f"ctc_loss: {name} has to be from 0 to {most}, and is {list(given)}")
    if targets.ndim == 1 and not isinstance(lengths[1], _Tensor) and sum(lengths[1]) != len(targets):
        raise RuntimeError(f"ctc_loss: target_lengths add up to {sum(lengths[1])}, and targets has {len(targets)}")


def _along_frames(emitted: _Tensor, begins: _Tensor, first: _Tensor, skips: _Tensor) -> _Tensor:
    """The logarithm of the sum over all paths, for each frame and state: one loop in the graph.

    Args:
        emitted: (frames, batch, states), the logarithms of probabilities.
        begins: (frames, batch), the frame in which paths begin.
        first: (batch, states), the states that they may begin in.
        skips: (batch, states), the states that may follow the one before the last.
    """
    never = torch.full_like(emitted[0], -torch.inf)

    def frame(carry: Sequence[_Tensor], given: Sequence[_Tensor]) -> tuple[list[_Tensor], list[_Tensor]]:
        before, first, skips, never = carry
        stays, follows, jumps = (torch.cat([never[:, :n], before], 1)[:, : before.shape[1]] for n in range(3))
        jumps = torch.where(skips > 0, jumps, never)
        largest = torch.maximum(torch.maximum(stays, follows), jumps)
        largest = torch.where(largest == never, torch.zeros_like(largest), largest)
        goes_on = torch.stack([stays - largest, follows - largest, jumps - largest]).exp().sum(0).log() + largest
        total = torch.where(given[1][:, None] > 0, torch.where(first > 0, torch.zeros_like(never), never), goes_on)
        total = total + given[0]
        return [total, first, skips, never], [total]

    # Loops carry no booleans.
    start = [never, first.to(emitted.dtype), skips.to(emitted.dtype), never]
    return loop(frame, start, [emitted, begins.to(emitted.dtype)])[0]


def _ctc_loss(
    log_probs: _Tensor,
    targets: _Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[_Tensor, _Tensor]:
    """`_ctc_loss`: the negative log-likelihood of each text, and the paths up to each frame for the backward."""
    paths = _Alignments(log_probs, targets, (input_lengths, target_lengths), blank)
    before = paths.before()
    at = (paths.frames - 1).clamp(min=0)[None, :, None].expand(1, -1, before.shape[2])
    whole = torch.where(paths.ends, before.gather(0, at)[0], -torch.inf).logsumexp(1)
    nothing = torch.where(paths.labels == 0, 0.0, -torch.inf).to(whole.dtype)
    whole = torch.where(paths.frames == 0, nothing, whole)
    if targets.ndim == 1:
        # torch refuses this on the CPU.
        whole = torch.where(paths.labels.sum() == len(targets), whole, torch.nan)
    return -whole, before.transpose(0, 1)


def _ctc_loss_backward(
    grad: _Tensor,
    log_probs: _Tensor,
    targets: _Tensor,
    input_lengths: Any,
    target_lengths: Any,
    neg_log_likelihood: _Tensor,
    log_alpha: _Tensor,
    blank: int,
    zero_infinity: bool = False,
) -> _Tensor:
    """`_ctc_loss_backward`: how much more likely a class is than all paths together take it to be."""
    paths = _Alignments(log_probs, targets, (input_lengths, target_lengths), blank)
    both = log_alpha.transpose(0, 1) + paths.after()
    share = torch.where(both == -torch.inf, 0.0, (both - paths.emitted + neg_log_likelihood[:, None]).exp())
    taken = torch.zeros_like(log_probs).scatter_add(2, paths.states, share)
    impossible = neg_log_likelihood == torch.inf
    gradient = (log_probs.exp() - taken) * grad[:, None]
    gradient = torch.where(impossible[:, None], 0.0 if zero_infinity else torch.nan, gradient)
    return torch.where((paths.frame < paths.frames)[..., None], gradient, 0.0)


# ---- inputs on the host ---------------------------------------------------------------------------


def _naming_host_inputs(stock: Callable[..., _Tensor], *args: Any, **kwargs: Any) -> _Tensor:
    """A kernel with which models of texts begin. Of an input on the host torch_xla only says which type it expected."""
    try:
        return stock(*args, **kwargs)
    except RuntimeError as error:
        tensors = [value for value in args if isinstance(value, torch.Tensor)]
        host = next((tensor for tensor in tensors if tensor.device.type == "cpu"), None)
        device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), None)
        # A step names the argument.
        if host is None or device is None or in_step():
            raise
        raise HostTensorError(
            f"a tensor on the host ({str(host.dtype).removeprefix('torch.')}{list(host.shape)}) meets the weights of a "
            f"model on {device}\n  where: {line_of_user()}\n  what to do: move the tensor with "
            f".to({str(device)!r}), or .to(model.device) of a model of transformers; or the model with model.cpu()"
        ) from error


KERNELS = Kernels(
    differentiable={
        "_pack_padded_sequence": _pack,
        "rnn_tanh.data": partial(_packed, partial(_elman, torch.tanh)),
        "rnn_relu.data": partial(_packed, partial(_elman, torch.relu)),
        "gru.data": partial(_packed, _gru),
        "lstm.data": partial(_packed, _lstm),
    },
    around_differentiable={
        **dict.fromkeys(("native_layer_norm", "native_group_norm"), _norm_in_the_wider_dtype),
    },
    above_autograd={
        "_native_batch_norm_legit": _batch_norm_legit,
        "_native_batch_norm_legit_no_training": _frozen_batch_norm,
    },
    around_above_autograd={
        # Their first argument is torch's kernel.
        "_linalg_slogdet": _log_determinant,
        # Kernels whose first argument is torch's own.
        "native_batch_norm": _batch_norm,
        # The same, with operators that have a backward.
        "einsum": _einsum,
    },
    below_autograd={
        "addbmm": _add_products,
        **dict.fromkeys(("_ctc_loss", "_ctc_loss.Tensor"), _ctc_loss),
        **dict.fromkeys(("_ctc_loss_backward", "_ctc_loss_backward.Tensor"), _ctc_loss_backward),
    },
    around_below_autograd={
        # Kernels whose first argument is torch_xla's own.
        "native_batch_norm": _centred_batch_norm,
        # The same, of torch_xla.
        "_linalg_svd": _singular_values,
        # Their first argument is torch_xla's kernel.
        "baddbmm": _batched_products,
        # A kernel in Python costs 11 us at each call: not for products.
        "embedding": _naming_host_inputs,
    },
)
