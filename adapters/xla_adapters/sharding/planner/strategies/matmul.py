"""Strategies of matrix products: `linear`, `matmul`, `mm`, `bmm`, `addmm`, `baddbmm`, and grouped ones of experts."""

from __future__ import annotations

import string

from xla_adapters.sharding.planner.graph import Operand, Operator
from xla_adapters.sharding.planner.strategies.base import Rules, Strategy
from xla_adapters.sharding.planner.strategies.contraction import contraction, volume


def linear(operator: Operator, rules: Rules) -> list[Strategy]:
    """`x @ weight.T + bias`."""
    x, weight = operator.operands[:2]
    lead = list(string.ascii_lowercase[: len(x.shape) - 1])
    labels = [[*lead, "K"], ["N", "K"], ["N"]][: len(operator.operands)]
    sizes = dict(zip([*lead, "K"], x.shape, strict=True)) | {"N": weight.shape[0]}
    return contraction(
        operator, rules, operands=labels, output=[*lead, "N"], splittable=[*lead, "N", "K"], work=volume(sizes)
    )


def addmm(operator: Operator, rules: Rules) -> list[Strategy]:
    """`bias + a @ b`, batched or not; without the bias for `mm` and `bmm`."""
    bias, (left, right) = operator.operands[:-2], operator.operands[-2:]
    lead = ["E"] if len(left.shape) == 3 else []
    output = [*lead, "M", "N"]
    sizes = dict(zip([*lead, "M", "K"], left.shape, strict=True)) | {"N": right.shape[-1]}
    labels = [_broadcast_labels(item, output, operator) for item in bias]
    return contraction(
        operator,
        rules,
        operands=[*labels, [*lead, "M", "K"], [*lead, "K", "N"]],
        output=output,
        splittable=[*lead, "M", "N", "K"],
        work=volume(sizes),
    )


def matmul(operator: Operator, rules: Rules) -> list[Strategy] | None:
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
    return contraction(operator, rules, operands=labels, output=output, splittable=[*output, "K"], work=volume(sizes))


def grouped_mm(operator: Operator, rules: Rules) -> list[Strategy] | None:
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
        rules,
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
