"""`keep_nan`: sets a flag of XLA's CPU compiler in `XLA_FLAGS`, which the runtime reads once as it starts."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import MutableMapping

_log = logging.getLogger("xla_adapters")

_VARIABLE = "XLA_FLAGS"
_LOSE_NAN = frozenset({"CPU"})
_FLAG = "--xla_cpu_enable_fast_min_max"


def keep_nan(hardware: str, *, started: bool, environment: MutableMapping[str, str] = os.environ) -> None:
    """Has the largest and smallest of values be NaN if one of them is, as in torch; for CPU devices.

    XLA:CPU takes such a value for none otherwise: in `amax`, `max`, max pooling and `scatter_reduce`. Logged at INFO on
    each call, since logging is usually not configured yet as a Trainer is imported. A flag that the user has set stays
    as it is.

    Args:
        hardware: of the process; other devices need no flag.
        started: whether the runtime runs already, so that the flag comes too late; warns.
        environment: the environment to change.
    """
    if hardware not in _LOSE_NAN:
        return
    flags = environment.get(_VARIABLE, "")
    if started and _FLAG not in flags:
        warnings.warn(
            "the XLA runtime had started before xla_adapters was initialized: on CPU devices the maxima and minima of "
            "values with NaN (amax, max, max pooling, scatter_reduce) leave the NaN out. Call "
            "xla_adapters.initialize() before torch_xla.device() and before a tensor is moved to the device, or start "
            f"Python with XLA_FLAGS={_FLAG}=false",
            UserWarning,
            stacklevel=2,
        )
        return
    if _FLAG not in flags:
        environment[_VARIABLE] = f"{flags} {_FLAG}=false".strip()
    _log.info(
        "XLA_FLAGS is %r: with %s=false the largest and smallest of values with NaN are NaN, as in torch. A flag of "
        "that name that is there already stays",
        environment[_VARIABLE],
        _FLAG,
    )
