"""`strategies_of`: the strategies of each operator.

Most are contractions (einsum-like operators); labels name the dimensions, as in einsum. Splitting a label over the
model axis is a strategy. A label of the output costs nothing in the forward, and the gradient of each operand that
lacks it is a partial sum (the column-parallel layer of Megatron-LM, Shoeybi et al., arXiv 1909.08053; with the label of
the batch: data parallelism). If a label is summed over, the output is a partial sum. It is all-reduced (the
row-parallel layer) or reduce-scattered along another label (its sequence-parallel form).
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from xla_adapters.sharding.mesh import DATA, MODEL
from xla_adapters.sharding.plan_data import CollectiveCost
from xla_adapters.sharding.planner.costs import Fabric, State, times
from xla_adapters.sharding.planner.graph import Operand, Operator
from xla_adapters.sharding.planner.layouts import WHOLE, Strategy, Want, whole

Labels = Sequence[str]


def contraction(
    operator: Operator,
    fabric: Fabric,
    *,
    operands: Sequence[Labels],
    output: Labels,
    splittable: Sequence[str],
    work: float,
) -> list[Strategy]:
    """The strategies of a contraction.

    Args:
        operator: the operator.
        fabric: costs.
        operands: a label for each dimension of each operand. An operand that is added to the output may have fewer
            labels; "" is a dimension that is never split.
        output: the labels of the output.
        splittable: the labels that may be split.
        work: multiplications and additions of the forward, for the whole tensors.
    """
    found = [_split(operator, fabric, operands, output, None, None, work)]
    for label in splittable:
        dims = [
            (item.shape, labels.index(label), item.batch)
            for item, labels in zip(operator.operands, operands, strict=True)
            if label in labels
        ]
        if label in output:
            dims.append((operator.shape, output.index(label), operator.batch))
        if not dims or not all(fabric.splits(*dim) for dim in dims):
            continue
        found.append(_split(operator, fabric, operands, output, label, None, work))
        if label not in output:
            for dim, other in enumerate(output):
                if other in splittable and fabric.splits(operator.shape, dim, operator.batch):
                    found.append(_split(operator, fabric, operands, output, label, dim, work))
    return found


def _split(
    operator: Operator,
    fabric: Fabric,
    operands: Sequence[Labels],
    output: Labels,
    label: str | None,
    scatter: int | None,
    work: float,
) -> Strategy:
    seconds = 3 * work / fabric.topology.flops / (fabric.data if operator.batch is not None else 1)
    if label is None:
        return Strategy(output=None, wants=(WHOLE,) * len(operands), seconds=seconds)
    summed = label not in output
    wants = []
    for labels in operands:
        if label in labels:
            wants.append(Want(state=labels.index(label)))
        elif summed:
            # A bias is added after the reduction; if the output is scattered, the bias is split in the same way.
            aligned = None if scatter is None else scatter - (len(output) - len(labels))
            has = aligned is not None and aligned >= 0 and labels[aligned] == output[scatter or 0]
            wants.append(Want(state=aligned) if has else Want(partial=scatter is not None))
        else:
            wants.append(Want(partial=True))
    size = fabric.local(operator)
    charges: tuple[CollectiveCost, ...] = ()
    if not summed:
        state: int | None = output.index(label)
    elif scatter is None:
        charges = fabric.all_reduce(MODEL, size, "activations")
        state = None
    else:
        # In the backward the gradient is gathered.
        charges = (
            *fabric.reduce_scatter(MODEL, size, "activations"),
            *fabric.all_gather(MODEL, size, "activations"),
        )
        state = scatter
    return Strategy(
        output=state,
        wants=tuple(wants),
        charges=charges,
        seconds=seconds / fabric.model,
        scatters=scatter is not None,
    )


def volume(sizes: Mapping[str, int]) -> float:
    """Multiplications and additions of a contraction over labels of these sizes."""
    return 2.0 * math.prod(sizes.values())


def attention(operator: Operator, fabric: Fabric) -> list[Strategy] | None:
    """Operands: query, key and value of shape (..., heads, tokens, depth), and possibly a mask that broadcasts."""
    query, key, value, *mask = operator.operands
    if not len(query.shape) == len(key.shape) == len(value.shape) >= 3:
        return None
    lead = list(string.ascii_lowercase[: len(query.shape) - 2])
    # With grouped queries there are fewer key heads, so heads are not split.
    grouped = query.shape[-3] != key.shape[-3]
    kept = [label for label, size in zip(lead, query.shape, strict=False) if size > 1]
    kept = kept[:-1] if grouped else kept
    masks = []
    for item in mask:
        offset = len(query.shape) - len(item.shape)
        own = [*lead, "Q", "T"][max(offset, 0) :]
        masks.append(["" if size == 1 else label for label, size in zip(own, item.shape, strict=True)])
    sizes = dict(zip([*lead, "Q", "D"], query.shape, strict=True)) | {"T": key.shape[-2]}
    found = contraction(
        operator,
        fabric,
        operands=[[*lead, "Q", "D"], [*lead, "T", "D"], [*lead, "T", "V"], *masks],
        output=[*lead, "Q", "V"],
        splittable=[*kept, "Q"],
        work=2 * volume(sizes),
    )
    # Without a fused kernel the attention weights (queries x keys) are kept.
    scores = fabric.local(operator) / operator.shape[-1] * key.shape[-2]
    return [replace(item, keeps=scores / (1 if item.output is None else fabric.model)) for item in found]


def convolution(operator: Operator, fabric: Fabric) -> list[Strategy] | None:
    """Operands: (batch, in, pixels...), (out, in, kernel...), possibly a bias. None for groups, or without a batch."""
    x, weight, *bias = operator.operands
    if len(x.shape) != len(weight.shape) or operator.argument(6, "groups", 1) not in (1, None):
        return None
    pixels = [""] * (len(x.shape) - 2)
    return contraction(
        operator,
        fabric,
        operands=[["B", "C", *pixels], ["O", "C", *pixels], *([["O", *pixels]] if bias else [])],
        output=["B", "O", *pixels],
        splittable=["B", "O", "C"],
        work=2.0 * math.prod(operator.shape) * math.prod(weight.shape[1:]),
    )


def embedding(operator: Operator, fabric: Fabric) -> list[Strategy]:
    """Operands: a table (V, H), and ids of any shape."""
    ids = operator.operands[1]
    lead = list(string.ascii_lowercase[: len(ids.shape)])
    return contraction(
        operator,
        fabric,
        operands=[["V", "H"], lead],
        output=[*lead, "H"],
        splittable=[*lead, "V", "H"],
        # A lookup is bound by memory traffic; no products are computed.
        work=operator.size / fabric.topology.memory_bandwidth * fabric.topology.flops,
    )


def linear(operator: Operator, fabric: Fabric) -> list[Strategy]:
    """`x @ weight.T + bias`."""
    x, weight = operator.operands[:2]
    lead = list(string.ascii_lowercase[: len(x.shape) - 1])
    labels = [[*lead, "K"], ["N", "K"], ["N"]][: len(operator.operands)]
    sizes = dict(zip([*lead, "K"], x.shape, strict=True)) | {"N": weight.shape[0]}
    return contraction(
        operator, fabric, operands=labels, output=[*lead, "N"], splittable=[*lead, "N", "K"], work=volume(sizes)
    )


def addmm(operator: Operator, fabric: Fabric) -> list[Strategy]:
    """`bias + a @ b`, batched or not; without the bias for `mm` and `bmm`."""
    bias, (left, right) = operator.operands[:-2], operator.operands[-2:]
    lead = ["E"] if len(left.shape) == 3 else []
    output = [*lead, "M", "N"]
    sizes = dict(zip([*lead, "M", "K"], left.shape, strict=True)) | {"N": right.shape[-1]}
    labels = [_broadcast_labels(item, output, operator) for item in bias]
    return contraction(
        operator,
        fabric,
        operands=[*labels, [*lead, "M", "K"], [*lead, "K", "N"]],
        output=output,
        splittable=[*lead, "M", "N", "K"],
        work=volume(sizes),
    )


def matmul(operator: Operator, fabric: Fabric) -> list[Strategy] | None:
    """`a @ b` of any ranks; None if one of them is a vector."""
    left, right = operator.operands
    if len(left.shape) < 2 or len(right.shape) < 2:
        return None
    rank = max(len(left.shape), len(right.shape))
    lead = list(string.ascii_lowercase[: rank - 2])
    output = [*lead, "M", "N"]
    labels = []
    for item, last in ((left, ("M", "K")), (right, ("K", "N"))):
        own = lead[rank - len(item.shape) :]
        # A dimension of size 1 is broadcast and cannot be split.
        own = ["" if size == 1 else label for label, size in zip(own, item.shape, strict=False)]
        labels.append([*own, *last])
    sizes = dict(zip(output, operator.shape, strict=True)) | {"K": left.shape[-1]}
    return contraction(operator, fabric, operands=labels, output=output, splittable=[*output, "K"], work=volume(sizes))


def grouped_mm(operator: Operator, fabric: Fabric) -> list[Strategy] | None:
    """Tokens sorted by expert, each with its expert's matrix: (T, K), (E, K, N) -> (T, N).

    The experts may be split: each device computes the tokens of its experts, and the outputs are all-reduced. Tokens
    may not be split, because the number of tokens per expert depends on values.
    """
    if len(operator.operands) < 2 or [len(item.shape) for item in operator.operands[:2]] != [2, 3]:
        return None
    tokens, weight = operator.operands[:2]
    sizes = {"T": tokens.shape[0], "K": tokens.shape[1], "N": weight.shape[2]}
    rest: list[list[str]] = [[] for _ in operator.operands[2:]]
    return contraction(
        operator,
        fabric,
        operands=[["T", "K"], ["E", "K", "N"], *rest],
        output=["T", "N"],
        splittable=["N", "K", "E"],
        work=volume(sizes),
    )


def _broadcast_labels(item: Operand, output: list[str], operator: Operator) -> list[str]:
    own = output[len(output) - len(item.shape) :]
    offset = len(output) - len(item.shape)
    return [
        label if size == operator.shape[offset + dim] else ""
        for dim, (label, size) in enumerate(zip(own, item.shape, strict=True))
    ]


def layer_norm(operator: Operator, fabric: Fabric) -> list[Strategy]:
    """`layer_norm` and `rms_norm`, over any number of trailing dimensions.

    If a normalised dimension is split, sums per row are all-reduced: twice in the forward, twice in the backward.
    """
    shape = operator.argument(1, "normalized_shape")
    first = len(operator.shape) - (len(shape) if isinstance(shape, (list, tuple)) else 1)
    rows = fabric.local(operator) / max(1, math.prod(operator.shape[first:]))
    found = []
    for state in fabric.states(operator):
        inside = state is not None and state >= first
        charges = tuple(charge for _ in range(4) for charge in fabric.sum_up(rows)) if inside else ()
        wants = [Want(state=state)]
        for _ in operator.operands[1:]:
            wants.append(_weight(state, state - first if state is not None and inside else None))
        found.append(Strategy(output=state, wants=tuple(wants), charges=charges, seconds=fabric.touch(operator, state)))
    return found


def batch_norm(operator: Operator, fabric: Fabric) -> list[Strategy]:
    """`batch_norm`: the statistics of each channel are all-reduced over all axes that the batch is split over."""
    channels = 2 * operator.shape[1] * 4.0
    found = []
    for state in fabric.states(operator):
        if state not in (None, operator.batch, 1):
            continue
        size = channels / (fabric.model if state == 1 else 1)
        charges: list[CollectiveCost] = []
        for _ in range(2):
            charges += fabric.all_reduce(DATA, size, "statistics")
            if state is not None and state != 1:
                charges += fabric.sum_up(size, "statistics")
        wants = [Want(state=state)]
        wants += [_weight(state, 0 if state == 1 else None) for _ in operator.operands[1:]]
        found.append(
            Strategy(output=state, wants=tuple(wants), charges=tuple(charges), seconds=fabric.touch(operator, state))
        )
    return found


def group_norm(operator: Operator, fabric: Fabric) -> list[Strategy]:
    """`group_norm`: whole groups of channels, or the batch, may be split."""
    groups = operator.argument(1, "num_groups", 1)
    found = []
    for state in fabric.states(operator):
        if state in (None, operator.batch) or (state == 1 and groups % fabric.model == 0):
            wants = [Want(state=state)]
            wants += [_weight(state, 0 if state == 1 else None) for _ in operator.operands[1:]]
            found.append(Strategy(output=state, wants=tuple(wants), seconds=fabric.touch(operator, state)))
    return found


def _weight(state: State, dim: int | None) -> Want:
    """The layout of a weight if the input is in `state`; `dim` is the weight's dimension that is split with it."""
    if state is None:
        return WHOLE
    return Want(partial=True) if dim is None else Want(state=dim)


