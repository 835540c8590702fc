"""`compile_module`: compiles an HLO module for a slice of TPUs that is not there, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xla_adapters.preflight import libtpu_process
from xla_adapters.preflight.live_values import memory_of
from xla_adapters.preflight.target import Compiler, ModuleForm, Target
from xla_adapters.sharding import HloStats, read_hlo

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
_OPTIMISED, _BUFFERS, _RANGES = "after_optimizations.txt", "-buffer-assignment.txt", "-live-range.txt"
_GIVEN, _ASSIGNED = "before_optimizations.txt", "after_optimizations_after_buffer_assignment.txt"
_POLL_SECONDS = 0.2


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
        buffers, ranges: XLA's texts on buffers and their lives (`*-buffer-assignment.txt`, `*-live-range.txt`).
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
    ranges: str = field(default="", repr=False)

    @property
    def compiled(self) -> bool:
        """Whether there is a program."""
        return self.memory is not None

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
    options = dict(target.options)
    request = {"library": str(compiler.library), "topology": str(target), "options": options, "form": form}
    with tempfile.TemporaryDirectory(prefix="xla-adapters-") as name:
        folder = Path(name)
        (folder / libtpu_process.REQUEST).write_text(json.dumps({**request, "compile": module is not None}))
        (folder / libtpu_process.MODULE).write_bytes(module or b"")
        begun = time.monotonic()
        flags = _flags(target, os.environ.get("LIBTPU_INIT_ARGS", ""), form)
        ended = _run(folder, flags, timeout, generate_code)
        answered = folder / libtpu_process.ANSWER
        answer = json.loads(answered.read_text()) if answered.is_file() else {}
        if ended is None:
            answer = {**answer, "seconds": time.monotonic() - begun, "memory": _assigned(folder)}
        elif module is not None and "memory" not in answer:
            answer = {"problem": ended, **answer}
        return _read(answer, folder, target, f"libtpu {compiler.version}")


def _run(folder: Path, flags: str, timeout: float, generate_code: bool) -> str | None:
    """Runs the process; how it ended, for the case that it has not answered. None: stopped before it generated code."""
    environment = {
        **{name: value for name, value in os.environ.items() if name != "TPU_LIBRARY_PATH"},
        **_ENVIRONMENT,
        "LIBTPU_INIT_ARGS": flags,
        "XLA_FLAGS": f"--xla_dump_to={folder} --xla_dump_hlo_as_text",
        "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
    }
    said = folder / "output.txt"
    deadline = time.monotonic() + timeout
    with said.open("wb") as output:
        command = [sys.executable, libtpu_process.__file__, str(folder)]
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        try:
            while True:
                try:
                    process.wait(timeout=min(_POLL_SECONDS, max(0.0, deadline - time.monotonic())))
                    break
                except subprocess.TimeoutExpired:
                    if not generate_code and _has_assigned(folder):
                        return None
                    if time.monotonic() >= deadline:
                        return f"the compiler had no more than {timeout:g} s (its timeout)"
        finally:
            process.kill()
            process.wait()
    errors = said.read_text(errors="replace").strip()
    return f"the compiler's process ended with status {process.returncode}: {errors[-2000:]}"


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
        "ranges": _text(folder, _RANGES),
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
