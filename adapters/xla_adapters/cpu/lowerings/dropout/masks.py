"""The HLO computation that draws a dropout mask: Threefry-2x32 with 20 rounds, one word per element.

Source: Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy as 1, 2, 3 (SC 2011); XLA and JAX use it, too.
The counter is (position of the element, number of the mask); the first word of the result is the random number.
"""

from __future__ import annotations

import functools
import math

from xla_adapters.hlo.builder import Arithmetic, ComputationBuilder, IdCounter, Sizes, program_shape, written_module
from xla_adapters.hlo.wire import PRED, U32, array_shape, tuple_shape

# Positions are 32-bit, so a mask must be smaller than this.
MOST_ELEMENTS = 1 << 32
_ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
_ROUNDS = 20
_PARITY = 0x1BD11BDA
# A mask's number to the next: a linear congruential generator of full period (Press et al.: Numerical Recipes, 2nd
# edition, 7.1). It needs two operations: XLA shares kernels of equal fusions only, and one operation is no fusion.
_FACTOR, _INCREMENT = 1664525, 1013904223


@functools.lru_cache(1024)
def mask_computation(sizes: Sizes, keep: float) -> bytes:
    """The computation of a mask.

    Its parameters are three u32 scalars: the two words of the key, and the number of the mask. It returns the mask
    (bool, True where an element is kept) and the number of the next mask. It is a call that XLA does not inline, so
    all masks of one shape and rate share a kernel.

    Args:
        sizes: shape of the mask; fewer than `MOST_ELEMENTS` elements.
        keep: the probability of True, exact to 2**-32.

    Returns:
        An encoded HloModuleProto.
    """
    numbers, word, mask = IdCounter(), array_shape(U32), array_shape(PRED, *sizes)
    given, result = [word, word, word], tuple_shape([mask, word])
    code = Arithmetic(numbers, given)
    first, second, own = code.parameters
    flat = (math.prod(sizes),)
    drawn = threefry(code, (first, second), code.iota(*flat), own, flat)
    threshold = min(round(keep * 2**32), 2**32 - 1)
    kept = code.reshape(code.less(drawn, code.constant(threshold, flat), flat), mask)
    following = code.apply(
        "add", (), code.apply("multiply", (), own, code.constant(_FACTOR)), code.constant(_INCREMENT)
    )
    identity, text = code.finish("mask", [kept, following], result)
    entry = ComputationBuilder((), numbers, ())
    root = entry.call((identity, result), [entry.parameter(position, shape) for position, shape in enumerate(given)])
    entry_identity = numbers.next()
    name, shape = f"dropout.{entry_identity}", program_shape(given, result)
    texts = [text, entry.computation(name, entry_identity, root, shape)]
    return written_module(texts, name, entry_identity, shape)


def threefry(code: Arithmetic, key: tuple[int, int], left: int, right: int, sizes: Sizes) -> int:
    """Appends Threefry-2x32; returns the id of the first result word per element.

    Args:
        code: the computation to append to.
        key: ids of the two words of the key (scalars).
        left: id of the first counter word, of shape `sizes`.
        right: id of the second counter word (a scalar).
        sizes: shape of the result.
    """
    parity = code.apply("xor", (), code.apply("xor", (), *key), code.constant(_PARITY))
    keys = [code.broadcast(word, sizes) for word in (*key, parity)]
    left = code.apply("add", sizes, left, keys[0])
    right = code.apply("add", sizes, code.broadcast(right, sizes), keys[1])
    for number in range(_ROUNDS):
        left = code.apply("add", sizes, left, right)
        by = _ROTATIONS[number % len(_ROTATIONS)]
        up = code.apply("shift-left", sizes, right, code.constant(by, sizes))
        down = code.apply("shift-right-logical", sizes, right, code.constant(32 - by, sizes))
        right = code.apply("xor", sizes, code.apply("or", sizes, up, down), left)
        if number % 4 == 3:
            injection = number // 4 + 1
            left = code.apply("add", sizes, left, keys[injection % 3])
            right = code.apply("add", sizes, right, keys[(injection + 1) % 3])
            right = code.apply("add", sizes, right, code.constant(injection, sizes))
    return left