def pointwise(operator: Operator, fabric: Fabric) -> list[Strategy]:
    """Element-wise: each operand is split as the output; one that is broadcast along the split dimension is whole."""
    found = []
    for state in fabric.states(operator):
        wants = []
        for item in operator.operands:
            dim = None if state is None else state - (len(operator.shape) - len(item.shape))
            if state is None or item.free:
                wants.append(WHOLE)
            elif dim is None or dim < 0 or item.shape[dim] != operator.shape[state]:
                wants.append(Want(partial=True))
            else:
                wants.append(Want(state=dim))
        found.append(Strategy(output=state, wants=tuple(wants), seconds=fabric.touch(operator, state)))
    return found


def rows(operator: Operator, fabric: Fabric) -> list[Strategy] | None:
    """`index`, `index_select`, `gather`, `topk`, `sort`: elements are selected or sorted along one dimension.

    The selection depends on values, so only other dimensions may be split. If it is along the batch (tokens of
    experts), every device needs the whole batch. None for forms without a rule.
    """
    item, *others = operator.operands
    if any(not other.free for other in others):
        return None
    if operator.target == "index":
        indices = operator.argument(1, "indices")
        if not isinstance(indices, (list, tuple)) or len(indices) != 1:
            return None
        picked, shift = 0, len(operator.shape) - len(item.shape)
    else:
        dim = operator.argument(2 if operator.target == "topk" else 1, "dim", -1)
        if not isinstance(dim, int):
            return None
        picked, shift = dim % max(1, len(item.shape)), 0
    found = []
    for state in fabric.states(item):
        if state == picked or (state is not None and item.shape[state] != operator.shape[state + shift]):
            continue
        charges: tuple[CollectiveCost, ...] = ()
        if picked == item.batch:
            size = item.size / (1 if state is None else fabric.model)
            charges = (
                *fabric.all_gather(DATA, size, "activations"),
                *fabric.reduce_scatter(DATA, size, "activations"),
            )
        output = None if state is None else state + shift
        wants = (Want(state=state), *(WHOLE,) * len(others))
        found.append(Strategy(output=output, wants=wants, charges=charges, seconds=fabric.touch(operator, output)))
    return found


