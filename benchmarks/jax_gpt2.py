"""GPT-2 in pure JAX, with the same model, loss, clipping and AdamW as `benchmarks.sizes` in torch.

Import it only in a child process: JAX starts threads, and a process with threads must not be forked.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from torch import nn

from benchmarks.harness import Clock, Pause, Plan, Timing
from benchmarks.sizes import Size
from benchmarks.training import LEARNING_RATE, MAX_NORM

_BETAS, _EPSILON = (0.9, 0.999), 1e-8
Params = dict[str, jax.Array]


def parameters(model: nn.Module) -> Params:
    """The weights of transformers' model, by their names there."""
    return {name: jnp.asarray(value.detach().numpy()) for name, value in model.named_parameters()}


def _norm(params: Params, name: str, x: jax.Array) -> jax.Array:
    mean = x.mean(-1, keepdims=True)
    variance = jnp.square(x - mean).mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * params[f"{name}.weight"] + params[f"{name}.bias"]


def _linear(params: Params, name: str, x: jax.Array) -> jax.Array:
    return x @ params[f"{name}.weight"] + params[f"{name}.bias"]


def _drop(x: jax.Array, rate: float, key: jax.Array) -> jax.Array:
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0.0) if rate else x


def _attention(params: Params, name: str, x: jax.Array, size: Size, keys: Sequence[jax.Array]) -> jax.Array:
    batch, length, width = x.shape
    query, key, value = (
        part.reshape(batch, length, size.heads, -1).swapaxes(1, 2)
        for part in jnp.split(_linear(params, f"{name}.c_attn", x), 3, axis=-1)
    )
    scores = query @ key.swapaxes(-1, -2) / np.sqrt(width // size.heads).astype(np.float32)
    causal = jnp.tril(jnp.ones((length, length), bool))
    weights = _drop(jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1), size.dropout, keys[0])
    mixed = (weights @ value).swapaxes(1, 2).reshape(batch, length, width)
    return _drop(_linear(params, f"{name}.c_proj", mixed), size.dropout, keys[1])


def loss_of(params: Params, tokens: jax.Array, labels: jax.Array, key: jax.Array, size: Size) -> jax.Array:
    """The mean loss of the next token."""
    keys = iter(jax.random.split(key, 1 + 3 * size.layers))
    x = params["transformer.wte.weight"][tokens] + params["transformer.wpe.weight"][: tokens.shape[1]]
    x = _drop(x, size.dropout, next(keys))
    for layer in range(size.layers):
        name = f"transformer.h.{layer}"
        x += _attention(params, f"{name}.attn", _norm(params, f"{name}.ln_1", x), size, (next(keys), next(keys)))
        hidden = jax.nn.gelu(_linear(params, f"{name}.mlp.c_fc", _norm(params, f"{name}.ln_2", x)))
        x += _drop(_linear(params, f"{name}.mlp.c_proj", hidden), size.dropout, next(keys))
    logits = _norm(params, "transformer.ln_f", x) @ params["transformer.wte.weight"].T
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), labels[:, 1:, None], axis=-1)
    return -chosen.mean()


@functools.partial(jax.jit, static_argnames="size", donate_argnums=0)
def train_step(state: Any, tokens: jax.Array, labels: jax.Array, size: Size) -> tuple[Any, jax.Array]:
    """One step of clipped AdamW; the state is given up."""
    params, first, second, count, key = state
    key, own = jax.random.split(key)
    loss, grads = jax.value_and_grad(loss_of)(params, tokens, labels, own, size)
    norm = jnp.sqrt(sum(jnp.square(grad).sum() for grad in jax.tree.leaves(grads)))
    grads = jax.tree.map(lambda grad: grad * jnp.minimum(1.0, MAX_NORM / (norm + 1e-6)), grads)
    count += 1
    first = jax.tree.map(lambda old, grad: _BETAS[0] * old + (1 - _BETAS[0]) * grad, first, grads)
    second = jax.tree.map(lambda old, grad: _BETAS[1] * old + (1 - _BETAS[1]) * grad * grad, second, grads)
    rate = LEARNING_RATE / (1 - _BETAS[0] ** count)
    scale = jnp.sqrt(1 - _BETAS[1] ** count)
    params = jax.tree.map(
        lambda old, one, two: old - rate * one / (jnp.sqrt(two) / scale + _EPSILON), params, first, second
    )
    return (params, first, second, count, key), loss


def first_state(model: nn.Module) -> Any:
    """Parameters, the two moments, the number of steps, the random key."""
    params = parameters(model)
    zeros = (jax.tree.map(jnp.zeros_like, params) for _ in range(2))
    return (params, *zeros, jnp.zeros((), jnp.float32), jax.random.key(0))


def run(size: Size, plan: Plan, pause: Pause) -> Timing:
    """Trains; runs in a child."""
    state = first_state(size.model())
    clock = Clock(plan, pause, lambda: jax.block_until_ready(state), xla=False)
    losses: list[jax.Array] = []
    for batch in size.batches(plan.total):
        tokens, labels = (jax.device_put(batch[name].numpy().astype(np.int32)) for name in ("input_ids", "labels"))
        state, loss = train_step(state, tokens, labels, size)
        losses.append(loss)
        clock.step_done()
    return clock.timing([float(loss) for loss in losses])
