"""`compile_module`: compiles a program for a slice of TPUs that is not there, with libtpu, in a process of its own."""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata, util
from pathlib import Path
from typing import Any, Literal

from xla_adapters.errors import ConfigError
from xla_adapters.sharding import HloStats, read_hlo
from xla_adapters.tools import libtpu_process
from xla_adapters.utils.child_process import python_path, run_python

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

# What torch_xla 2.9 sets on a host with TPUs (`torch_xla._setup_libtpu_flags`), so that the same program is compiled.
_FLAGS = {
    "xla_tpu_use_enhanced_launch_barrier": "false",
    "xla_latency_hiding_scheduler_rerun": "1",
    "xla_tpu_prefer_async_allgather_to_allreduce": "true",
    "xla_tpu_enable_flash_attention": "false",
}
_FLAGS_V5 = {"xla_enable_async_all_gather": "true", "xla_enable_async_collective_permute": "true"}
_ENVIRONMENT = {
    # Without it libtpu asks a metadata server, for minutes.
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    # Of the host, not of the target.
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    # Nothing is run: another process may compile, too, or use a TPU of this host.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
_OPTIMISED, _BUFFERS = "after_optimizations.txt", "-buffer-assignment.txt"
_GIVEN, _ASSIGNED = "before_optimizations.txt", "after_optimizations_after_buffer_assignment.txt"

_ALLOCATION = re.compile(r"^allocation \d+: size (\d+),(?: color (\d+),)? page \d+,? ?(.*)$")
_PARAMETER = re.compile(r"parameter (\d+)\b")
_VALUE = re.compile(r"^ value: <\d+ ([\w.\-]+)(?:\{[\d,]*\})? @0> \(size=(\d+),offset=\d+\): (\w+\[[\d,]*\])")
_METADATA = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = .*?\bmetadata=\{([^}]*)\}", re.MULTILINE)
_FIELD = re.compile(r'(\w+)=(?:"([^"]*)"|(\d+))')
# Frames of these say nothing to the user.
_MACHINERY = (
    *("/torch/", "/torch_xla/", "/xla_adapters/", "/hf_trainer/", "/lightning_strategy/", "<frozen"),
    *("/lightning/pytorch/", "/lightning/fabric/", "/accelerate/", "/transformers/trainer"),
)


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
    def chips_of_host(self) -> int:
        """How many chips a host of the generation has at most."""
        return 8 if self.generation in ("v5e", "v6e") else 4

    @property
    def accelerator(self) -> str:
        """The name of the slice's type, as v5litepod-8."""
        count = math.prod(self.chips) * _COUNTED_PER_CHIP.get(self.generation, 1)
        return f"{self.generation.replace('v5e', 'v5litepod')}-{count}"

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


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Bytes on one device, as the compiler states them.

    Attributes:
        arguments: parameters, optimizer state, batch.
        outputs: results, including those in the place of an argument.
        aliased: the part of `outputs` that takes the place of donated arguments.
        temporaries: values that live within the step.
        code: the program.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int

    @property
    def needed(self) -> int:
        """Bytes that the program needs: arguments, what outputs add to them, temporary values, and code."""
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.code


@dataclass(frozen=True, kw_only=True)
class CompiledModule:
    """What libtpu made of a module; figures are per device and run.

    Attributes:
        target: what it was compiled for.
        compiler: which libtpu.
        devices: how many the slice has, as the compiler counts them.
        kind: of the devices, by their own name, e.g. `"TPU v5 lite"`.
        hbm_bytes: memory of a device that programs may use.
        problem: why there is no program: the compiler's error, or how its process ended; empty if there is one.
        seconds: time the compiler took.
        memory: None if there is no program.
        flops: operations in the program, by the compiler's count; 0 if no code was generated.
        bytes_accessed: bytes that operations read and write, by the compiler's count: values that stay on the chip
            count, too.
        collectives: None if there is no program.
        text: the optimised program.
        buffers: XLA's text on buffers (`*-buffer-assignment.txt`).
    """

    target: Target
    compiler: str
    devices: int = 0
    kind: str = ""
    hbm_bytes: int = 0
    problem: str = ""
    seconds: float = 0.0
    memory: DeviceMemory | None = None
    flops: float = 0.0
    bytes_accessed: float = 0.0
    collectives: HloStats | None = None
    text: str = field(default="", repr=False)
    buffers: str = field(default="", repr=False)

    @property
    def needed_bytes(self) -> int:
        """Bytes of a device's memory, also of a program that does not fit; 0 if not known."""
        return self.memory.needed if self.memory is not None else sum(memory_of(self.buffers))

    @property
    def out_of_memory(self) -> bool:
        """Whether there is none because the device's memory is too small."""
        return "Ran out of memory" in self.problem and "hbm" in self.problem.lower()