def rearranged(operator: Operator, fabric: Fabric) -> list[Strategy]:
    """`cat`, `split`, `index_select` and the like, of tensors of the output's rank.

    If the split dimension changes its size, shards of input and output do not match. Forward and backward, GSPMD shifts
    shards between neighbours with collective-permutes, and then exchanges the rest. (Measured with the three parts of
    GPT-2's fused projection on 2, 4 and 8 devices.)
    """
    found = []
    for state in fabric.states(operator):
        tensors = [item for item in operator.operands if not item.free]
        if any(len(item.shape) != len(operator.shape) for item in tensors) and state is not None:
            continue
        wants: list[Want] = []
        charges: list[CollectiveCost] = []
        valid = True
        for item in operator.operands:
            if state is None or item.free:
                wants.append(WHOLE)
                continue
            valid = valid and fabric.splits(item.shape, state, item.batch)
            wants.append(Want(state=state))
            if item.shape[state] != operator.shape[state]:
                size = min(fabric.local(item), fabric.local(operator))
                sizes = sorted((item.shape[state], operator.shape[state]))
                hops = fabric.model * sizes[0] / sizes[1]
                for _ in range(2):
                    charges += [times(charge, hops) for charge in fabric.permute(MODEL, size, "activations")]
                    charges += fabric.all_to_all(MODEL, size, "activations")
        if valid:
            seconds = fabric.touch(operator, state)
            found.append(Strategy(output=state, wants=tuple(wants), charges=tuple(charges), seconds=seconds))
    return found


