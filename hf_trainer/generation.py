"""Generation: transformers' loop on the host, one compiled graph per token on the device."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from transformers.utils.generic import ModelOutput

from hf_trainer.framework_patches import as_if_compiling
from xla_adapters import StepProgram, get_backend
from xla_adapters.discarding import Discarding
from xla_adapters.modes import eager
from xla_adapters.transfers import to_host_in_one_transfer, uploading


@contextmanager
def compiled_forward(model: torch.nn.Module, program: StepProgram, *, results_on_host: bool) -> Iterator[None]:
    """Each call of the model inside the context is one compiled graph, executed once.

    Inputs may be on the host: they are uploaded. A call inside an open step becomes part of that step.

    Args:
        model: its `forward` is replaced on the instance, and put back at the exit.
        program: runs and explains the graphs.
        results_on_host: copy loss and logits to the host, in one transfer.
    """
    forward: Callable[..., Any] = model.forward
    had_own_forward = "forward" in vars(model)

    @functools.wraps(forward)
    def compiled(*args: Any, **kwargs: Any) -> Any:
        if program.is_open:
            return forward(*args, **kwargs)
        with uploading():
            args, kwargs = _upload(args), _upload(kwargs)
        phase, cache = _phase(model, kwargs)
        with Discarding(program):
            program.open(inputs=_tensors_only(kwargs), phase=phase, facts={"cache": cache})
            with torch.no_grad(), as_if_compiling():
                results = forward(*args, **kwargs)
            program.close()
        return _loss_and_logits_on_host(results) if results_on_host else results

    model.forward = compiled
    try:
        yield
    finally:
        if had_own_forward:
            model.forward = forward
        else:
            del model.forward


def generate(model: Any, inputs: torch.Tensor | None = None, *, program: StepProgram, **kwargs: Any) -> Any:
    """`model.generate`, every strategy of it, with the model on an XLA device.

    Token bookkeeping (growing sequences, beams, stopping) stays on the host, where it costs no
    compile; the model runs with a static key-value cache, so each token is the same graph. Per token:
    one execution and two transfers, the logits and the cache's length; beams reorder the cache on the
    device and cost a few more.

    Args:
        model: a transformers model on the device.
        inputs: as for `model.generate`; tensors may be on the host or the device.
        program: runs and explains the graphs.
        kwargs: as for `model.generate`.

    Returns:
        As `model.generate`, on the host.
    """
    inputs, kwargs = to_host_in_one_transfer((inputs, kwargs))
    config = kwargs.get("generation_config") or model.generation_config
    chosen = kwargs.get("cache_implementation") or config.cache_implementation or kwargs.get("past_key_values")
    if chosen is None and kwargs.get("use_cache", config.use_cache) is not False:
        kwargs["cache_implementation"] = "static"
    with ExitStack() as stack:
        # Outside the model's own graph nothing is executed operation by operation.
        stack.enter_context(eager(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(warnings.catch_warnings())
        # The inputs are on the host on purpose.
        warnings.filterwarnings("ignore", message=r"You are calling \.generate\(\) with the `input_ids`")
        stack.enter_context(compiled_forward(model, program, results_on_host=True))
        if model.config.is_encoder_decoder:
            encoder = model.get_encoder()
            stack.enter_context(compiled_forward(encoder, program, results_on_host=False))
        generated = model.generate(inputs, **kwargs)
    return to_host_in_one_transfer(generated) if not isinstance(generated, torch.Tensor) else _to_host(generated)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = to_host_in_one_transfer(tensor)
    return result


def _upload(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(get_backend().device())
    if type(value) is dict:
        return {key: _upload(item) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_upload(item) for item in value)
    return value


def _phase(model: torch.nn.Module, inputs: Mapping[str, Any]) -> tuple[str, str]:
    """What this call of the model is, and the state of its cache: both shape the graph."""
    cache = inputs.get("past_key_values")
    name = type(model).__name__
    if cache is None:
        return f"{name} without cache", "none"
    # An encoder-decoder cache is two; the decoder's own is the one that fills up.
    cache = getattr(cache, "self_attention_cache", cache)
    if getattr(cache, "is_initialized", True):
        return f"{name}, next tokens", "filled"
    return f"{name}, first tokens", "empty"


def _tensors_only(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}


def _loss_and_logits_on_host(results: Any) -> Any:
    if isinstance(results, ModelOutput):
        on_device = {name: results[name] for name in ("loss", "logits") if results.get(name) is not None}
        for name, value in to_host_in_one_transfer(on_device).items():
            results[name] = value
        return results
    return to_host_in_one_transfer(results)
