"""Builds the platform "XCPU" and says what environment a process needs to train on it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from tests.plugin_platform.device import LIBRARY_VARIABLE, XCPU

ROOT = Path(__file__).resolve().parents[2]
NAME = XCPU.__name__
_SHIM = Path(__file__).with_name("shim.c")


def build(compiler: str, folder: Path) -> Mapping[str, str]:
    """Compiles the shim.

    Args:
        compiler: the path of a C compiler.
        folder: where the shim and an entry point for torch_xla are put; must stay while the platform is used.

    Returns:
        Environment variables for processes that use the platform.
    """
    library = folder / "shim.so"
    plugin = Path(str(files("xla_plugins.xla_cpu_pjrt")))
    options = ["-shared", "-fPIC", "-O1", "-Wall", "-Werror", f"-I{plugin / 'include'}"]
    target = f'-DTARGET="{plugin / "xla_cpu_pjrt.so"}"'
    subprocess.run([compiler, *options, target, str(_SHIM), "-o", str(library), "-ldl"], check=True)
    # As if a package of this name had been installed.
    metadata = folder / "xcpu-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: xcpu\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(f"[torch_xla.plugins]\n{NAME} = {XCPU.__module__}:{NAME}\n")
    paths = [str(folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PJRT_DEVICE": NAME, LIBRARY_VARIABLE: str(library), "PYTHONPATH": os.pathsep.join(paths)}