def compile_module(
    module: bytes,
    target: Target,
    *,
    form: ModuleForm = "hlo",
    timeout: float = 900,
    generate_code: bool = True,
) -> CompiledModule:
    """Compiles a module for a slice.

    Args:
        module: a program.
        target: the slice.
        form: `"hlo"`, an HloModuleProto of torch_xla that is annotated with shardings: it is partitioned over all
            devices (SPMD). Or `"mlir"`, the text of an MLIR module of TorchTPU, for one of them.
        timeout: seconds after which the compiler is stopped.
        generate_code: False stops the compiler when it has optimised the program and assigned memory, which takes a
            small part of its time. The collectives and the memory of values are known then; the size of the program
            and the counts of operations and accessed bytes are not, and are 0.

    Raises:
        ConfigError: libtpu or pypjrt is not installed.
    """
    return _ask(target, module, form, timeout, generate_code)


def check_compiler(target: Target) -> CompiledModule:
    """Describes the slice without compiling anything: whether libtpu starts and knows it.

    Raises:
        ConfigError: libtpu or pypjrt is not installed.
    """
    return _ask(target, None, "hlo", 60, True)


def _ask(target: Target, module: bytes | None, form: ModuleForm, timeout: float, generate_code: bool) -> CompiledModule:
    compiler = Compiler.find()
    request = {"library": str(compiler.library), "topology": str(target), "options": dict(target.options), "form": form}
    with tempfile.TemporaryDirectory(prefix="xla-adapters-") as name:
        folder = Path(name)
        (folder / libtpu_process.REQUEST).write_text(json.dumps({**request, "compile": module is not None}))
        (folder / libtpu_process.MODULE).write_bytes(module or b"")
        begun = time.monotonic()
        ended = run_python(
            [libtpu_process.__file__, name],
            environment=environment_of_compiler(
                f"--xla_dump_to={folder} --xla_dump_hlo_as_text",
                _flags(target, os.environ.get("LIBTPU_INIT_ARGS", ""), form),
            ),
            timeout=timeout,
            until=None if generate_code else lambda: _has_assigned(folder),
        )
        answered = folder / libtpu_process.ANSWER
        answer = json.loads(answered.read_text()) if answered.is_file() else {}
        if ended.was_stopped:
            answer = {**answer, "seconds": time.monotonic() - begun, "memory": _assigned(folder)}
        elif module is not None and "memory" not in answer:
            answer = {"problem": f"the compiler {ended}", **answer}
        return _read(answer, folder, target, f"libtpu {compiler.version}")


def environment_of_compiler(xla_flags: str, libtpu_flags: str) -> dict[str, str]:
    """The environment of a process that compiles.

    Args:
        xla_flags, libtpu_flags: XLA_FLAGS and LIBTPU_INIT_ARGS.
    """
    return {
        **{name: value for name, value in os.environ.items() if name != "TPU_LIBRARY_PATH"},
        **_ENVIRONMENT,
        "LIBTPU_INIT_ARGS": libtpu_flags,
        "XLA_FLAGS": xla_flags,
        "PYTHONPATH": python_path(),
    }