def reduction(operator: Operator, fabric: Fabric) -> list[Strategy]:
    """`sum`, `mean`, `var`, `amax` and the like; if a reduced dimension is split, the results are all-reduced."""
    item = operator.operands[0]
    rank = len(item.shape)
    dims = operator.argument(1, "dim")
    gone = _dims(dims, rank)
    keep = len(operator.shape) == rank
    found = []
    for state in fabric.states(item):
        others = (WHOLE,) * (len(operator.operands) - 1)
        if state is None or state in gone:
            charges: tuple[CollectiveCost, ...] = () if state is None else fabric.sum_up(fabric.local(operator))
            output = None
        else:
            charges = ()
            output = state if keep else state - sum(1 for dim in gone if dim < state)
        seconds = 3 * fabric.local(item, state) / fabric.topology.memory_bandwidth
        found.append(Strategy(output=output, wants=(Want(state=state), *others), charges=charges, seconds=seconds))
    return found


def softmax(operator: Operator, fabric: Fabric) -> list[Strategy]:
    """`softmax`, `log_softmax`, `cumsum`; along a split dimension maximum and sum of each row are all-reduced."""
    dim = _dims(operator.argument(1, "dim", -1), len(operator.shape))[0]
    rows = fabric.local(operator) / max(1, operator.shape[dim])
    found = []
    for state in fabric.states(operator):
        charges = tuple(charge for _ in range(3) for charge in fabric.sum_up(rows)) if state == dim else ()
        wants = tuple(Want(state=state) if not item.free else WHOLE for item in operator.operands)
        found.append(Strategy(output=state, wants=wants, charges=charges, seconds=fabric.touch(operator, state)))
    return found


