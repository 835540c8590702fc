"""`check_script`: runs a script in a process of its own on CPU devices, for a limited time."""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from xla_adapters.tools import check_child as child
from xla_adapters.tools.check_facts import Facts
from xla_adapters.tools.check_report import CheckReport
from xla_adapters.tools.running import run_limited

# Where the script runs: nothing of it goes to services that log runs.
_SETTINGS = "PJRT_DEVICE=CPU WANDB_MODE=disabled TOKENIZERS_PARALLELISM=false TF_CPP_MIN_LOG_LEVEL=2"
# The graphs are the same. XLA optimises their code less, which halves the time that they take to compile.
_FLAGS = "--xla_backend_optimization_level=0"
_KEPT_OUTPUT = 4000


def check_script(
    command: Sequence[str], *, steps: int = 8, timeout: float = 300, devices: int = 1, shows_output: bool = False
) -> CheckReport:
    """Checks a script; see the package.

    Args:
        command: the script and its arguments; or `-m`, a module and its arguments.
        steps: how many training steps it runs.
        timeout: seconds after which it is ended.
        devices: how many CPU devices it sees.
        shows_output: whether what it prints is shown.
    """
    with tempfile.TemporaryDirectory(prefix="xla-adapters-check-") as folder:
        path, printed = Path(folder, "facts.json"), Path(folder, "output.txt")
        ended = run_limited(
            ["-m", child.__name__, str(path), str(steps), *command],
            environment=_environment(os.environ, devices),
            timeout=timeout,
            output=None if shows_output else printed,
        )
        facts = Facts.load(path) if path.exists() else Facts(asked=steps)
        text = "" if shows_output else printed.read_bytes()[-_KEPT_OUTPUT:].decode(errors="replace")
    return CheckReport(command=shlex.join(command), facts=facts, ended=ended, output=text)


def _environment(environment: Mapping[str, str], devices: int) -> dict[str, str]:
    settings = dict(setting.split("=", 1) for setting in _SETTINGS.split())
    flags = f"{_FLAGS} {environment.get('XLA_FLAGS', '')}".strip()
    return {**environment, **settings, "CPU_NUM_DEVICES": str(devices), "XLA_FLAGS": flags}
