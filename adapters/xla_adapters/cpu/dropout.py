"""`Dropout`: dropout on CPU devices, with masks that are cheap to draw and to compile.

torch_xla draws an integer per element, converts it to a float and compares. XLA:CPU computes both output words of
Threefry for each element and uses one. And the seed of the n-th draw of a step is a chain of n operations, so no two
dropout kernels are equal, and each is compiled: 40% of the compile time of a GPT-2 of 12 layers.

Here a mask is one HLO computation, Threefry-2x32 with 20 rounds, one word per element (Salmon, Moraes, Dror, Shaw:
Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011; XLA and JAX use it, too). The counter is (position of the element,
number of the mask); the first word of the result is the random number.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

from xla_adapters.hlo import protobuf
from xla_adapters.hlo.protobuf import (
    CALLED,
    COMPARISON_DIRECTION,
    COMPUTATION_ID,
    COMPUTATION_NAME,
    DIMENSIONS,
    FRONTEND_ATTRIBUTES,
    ID,
    INSTRUCTIONS,
    LITERAL,
    MODULE_COMPUTATIONS,
    MODULE_ENTRY,
    MODULE_ENTRY_NAME,
    MODULE_NAME,
    MODULE_PROGRAM_SHAPE,
    NAME,
    OPCODE,
    OPERANDS,
    PARAMETER_NUMBER,
    PRED,
    PROGRAM_SHAPE,
    ROOT,
    SHAPE,
    U32,
    array_shape,
    tuple_shape,
)
from xla_adapters.runtime.interface import Runtime

# Positions are 32-bit, so a mask must be smaller than this.
MOST_ELEMENTS = 1 << 32
_ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
_ROUNDS = 20
_PARITY = 0x1BD11BDA
# A mask's number to the next: a linear congruential generator of full period (Press et al.: Numerical Recipes, 2nd
# edition, 7.1). It needs two operations: XLA shares kernels of equal fusions only, and one operation is no fusion.
_FACTOR, _INCREMENT = 1664525, 1013904223
# Field numbers of ProgramShapeProto, and of LiteralProto (its shape, and values of u32).
_PARAMETERS, _RESULT, _PARAMETER_NAMES = 1, 2, 3
_LITERAL_SHAPE, _LITERAL_U32 = 1, 6
# Frontend attributes (a map of strings) of a call that XLA must not inline.
_NOT_INLINED = protobuf.message(
    FRONTEND_ATTRIBUTES, protobuf.message(1, protobuf.message(1, b"inlineable") + protobuf.message(2, b"false"))
)

Sizes = tuple[int, ...]
# Two words of the key, and the number of the mask: u32 scalars on the device.
_Name = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Dropout:
    """Dropout for the trace of one step; it holds the keys of the step's masks.

    Args:
        runtime: the runtime, with a CPU device and the Threefry algorithm.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._keys = MaskKeys(runtime)

    def lowerings(self) -> dict[Callable[..., Any], Callable[..., torch.Tensor]]:
        """The replacements, by torch function."""
        # Not stored on self: the reference cycle would keep tensors of the step alive, as outputs of its graph.
        return {
            functional.dropout: self._dropout,
            torch.dropout: self._plain_dropout,
            functional.scaled_dot_product_attention: self._attention,
        }

    def _dropout(
        self, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        """As `torch.nn.functional.dropout`."""
        if not training or not _is_drawn(p, input.shape) or not input.is_floating_point():
            return functional.dropout(input, p, training, inplace)
        kept, scale = self._keys.mask(tuple(input.shape), 1 - p), 1 / (1 - p)
        if inplace:
            return input.mul_(torch.where(kept, scale, 0.0).to(input.dtype))
        return torch.where(kept, input, 0.0) * scale

    def _plain_dropout(self, input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
        """As `torch.dropout`."""
        return self._dropout(input, p, train)

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """As `torch.nn.functional.scaled_dot_product_attention`, in the form that torch uses without a fused kernel."""
        # Only for float32: in lower precision torch drops weights before they are rounded, and autocast casts the
        # arguments, not intermediate values.
        is_single = query.dtype == key.dtype == value.dtype == torch.float32 and not torch.is_autocast_enabled("xla")
        if not (is_single and _is_drawn(dropout_p, query.shape) and key.numel()):
            return functional.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros((), device=query.device).masked_fill(~attn_mask, -math.inf)
        # The first result (attention without dropout) is unused, so XLA does not compute it.
        weights: torch.Tensor = torch.ops.aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, 0.0, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[1]
        if enable_gqa:
            value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
        return self._dropout(weights, dropout_p) @ value


def _is_drawn(p: float, sizes: tuple[int, ...]) -> bool:
    """Whether a mask must be drawn (0 < p < 1, not empty, not too large); torch raises for an invalid p."""
    return 0 < p < 1 and 0 < math.prod(sizes) < MOST_ELEMENTS


@dataclass
class MaskKeys:
    """Gives each dropout mask of one step its own random key, from one draw of the device's random stream.

    The first mask draws a key and a number from the device's stream; for the next ones the number is incremented. Masks
    are stored by the state of the stream, and each advances it. So a recomputation that resets the stream (activation
    checkpointing) gets the same mask, and after any other reset a new key is drawn.

    Args:
        runtime: the runtime.
    """

    runtime: Runtime
    # By state of the stream at the time of the draw.
    _names: dict[int, _Name] = field(default_factory=dict)

    def mask(self, sizes: tuple[int, ...], keep: float) -> torch.Tensor:
        """Draws a mask: a bool tensor on the device, True where an element is kept.

        Args:
            sizes: shape of the mask, see `mask_computation`.
            keep: the probability of True.
        """
        state = self.runtime.random.seed()
        name = self._names.get(state)
        if name is None:
            name = self._names[state] = self._drawn()
        else:
            # Advances the stream. The result is unused, so it is not part of the graph.
            torch.rand((), device=self.runtime.device.torch_device())
        mask, following = self.runtime.custom_kernels.call(mask_computation(sizes, keep), name)
        self._names.setdefault(self.runtime.random.seed(), (*name[:2], following))
        return mask

    def _drawn(self) -> _Name:
        words = torch.randint(0, 1 << 32, (3,), dtype=torch.int64, device=self.runtime.device.torch_device()).to(
            torch.uint32
        )
        return words[0], words[1], words[2]


# ---- the computation of a mask -----------------------------------------------------------------------


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
    word, mask = array_shape(U32), array_shape(PRED, *sizes)
    given, result = [word, word, word], tuple_shape([mask, word])
    code = Computation(given, first_id=1)
    first, second, own = code.parameters
    flat = (math.prod(sizes),)
    drawn = threefry(code, (first, second), code.iota(*flat), own, flat)
    threshold = min(round(keep * 2**32), 2**32 - 1)
    less = code.add(
        "compare",
        array_shape(PRED, *flat),
        (drawn, code.constant(threshold, flat)),
        protobuf.message(COMPARISON_DIRECTION, b"LT"),
    )
    kept = code.add("reshape", mask, (less,))
    following = code.apply(
        "add", (), code.apply("multiply", (), own, code.constant(_FACTOR)), code.constant(_INCREMENT)
    )
    called = code.written("mask", code.add("tuple", result, (kept, following)), result)
    entry = Computation(given, first_id=called.identity + 1)
    root = entry.add("call", result, entry.parameters, protobuf.numbers(CALLED, [called.identity]) + _NOT_INLINED)
    main = entry.written("dropout", root, result)
    return b"".join(
        (
            protobuf.message(MODULE_NAME, main.name),
            protobuf.message(MODULE_ENTRY_NAME, main.name),
            *(protobuf.message(MODULE_COMPUTATIONS, written.text) for written in (called, main)),
            protobuf.message(MODULE_PROGRAM_SHAPE, _program_shape(given, result)),
            protobuf.number(MODULE_ENTRY, main.identity),
        )
    )


def threefry(code: Computation, key: tuple[int, int], left: int, right: int, sizes: Sizes) -> int:
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


@dataclass(frozen=True)
class Written:
    """A computation as it stands in a module.

    Attributes:
        identity: its id, larger than those of its instructions.
        name: its name.
        text: the encoded HloComputationProto.
    """

    identity: int
    name: bytes
    text: bytes


class Computation:
    """Writes an HLO computation on arrays of u32, instruction by instruction; sums and products are modulo 2**32.

    Methods append an instruction and return its id. `sizes` are the dimensions of the result, () for a scalar.

    Args:
        given: the shapes of its parameters (ShapeProto).
        first_id: ids in a module are unique.

    Attributes:
        parameters: the instruction id of each parameter.
    """

    def __init__(self, given: Sequence[bytes], *, first_id: int) -> None:
        self._given = given
        self._next_id = first_id
        self._instructions: list[bytes] = []
        self.parameters = [
            self.add("parameter", shape, (), protobuf.number(PARAMETER_NUMBER, position))
            for position, shape in enumerate(given)
        ]

    def constant(self, value: int, sizes: Sizes = ()) -> int:
        """An array with `value` in each element."""
        literal = protobuf.message(_LITERAL_SHAPE, array_shape(U32)) + protobuf.numbers(_LITERAL_U32, [value])
        return self.broadcast(self.add("constant", array_shape(U32), (), protobuf.message(LITERAL, literal)), sizes)

    def broadcast(self, number: int, sizes: Sizes) -> int:
        """An array with the scalar of instruction `number` in each element."""
        return self.add("broadcast", array_shape(U32, *sizes), (number,)) if sizes else number

    def iota(self, size: int) -> int:
        """The vector 0, 1, ..., size - 1."""
        return self.add("iota", array_shape(U32, size), (), protobuf.numbers(DIMENSIONS, [0]))

    def apply(self, opcode: str, sizes: Sizes, *operands: int) -> int:
        """An element-wise operation, by its HLO opcode."""
        return self.add(opcode, array_shape(U32, *sizes), operands)

    def add(self, opcode: str, shape: bytes, operands: Sequence[int], rest: bytes = b"") -> int:
        """Any instruction.

        Args:
            opcode: HLO opcode.
            shape: of the result (ShapeProto).
            operands: ids of the operands.
            rest: further encoded fields of the HloInstructionProto.
        """
        identity = self._next_id
        self._next_id += 1
        self._instructions.append(
            b"".join(
                (
                    protobuf.message(NAME, f"{opcode}.{identity}".encode()),
                    protobuf.message(OPCODE, opcode.encode()),
                    protobuf.message(SHAPE, shape),
                    rest,
                    protobuf.number(ID, identity),
                    protobuf.numbers(OPERANDS, operands),
                )
            )
        )
        return identity

    def written(self, prefix: str, root: int, shape: bytes) -> Written:
        """The whole computation.

        Args:
            prefix: of its name; its id is appended.
            root: id of the instruction that has the result.
            shape: of the result (ShapeProto).
        """
        name = f"{prefix}.{self._next_id}".encode()
        text = b"".join(
            (
                protobuf.message(COMPUTATION_NAME, name),
                *(protobuf.message(INSTRUCTIONS, instruction) for instruction in self._instructions),
                protobuf.message(PROGRAM_SHAPE, _program_shape(self._given, shape)),
                protobuf.number(COMPUTATION_ID, self._next_id),
                protobuf.number(ROOT, root),
            )
        )
        return Written(self._next_id, name, text)


def _program_shape(given: Sequence[bytes], result: bytes) -> bytes:
    """The ProgramShapeProto of a computation with these parameter shapes and this result."""
    return b"".join(
        (
            *(protobuf.message(_PARAMETERS, shape) for shape in given),
            protobuf.message(_RESULT, result),
            *(protobuf.message(_PARAMETER_NAMES, f"p{number}".encode()) for number in range(len(given))),
        )
    )