def cross_entropy(operator: Operator, fabric: Fabric) -> list[Strategy]:
    """Logits (rows..., classes) or (rows, classes, pixels...) to one number.

    With split classes (the vocabulary-parallel loss of Megatron-LM) the largest logit, the sum and the logit of the
    label are exchanged for each row.
    """
    logits, *others = operator.operands
    if not logits.shape:
        return [whole(operator, fabric)]
    classes = min(1, len(logits.shape) - 1)
    rows = fabric.local(logits) / max(1, logits.shape[classes])
    found = []
    for state in fabric.states(logits):
        charges: tuple[CollectiveCost, ...] = ()
        if state == classes:
            charges = tuple(charge for _ in range(3) for charge in fabric.sum_up(rows))
        elif state is not None:
            charges = fabric.sum_up(operator.size)
        seconds = 3 * fabric.local(logits, state) / fabric.topology.memory_bandwidth
        wants = (Want(state=state), *(Want(partial=state is not None and not item.free) for item in others))
        # The gradient of the logits is made while they are there: for the product before them.
        kept = fabric.local(logits, state) / (2 if fabric.topology.rounds_products else 1)
        found.append(Strategy(output=None, wants=wants, charges=charges, seconds=seconds, keeps=kept))
    return found


def pooling(operator: Operator, fabric: Fabric) -> list[Strategy]:
    """Pooling: the batch and the channels may be split."""
    item = operator.operands[0]
    pixels = {dim for dim in range(len(item.shape)) if dim > len(item.shape) - 3}
    return [
        Strategy(output=state, wants=(Want(state=state),), seconds=fabric.touch(operator, state))
        for state in fabric.states(operator)
        if state not in pixels
    ]


def _dims(dims: object, rank: int) -> tuple[int, ...]:
    if isinstance(dims, int):
        return (dims % max(rank, 1),)
    if isinstance(dims, Sequence) and dims and all(isinstance(dim, int) for dim in dims):
        return tuple(dim % max(rank, 1) for dim in dims)
    return tuple(range(math.trunc(rank)))


_Rule = Callable[[Operator, Fabric], list[Strategy] | None]

_RULES: dict[str, _Rule] = {
    "linear": linear,
    **dict.fromkeys(("addmm", "mm", "bmm", "baddbmm"), addmm),
    "matmul": matmul,
    **dict.fromkeys(("grouped_mm_fallback", "_grouped_mm"), grouped_mm),
    "scaled_dot_product_attention": attention,
    "embedding": embedding,
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), convolution),
    **dict.fromkeys(("layer_norm", "rms_norm"), layer_norm),
    "batch_norm": batch_norm,
    "group_norm": group_norm,
    **dict.fromkeys(("mean", "sum", "var", "std", "amax", "amin", "logsumexp", "prod"), reduction),
    **dict.fromkeys(("softmax", "log_softmax", "cumsum"), softmax),
    **dict.fromkeys(("cross_entropy_loss", "nll_loss", "nll_loss_nd"), cross_entropy),
    **dict.fromkeys(("mse_loss", "l1_loss", "smooth_l1_loss", "binary_cross_entropy_with_logits"), cross_entropy),
    **dict.fromkeys(
        ("max_pool1d", "max_pool2d", "avg_pool1d", "avg_pool2d", "adaptive_avg_pool1d", "adaptive_avg_pool2d"),
        pooling,
    ),
    **dict.fromkeys(("cat", "split", "concat"), rearranged),
    **dict.fromkeys(("index", "index_select", "gather", "topk", "sort"), rows),
}


def strategies_of(operator: Operator, fabric: Fabric) -> tuple[list[Strategy], bool]:
    """All ways to run an operator, and whether there is a rule for it.

    Where there is none, everything it takes and gives is whole on the model axis: always valid, never wrong.
    """
    rule = _RULES.get(operator.target) if operator.namespace in ("aten", "transformers") else None
    if rule is None and operator.pointwise:
        rule = pointwise
    found = rule(operator, fabric) if rule is not None else None
    if found is None:
        return [whole(operator, fabric)], False
    return found, True
