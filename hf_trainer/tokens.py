"""Counts input tokens on the host, where the batch is before the step takes it to the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def count_input_tokens(inputs: Mapping[str, Any], model: Any, processing_class: Any, kind: str) -> int:
    """The tokens of a batch, as `include_num_input_tokens_seen` counts them.

    Args:
        inputs: the batch, its tensors on the host.
        model: its `main_input_name` says which input to count.
        processing_class: its `pad_token_id` tells padding if there is no attention mask.
        kind: `"all"` or `"non_padding"`.
    """
    main = inputs.get(getattr(model, "main_input_name", "input_ids"))
    if main is None:
        return 0
    if kind == "non_padding":
        mask = inputs.get("attention_mask")
        if mask is not None:
            return int(mask.sum())
        pad = getattr(processing_class, "pad_token_id", None)
        if pad is not None:
            return int((main != pad).sum())
    return int(main.numel())