def _has_assigned(folder: Path) -> bool:
    """Whether the compiler has assigned memory: it writes this text after those that are read."""
    begun = [path for path in folder.glob("module_*") if path.name.endswith(_GIVEN)]
    if not begun:
        return False
    # The largest one: the compiler compiles small programs of its own, too.
    name = max(begun, key=lambda path: path.stat().st_size).name.removesuffix(_GIVEN)
    return (folder / f"{name}{_ASSIGNED}").is_file()


def _assigned(folder: Path) -> dict[str, int]:
    """What the compiler states of a program's memory, as far as it is known before there is code."""
    arguments, temporaries = memory_of(_text(folder, _BUFFERS))
    sizes = {"argument": arguments, "output": 0, "alias": 0, "temp": temporaries, "generated_code": 0}
    return {f"{kind}_size_in_bytes": size for kind, size in sizes.items()}


def _flags(target: Target, given: str, form: ModuleForm) -> str:
    """The flags of libtpu: the user's, and for a program of torch_xla those that torch_xla adds."""
    if form == "mlir":
        return given
    names = {flag.lstrip("-").partition("=")[0] for flag in given.split()}
    added = {**_FLAGS, **(_FLAGS_V5 if target.generation in ("v5e", "v5p") else {})}
    return " ".join([*given.split(), *(f"--{name}={value}" for name, value in added.items() if name not in names)])


def _read(answer: Mapping[str, Any], folder: Path, target: Target, compiler: str) -> CompiledModule:
    known = {
        "target": target,
        "compiler": f"{compiler} ({answer['build']})" if "build" in answer else compiler,
        "devices": answer.get("devices", 0),
        "kind": answer.get("kind", ""),
        "hbm_bytes": answer.get("hbm", 0),
        "buffers": _text(folder, _BUFFERS),
    }
    text = _text(folder, _OPTIMISED)
    if "memory" not in answer:
        return CompiledModule(**known, text=text, problem=answer.get("problem", ""))
    sizes = answer["memory"]
    return CompiledModule(
        **known,
        text=text,
        seconds=answer["seconds"],
        memory=DeviceMemory(
            arguments=sizes["argument_size_in_bytes"],
            outputs=sizes["output_size_in_bytes"],
            aliased=sizes["alias_size_in_bytes"],
            temporaries=sizes["temp_size_in_bytes"],
            code=sizes["generated_code_size_in_bytes"],
        ),
        flops=answer.get("flops", 0.0),
        bytes_accessed=answer.get("bytes_accessed", 0.0),
        collectives=read_hlo(text, target.devices),
    )


def _text(folder: Path, ending: str) -> str:
    """The largest of the dumped texts with this ending: the compiler compiles small programs of its own, too."""
    found = [path for path in folder.glob("module_*") if path.name.endswith(ending)]
    return max(found, key=lambda path: path.stat().st_size).read_text() if found else ""


# ---- what takes the memory ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LiveValue:
    """A value in a device's memory.

    Attributes:
        name: of the parameter, state or batch tensor; for an intermediate value the operation that computes it.
        bytes: on one device, with padding.
        shape: on one device, e.g. `"f32[1024,256]"`.
        kind: `"argument"` or `"temporary"`.
        line: `file:line` of the Python that made it; empty if not known.
    """

    name: str
    bytes: int
    shape: str
    kind: str
    line: str = ""


def largest_values(text: str, buffers: str, names: Mapping[int, str], count: int = 10) -> list[LiveValue]:
    """The largest values in the memory of a device, largest first.

    Temporary values that take the same place one after the other are all listed.

    Args:
        text: the optimised program.
        buffers: XLA's text on buffers (`*-buffer-assignment.txt`).
        names: what each parameter of the program is, by its number.
        count: how many to return.
    """
    found = sorted(_values(buffers, names), key=lambda value: -value.bytes)[:count]
    frames, metadata = _Frames(text), dict(_METADATA.findall(text))
    return [value if value.kind == "argument" else _explained(value, metadata, frames) for value in found]


