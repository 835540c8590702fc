"""Runs the cells of notebooks in kernels: each a process that opens no port and knows no user's home."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.isolation import run_in_child

ROOT = Path(__file__).parents[1]
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def executed(cells: Sequence[str], *, env: dict[str, str] | None = None, timeout: int = 500) -> list[Any]:
    """Runs cells one after the other, also after one that raises; returns the outputs of each, as nbformat has them.

    Args:
        cells: the source of each.
        env: environment variables of the kernel.
        timeout: seconds for all cells; then the kernel is killed, and a hang is a failure.
    """
    with tempfile.TemporaryDirectory() as folder:
        places = {"HOME": folder, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'adapters'}"}
        places |= dict.fromkeys(("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR"), f"{folder}/jupyter")
        # The names of sockets have at most some 100 characters.
        places |= {"JUPYTER_RUNTIME_DIR": f"{folder}/r", "PYDEVD_DISABLE_FILE_VALIDATION": "1", "TQDM_DISABLE": "1"}
        outputs: list[Any] = run_in_child(
            lambda: _execute(cells, folder, timeout), env={**places, **(env or {})}, timeout=timeout + 60
        )
        return outputs


def _execute(cells: Sequence[str], folder: str, timeout: int) -> list[Any]:
    import nbformat
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient

    work = Path(folder, "work")
    work.mkdir()
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    manager = AsyncKernelManager(kernel_name="python3", transport="ipc", ip=f"{folder}/k")
    client = NotebookClient(
        notebook, km=manager, timeout=timeout, allow_errors=True, resources={"metadata": {"path": str(work)}}
    )
    client.execute()
    return [[dict(output) for output in cell.outputs] for cell in notebook.cells]


def error_of(outputs: Sequence[Any]) -> str:
    """The traceback of a cell as its reader sees it; empty if it has raised nothing."""
    lines = (line for output in outputs if output["output_type"] == "error" for line in output["traceback"])
    return _ESCAPES.sub("", "\n".join(lines))


def printed(outputs: Sequence[Any], stream: str = "stdout") -> str:
    """What a cell has printed."""
    return "".join(
        output["text"] for output in outputs if output["output_type"] == "stream" and output["name"] == stream
    )
