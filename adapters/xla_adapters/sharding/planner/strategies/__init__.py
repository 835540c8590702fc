"""The strategies of each operator, by family."""

from __future__ import annotations

from collections.abc import Callable

from xla_adapters.sharding.planner.graph import Operator
from xla_adapters.sharding.planner.strategies.attention import attention
from xla_adapters.sharding.planner.strategies.base import Rules, Strategy, whole
from xla_adapters.sharding.planner.strategies.convolution import convolution
from xla_adapters.sharding.planner.strategies.embedding import embedding
from xla_adapters.sharding.planner.strategies.matmul import addmm, grouped_mm, linear, matmul
from xla_adapters.sharding.planner.strategies.normalisation import batch_norm, group_norm, layer_norm
from xla_adapters.sharding.planner.strategies.pointwise import pointwise, rearranged, rows
from xla_adapters.sharding.planner.strategies.reduction import cross_entropy, pooling, reduction, softmax

_Rule = Callable[[Operator, Rules], list[Strategy] | None]

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

__all__ = ["Rules", "Strategy", "strategies_of"]


def strategies_of(operator: Operator, rules: Rules) -> tuple[list[Strategy], bool]:
    """All ways to run an operator, and whether there is a rule for it.

    Where there is none, everything it takes and gives is whole on the model axis: always valid, never wrong.
    """
    rule = _RULES.get(operator.target) if operator.namespace in ("aten", "transformers") else None
    if rule is None and operator.pointwise:
        rule = pointwise
    found = rule(operator, rules) if rule is not None else None
    if found is None:
        return [whole(operator, rules)], False
    return found, True
