"""The computation that draws a mask: Threefry-2x32 with 20 rounds, a word for each element.

Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy as 1, 2, 3 (SC 2011), as XLA and JAX draw by it, too.
What is encrypted are the position of an element and the number of its mask; of what comes out the first word is drawn.
"""

from __future__ import annotations

import functools
import math

from xla_adapters.hlo_graph.arithmetic import Arithmetic, Sizes
from xla_adapters.hlo_graph.shapes import PRED, U32, array_shape, tuple_shape
from xla_adapters.hlo_graph.writing import Body, Numbers, program_shape, written_module

# Elements that have positions of their own.
MOST_ELEMENTS = 1 << 32
_ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
_ROUNDS = 20
_PARITY = 0x1BD11BDA
# From a number to the next: a generator of full period (Press et al.: Numerical Recipes, 2nd edition, 7.1). Two
# operations, since XLA shares the kernel of alike fusions, and compiles each single operation by itself.
_FACTOR, _INCREMENT = 1664525, 1013904223


@functools.lru_cache(1024)
def mask_computation(sizes: Sizes, keep: float) -> bytes:
    """What draws a mask, of the two words of a key and its number: True where an element is kept; and the next number.

    A call that XLA leaves as it is. So it compiles one kernel for all masks of a shape and rate: of numbers that are
    constants, or computed where the mask is, it would make one for each.

    Args:
        sizes: of the mask; fewer than `MOST_ELEMENTS` elements.
        keep: the probability of True, exact to 2**-32.

    Returns:
        An HloModuleProto.
    """
    numbers, word, mask = Numbers(), array_shape(U32), array_shape(PRED, *sizes)
    given, result = [word, word, word], tuple_shape([mask, word])
    code = Arithmetic(numbers, given)
    first, second, own = code.parameters
    flat = (math.prod(sizes),)
    drawn = threefry(code, (first, second), code.positions(*flat), own, flat)
    threshold = min(round(keep * 2**32), 2**32 - 1)
    kept = code.reshape(code.less(drawn, code.constant(threshold, flat), flat), mask)
    following = code.apply(
        "add", (), code.apply("multiply", (), own, code.constant(_FACTOR)), code.constant(_INCREMENT)
    )
    identity, text = code.finished("mask", [kept, following], result)
    entry = Body((), numbers, ())
    root = entry.call((identity, result), [entry.parameter(position, shape) for position, shape in enumerate(given)])
    entry_identity = numbers.next()
    name, shape = f"dropout.{entry_identity}", program_shape(given, result)
    texts = [text, entry.computation(name, entry_identity, root, shape)]
    return written_module(texts, name, entry_identity, shape)


def threefry(code: Arithmetic, key: tuple[int, int], left: int, right: int, sizes: Sizes) -> int:
    """The first word of each block that is encrypted.

    Args:
        code: where it is written.
        key: two single words.
        left: the first word of each block.
        right: the second one, the same in all.
        sizes: of the first word.
    """
    parity = code.apply("xor", (), code.apply("xor", (), *key), code.constant(_PARITY))
    keys = [code.spread(word, sizes) for word in (*key, parity)]
    left = code.apply("add", sizes, left, keys[0])
    right = code.apply("add", sizes, code.spread(right, sizes), keys[1])
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
