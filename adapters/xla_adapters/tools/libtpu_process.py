"""Compiles one program with libtpu for a TPU that is not there. Run as a program: `python libtpu_process.py FOLDER`.

It is a process of its own, because libtpu ends its process on some errors, and must not be loaded beside torch_xla. It
imports the standard library and pypjrt (PJRT's C API through ctypes) only, so that it starts in 0.2 s.

FOLDER has `request.json` and `module.pb` (an HloModuleProto, or the text of an MLIR module); `answer.json` is written
there. The process that starts this one sets `XLA_FLAGS=--xla_dump_to`, and reads XLA's dump. Or `request.json` names a
program that was recorded, which is written to a folder of compiled programs (save_programs.py).
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

REQUEST, MODULE, ANSWER = "request.json", "module.pb", "answer.json"


def _main(folder: Path) -> None:
    request = json.loads((folder / REQUEST).read_text())
    answer = _saved(**request["save"]) if "save" in request else _compiled_alone(folder, request)
    (folder / ANSWER).write_text(json.dumps(answer))


def _saved(
    caching: str, library: str, described: str, name: str, recorded: str, folder: str, slice: list[Any]
) -> dict[str, str]:
    """Writes the entry of a recorded program.

    Args:
        caching: path of the library of plugin.c, whose functions take the others.
        library, described: path of libtpu, and what tells its builds apart.
        name: of the recorded program.
        recorded, folder: where that is, and where the entry is written.
        slice: its name, chips along three dimensions, and how chips are divided into devices.
    """
    plugin = ctypes.CDLL(caching)
    plugin.cache_wrap(os.fsencode(library), described.encode(), 0)
    plugin.cache_use(os.open(folder, os.O_RDONLY | os.O_DIRECTORY), 1)
    topology, chips, config = slice
    done = plugin.cache_compile_ahead(
        os.open(recorded, os.O_RDONLY | os.O_DIRECTORY),
        bytes.fromhex(name),
        topology.encode(),
        (ctypes.c_int64 * 3)(*chips),
        None if config is None else config.encode(),
    )
    problem = (ctypes.c_char * 512).in_dll(plugin, "cache_problem").value.decode(errors="replace")
    return {"problem": "" if done else problem or "its record is missing"}


def _compiled_alone(folder: Path, request: dict[str, Any]) -> dict[str, Any]:
    import pypjrt
    from pypjrt._loader import read_named_values

    answer: dict[str, Any] = {}
    try:
        plugin = pypjrt.Plugin(request["library"])
        plugin.initialize()
        topology = pypjrt.Topology.create(plugin, request["topology"], options=request["options"])
        devices = topology.device_descriptions()
        answer["build"] = " ".join(topology.platform_version.split())
        answer["kind"] = devices[0]["kind"]
        answer["devices"] = len(devices)
        answer["hbm"] = int(devices[0]["attributes"].get("device_memory_bytes_limit", 0))
        if request["compile"]:
            # The compiler may be stopped before it ends.
            (folder / ANSWER).write_text(json.dumps(answer))
            begun = time.monotonic()
            executable = _compiled(plugin, topology, (folder / MODULE).read_bytes(), request["form"], len(devices))
            answer["seconds"] = time.monotonic() - begun
            statistics = _asked(plugin, "PJRT_Executable_GetCompiledMemoryStats", executable)
            answer["memory"] = {
                name: int(getattr(statistics, name)) for name, _ in statistics._fields_ if "_in_" in name
            }
            costs = _asked(plugin, "PJRT_Executable_GetCostAnalysis", executable)
            found = read_named_values(plugin.abi, costs.properties, costs.num_properties)
            answer["flops"], answer["bytes_accessed"] = found.get("flops", 0.0), found.get("bytes accessed", 0.0)
    except pypjrt.errors.PjrtError as error:
        answer["problem"] = str(error)
    return answer


def _compiled(plugin: Any, topology: Any, module: bytes, form: str, devices: int) -> int:
    """The executable's address. For all devices the options are those that torch_xla gives under SPMD."""
    import pypjrt

    partitioned = {
        "num_partitions": devices,
        "use_spmd_partitioning": True,
        "allow_spmd_sharding_propagation_to_output": [True],
    }
    options = pypjrt.CompileOptions(**(partitioned if form == "hlo" else {})).encode(plugin.abi)
    # These are read through their addresses: they must live until the call returns.
    named = form.encode()
    code, name, encoded = (ctypes.create_string_buffer(data, len(data)) for data in (module, named, options))
    program = plugin.args(
        "PJRT_Program",
        code=ctypes.addressof(code),
        code_size=len(module),
        format=ctypes.addressof(name),
        format_size=len(named),
    )
    arguments = plugin.args(
        "PJRT_Compile_Args",
        topology=topology._check(),
        program=ctypes.addressof(program),
        compile_options=ctypes.addressof(encoded),
        compile_options_size=len(options),
    )
    plugin.call("PJRT_Compile", arguments)
    return int(arguments.executable)


def _asked(plugin: Any, function: str, executable: int) -> Any:
    arguments = plugin.args(f"{function}_Args", executable=executable)
    plugin.call(function, arguments)
    return arguments


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
    sys.stdout.flush()
    # libtpu's threads need not be joined; its destructors take long, and may crash.
    os._exit(0)
