"""Compiles `plugin.c` when the package is built or installed; without a C compiler the package does without it.

A build hook of hatchling (https://hatch.pypa.io/latest/plugins/build-hook/custom), which nothing else imports.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_FOLDER = "adapters/xla_adapters/runtime/compile_cache"
_OPTIONS = ("-shared", "-fPIC", "-O2", "-Wall", "-Wextra")


class PluginBuildHook(BuildHookInterface):  # type: ignore[misc]
    """Compiles the plugin beside its source; a wheel that has it is for one platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """As of `BuildHookInterface`."""
        if self.target_name != "wheel":
            return
        command = shlex.split(os.environ.get("CC", "cc")) or ["cc"]
        compiler = shutil.which(command[0])
        if compiler is None:
            self.app.display_warning("no C compiler (cc, or $CC): built without the compile cache's plugin")
            return
        source = Path(self.root, _FOLDER, "plugin.c")
        library = source.with_suffix(".so.1")
        # A process may have the old one loaded: it is replaced, not written over.
        made = library.with_name(f".{os.getpid()}.so")
        done = subprocess.run(
            [compiler, *command[1:], *_OPTIONS, str(source), "-o", str(made), "-ldl"], capture_output=True, text=True
        )
        if done.returncode:
            self.app.display_warning(f"built without the compile cache's plugin: {compiler} failed\n{done.stderr}")
            return
        made.replace(library)
        build_data["artifacts"].append(f"/{_FOLDER}/{library.name}")
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"
