"""`Target`: a slice of TPUs to compile for, and the libtpu that compiles."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Literal

from xla_adapters.errors import ConfigError

_FORM = re.compile(r"(v4|v5e|v5p|v6e|tpu7x):(\d+(?:x\d+)*)")
# Generations whose links are a torus of three dimensions; those of the others have two.
_CUBES = ("v4", "v5p", "tpu7x")
# A chip of tpu7x is two devices.
_DEVICES_PER_CHIP = {"tpu7x": 2}
# torch_xla drives both cores of a v4 as one device (TPU_MEGACORE).
_OPTIONS = {"v4": {"chip_config_name": "megacore_dense"}}
INSTALL = 'pip install "xla-adapters[preflight]"'
INSTALL_FOR_TORCH_TPU = 'pip install "xla-adapters[preflight-torch-tpu]"'
# Names of accelerators, as v5litepod-8: the generation, and how many of what the number counts are one chip.
_ACCELERATOR = re.compile(r"(v4|v5litepod|v5e|v5p|v6e|tpu7x)-(\d+)")
_COUNTED_PER_CHIP = {"v4": 2, "v5p": 2, "tpu7x": 2}


# Of a program: see `compile_module`.
ModuleForm = Literal["hlo", "mlir"]


@dataclass(frozen=True, kw_only=True)
class Target:
    """A slice of TPUs.

    Args:
        generation: e.g. `"v5e"`.
        chips: the number of chips along each dimension.

    Raises:
        ConfigError: there is no such slice.
    """

    generation: str
    chips: tuple[int, ...]

    def __post_init__(self) -> None:
        dimensions = 3 if self.generation in _CUBES else 2
        if len(self.chips) != dimensions or min(self.chips) < 1:
            example = "2x2x1" if dimensions == 3 else "2x4"
            raise ConfigError(
                f"topology {self}: a slice of {self.generation} has {dimensions} dimensions, as in "
                f"{self.generation}:{example}"
            )

    @classmethod
    def parse(cls, text: str) -> Target:
        """Reads `"v5e:2x4"`.

        Raises:
            ConfigError: it has another form.
        """
        found = _FORM.fullmatch(text.lower())
        if found is None:
            raise ConfigError(
                f"topology {text!r}: give the generation and the chips along each dimension, as in v5e:2x4, v6e:4x4, "
                f"v4:2x2x1, v5p:2x2x2 or tpu7x:2x2x1{cls._meant(text)}"
            )
        return cls(generation=found.group(1), chips=tuple(map(int, found.group(2).split("x"))))

    @classmethod
    def usual(cls, generation: str, devices: int) -> Target:
        """The usual slice of so many devices: `v5e:2x4`, `v5p:2x2x2`, `v4:2x2x4`.

        Raises:
            ConfigError: there is none.
        """
        per_chip, dimensions = _DEVICES_PER_CHIP.get(generation, 1), 3 if generation in _CUBES else 2
        chips = devices // per_chip
        if devices % per_chip or chips < 1 or chips & (chips - 1):
            raise ConfigError(
                f"there is no usual slice of {devices} devices of {generation}: name one, as in v5e:2x4 or v5p:2x2x2"
            )
        # Two chips are in the middle, four are a square, and the first dimension is the shortest of larger slices.
        exponents = [0] * dimensions
        for number in range(chips.bit_length() - 1):
            exponents[(1, 0, 2)[number] if number < dimensions else -1 - number % dimensions] += 1
        ordered = sorted(exponents) if chips >= 2**dimensions else exponents
        return cls(generation=generation, chips=tuple(2**exponent for exponent in ordered))

    @classmethod
    def _meant(cls, text: str) -> str:
        """The slice that an accelerator's name stands for, for messages; empty if it is no such name."""
        found = _ACCELERATOR.fullmatch(text.lower())
        if found is None:
            return ""
        generation = found.group(1).replace("litepod", "e")
        chips = int(found.group(2)) // _COUNTED_PER_CHIP.get(generation, 1)
        try:
            usual = cls.usual(generation, chips * _DEVICES_PER_CHIP.get(generation, 1))
        except ConfigError:
            return ""
        return f"; {text} is usually {usual}"

    @property
    def usual_slices(self) -> str:
        """The smallest slices of the generation, for messages."""
        per_chip = _DEVICES_PER_CHIP.get(self.generation, 1)
        smallest = 4 if self.generation in _CUBES else 1
        chips = [smallest, *(count for count in (4, 8, 16, 32, 64, 128, 256) if count > smallest)]
        return ", ".join(str(self.usual(self.generation, count * per_chip)) for count in chips)

    @property
    def devices(self) -> int:
        """Number of devices, as programs see them."""
        return math.prod(self.chips) * _DEVICES_PER_CHIP.get(self.generation, 1)

    @property
    def options(self) -> Mapping[str, str]:
        """Options with which libtpu describes the slice."""
        return _OPTIONS.get(self.generation, {})

    def __str__(self) -> str:
        return f"{self.generation}:{'x'.join(map(str, self.chips))}"


@dataclass(frozen=True, kw_only=True)
class Compiler:
    """The installed libtpu.

    Attributes:
        library: path of `libtpu.so`.
        version: of the package.
    """

    library: Path
    version: str

    @classmethod
    def find(cls) -> Compiler:
        """Looks for libtpu and pypjrt without loading them.

        Raises:
            ConfigError: one is missing; the message says how to install them.
        """
        missing = [name for name in ("libtpu", "pypjrt") if util.find_spec(name) is None]
        if missing:
            raise ConfigError(
                f"steps are compiled for TPUs by libtpu, and {' and '.join(missing)} is not installed: {INSTALL} "
                "(xla-adapters plan estimates without it)"
            )
        spec = util.find_spec("libtpu")
        assert spec is not None
        assert spec.origin is not None
        return cls(library=Path(spec.origin).with_name("libtpu.so"), version=metadata.version("libtpu"))
