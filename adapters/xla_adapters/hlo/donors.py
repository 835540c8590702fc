"""`with_donors`: writes donations into the text of a StableHLO program.

Source: the argument attribute `jax.buffer_donor` is read by `xla/hlo/translate/mhlo_to_hlo/mlir_hlo_to_hlo.cc`.
"""

from __future__ import annotations

import re
from collections.abc import Collection

_DONOR = "jax.buffer_donor = true"


def with_donors(module: bytes, donated: Collection[int]) -> bytes:
    """The program, whose results may take the memory of some arguments.

    Args:
        module: text of an MLIR module whose function is `main`.
        donated: positions of arguments.
    """
    before, main, signature = module.decode().partition("func.func @main(")
    arguments, arrow, after = signature.partition(") -> ")
    assert main
    assert arrow
    for number in donated:
        arguments, found = re.subn(rf"(%arg{number}: tensor<[^>]*>)", rf"\1 {{{_DONOR}}}", arguments, count=1)
        assert found == 1, number
    return f"{before}{main}{arguments}{arrow}{after}".encode()