def memory_of(buffers: str) -> tuple[int, int]:
    """Bytes of arguments and of temporary values, by XLA's text on buffers; of a program that does not fit, too."""
    sizes = {"argument": 0, "temporary": 0}
    for line in buffers.splitlines():
        allocation = _ALLOCATION.match(line)
        if allocation is not None and (allocation.group(2) or "0") == "0":
            kind = _kind(allocation.group(3))
            if kind:
                sizes[kind] += int(allocation.group(1))
    return sizes["argument"], sizes["temporary"]


def _kind(what: str) -> str:
    if _PARAMETER.match(what) is not None:
        return "argument"
    return "temporary" if what.startswith("preallocated-temp") else ""


def _values(buffers: str, names: Mapping[int, str]) -> Iterator[LiveValue]:
    kind = ""
    for line in buffers.splitlines():
        allocation = _ALLOCATION.match(line)
        if allocation is not None:
            size, colour, what = allocation.groups()
            parameter = _PARAMETER.match(what)
            # Other colours are memories on the chip.
            kind = _kind(what) if (colour or "0") == "0" else ""
            if parameter is not None:
                number = int(parameter.group(1))
                shape = what.partition("|")[2].partition("|")[0]
                name = names.get(number, f"parameter {number}")
                yield LiveValue(name=name, bytes=int(size), shape=shape, kind="argument")
        elif kind == "temporary" and (value := _VALUE.match(line)) is not None:
            yield LiveValue(name=value.group(1), bytes=int(value.group(2)), shape=value.group(3), kind=kind)


def _explained(value: LiveValue, metadata: Mapping[str, str], frames: _Frames) -> LiveValue:
    fields = {name: text or number for name, text, number in _FIELD.findall(metadata.get(value.name, ""))}
    operation = fields.get("op_type", "")
    file, line = fields.get("source_file", ""), fields.get("source_line", "")
    where = frames.of_user(fields.get("stack_frame_id", ""), file, line)
    if "/torch/autograd/" in file:
        operation += " in the backward"
    elif "/torch/optim/" in file:
        operation += " in the optimizer's update"
    name = operation.replace("aten__", "").replace("xla__", "").strip() or value.name
    return LiveValue(name=name, bytes=value.bytes, shape=value.shape, kind=value.kind, line=where)


class _Frames:
    """The tables of stack frames at the beginning of HLO text."""

    def __init__(self, text: str) -> None:
        head = text.partition("\n\n%")[0]
        tables = {part.partition("\n")[0]: part.splitlines()[1:] for part in head.split("\n\n")}
        self._files = dict(self._entries(tables.get("FileNames", [])))
        self._locations = dict(self._entries(tables.get("FileLocations", [])))
        self._frames = dict(self._entries(tables.get("StackFrames", [])))

    @staticmethod
    def _entries(lines: list[str]) -> Iterator[tuple[int, str]]:
        for line in lines:
            number, _, rest = line.partition(" ")
            if number.isdigit():
                yield int(number), rest.strip('"')

    def of_user(self, frame: str, file: str, line: str) -> str:
        """`file:line` of the innermost frame that is neither torch's nor ours; empty if there is none."""
        at = int(frame) if frame else 0
        # Some versions count the frames from 0 here.
        if (file, line) != self._place(at)[:2]:
            at -= 1
        seen = 0
        while at in self._frames and seen < len(self._frames):
            found, number, parent = self._place(at)
            if found and not any(part in found for part in _MACHINERY):
                return f"{found}:{number}"
            # The text gives the parent's number plus one.
            at, seen = parent - 1, seen + 1
        return ""

    def _place(self, frame: int) -> tuple[str, str, int]:
        fields = {name: number for name, _, number in _FIELD.findall(self._frames.get(frame, ""))}
        location = self._locations.get(int(fields.get("file_location_id", 0)), "")
        place = {name: number for name, _, number in _FIELD.findall(location)}
        return (
            self._files.get(int(place.get("file_name_id", 0)), ""),
            place.get("line", ""),
            int(fields.get("parent_frame_id", 0)),
        )
