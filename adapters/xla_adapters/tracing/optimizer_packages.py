"""Optimizers that a step cannot trace, most of other packages. They are known by name: no package need be installed."""

from __future__ import annotations

from torch.optim import Optimizer

from xla_adapters.errors import UnsupportedOptionError

# By the first part of the module's name, as released in 2025.
_EAGER_CLASSES = {
    ("grokadamw", "GrokAdamW"): "it keeps its state on the host",
    ("optimi", "StableAdamW"): "it reads the size of every parameter's update on the host",
}
_UNSUPPORTED = {
    "bitsandbytes": "its kernels are for CUDA and the CPU, and write to their arguments, which no XLA device has",
    "torchao": "its state is of quantized tensors, whose update it compiles by torch.compile for CUDA and the CPU",
    "apollo_torch": "it draws its projections with a torch.Generator on the parameters' device, and XLA has none",
}
_UNSUPPORTED_CLASSES = {
    ("lomo_optim", "AdaLomo"): "it asks CUDA for its memory, whatever the parameters' device",
    ("torch", "SparseAdam"): "it takes sparse gradients only, and those of sparse=True are dense there",
}


def eager_reason_of(cls: type[Optimizer]) -> str | None:
    """Why optimizers of this class run eagerly; `None` if nothing is known of their package."""
    return next((_EAGER_CLASSES[name] for name in _names(cls) if name in _EAGER_CLASSES), None)


def check_supported(cls: type[Optimizer]) -> None:
    """Raises if optimizers of this class cannot update parameters on an XLA device.

    Raises:
        UnsupportedOptionError: with the alternatives.
    """
    for package, name in _names(cls):
        reason = _UNSUPPORTED.get(package) or _UNSUPPORTED_CLASSES.get((package, name))
        if reason is not None:
            raise UnsupportedOptionError(
                f"{name} of {package} cannot update parameters on an XLA device: {reason}. Use an optimizer of "
                "torch.optim; state takes less memory with transformers' Adafactor, and cut by sharding='fsdp'"
            )


def _names(cls: type) -> list[tuple[str, str]]:
    return [(base.__module__.partition(".")[0], base.__name__) for base in cls.__mro__]
