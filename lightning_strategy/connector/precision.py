"""Which precision is in effect, and Lightning's plugin for it: dtypes and autocast, no environment variable."""

from __future__ import annotations

from typing import Any, Literal, get_args

from lightning.fabric import plugins as fabric_plugins
from lightning.fabric.connector import _convert_precision_to_unified_args
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision

from lightning_strategy.connector.flags import ConnectorFlags
from xla_adapters.errors import ConfigError, UnsupportedOptionError

XLAPrecisionFlag = Literal["32-true", "bf16-true", "bf16-mixed"]

_INSTEAD = {
    "16-mixed": "bf16-mixed",
    "16-true": "bf16-true",
    "64-true": "32-true",
    "transformer-engine": "bf16-mixed",
    "transformer-engine-float16": "bf16-mixed",
}
_WHY = {
    "16-mixed": "its gradient scaler reads gradients on the host at every step, and XLA devices compute in bfloat16",
    "16-true": "XLA devices compute in bfloat16, which has the range of float32",
    "64-true": "TPUs have no float64 units",
}


def unified_precision(flag: Any) -> str | None:
    """Lightning's canonical name of a precision flag (`"32-true"` for `32`); None for None.

    Raises:
        UnsupportedOptionError: Lightning has this precision, and XLA does not support it.
        ConfigError: there is no such precision.
    """
    if flag is None:
        return None
    valid = get_args(XLAPrecisionFlag)
    try:
        name = str(_convert_precision_to_unified_args(flag))
    except ValueError:
        listed = ", ".join(repr(value) for value in valid)
        raise ConfigError(f"precision={flag!r} is not a valid value; valid values: {listed}") from None
    if name not in valid:
        why = _WHY.get(name, "it needs CUDA kernels")
        raise UnsupportedOptionError(f"precision={flag!r}: {why}; use precision={_INSTEAD[name]!r}")
    return name


def choose_precision(own: str | None, flags: ConnectorFlags | None) -> str:
    """The precision in effect; `"32-true"` by default.

    Args:
        own: as given to the strategy, or None.
        flags: of the Trainer or Fabric that is being constructed, or None.

    Raises:
        ConfigError: they contradict each other, or are not valid.
        UnsupportedOptionError: XLA does not support the precision.
    """
    own = unified_precision(own)
    given = unified_precision(flags.precision) if flags is not None else None
    if own is not None and given is not None and own != given:
        raise ConfigError(
            f"precision was given twice and differently: {own!r} to the strategy and {given!r} beside it; give it once"
        )
    return own or given or "32-true"


def precision_plugin(precision: str, device_type: str) -> Precision:
    """The plugin of Lightning's Trainer for one of the three precisions."""
    if precision == "bf16-true":
        return HalfPrecision("bf16-true")
    if precision == "bf16-mixed":
        return MixedPrecision("bf16-mixed", device_type)
    return Precision()


def fabric_precision(precision: str, device_type: str) -> fabric_plugins.Precision:
    """The plugin of Fabric for one of the three precisions."""
    if precision == "bf16-true":
        return fabric_plugins.HalfPrecision("bf16-true")
    if precision == "bf16-mixed":
        return fabric_plugins.MixedPrecision("bf16-mixed", device_type)
    return fabric_plugins.Precision()


def check_plugin(plugin: Any, device_type: str) -> None:
    """Raises if the user's plugin cannot be part of a compiled step.

    Raises:
        UnsupportedOptionError: with the alternative.
    """
    if type(plugin) in (MixedPrecision, fabric_plugins.MixedPrecision) and plugin.device != device_type:
        raise UnsupportedOptionError(
            f"MixedPrecision(device={plugin.device!r}): autocast would be on for another device than the model's; use "
            "precision='bf16-mixed' instead of the plugin"
        )
    if getattr(plugin, "scaler", None) is not None or getattr(plugin, "precision", None) in ("16-mixed", "16-true"):
        raise UnsupportedOptionError(f"{type(plugin).__name__}: {_WHY['16-mixed']}; use precision='bf16-mixed'")
