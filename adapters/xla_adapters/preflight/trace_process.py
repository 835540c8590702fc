"""`trace_in_process`: traces a step in a process of its own, which has as many virtual CPU devices as the mesh.

Nothing is compiled or run there; the process of the caller is not touched.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from xla_adapters.errors import MODEL_FAILURES, ConfigError, XLAAdapterError
from xla_adapters.preflight.job import StepJob
from xla_adapters.preflight.target import INSTALL_FOR_TORCH_TPU
from xla_adapters.preflight.traced_step import TracedStep
from xla_adapters.runtime import get_runtime, runtime_name
from xla_adapters.sharding.measure import MeasuringError, pack, unpack
from xla_adapters.utils.location import described

# A package of the extra "preflight-torch-tpu".
_PLUGIN = "xla_plugins.xla_cpu_pjrt"
_JOB, _ANSWER = "job.pickle", "answer_{}.pickle"


class TracingError(Exception):
    """The step could not be traced; the message says why."""


def trace_in_process(job: StepJob, *, timeout: float = 900) -> TracedStep:
    """Traces a training step as it would run on devices that are no CPUs.

    Args:
        job: model and batch on any device; their values are not used.
        timeout: seconds after which the process is stopped.

    Raises:
        TracingError: the model cannot be pickled, its step cannot be traced, or the time was too short.
    """
    (answer,) = trace_plans_in_process(dataclasses.replace(job, plans=(job.plan,)), timeout=timeout)
    if isinstance(answer, str):
        raise TracingError(answer)
    return answer


def trace_plans_in_process(job: StepJob, *, timeout: float = 900) -> list[TracedStep | str]:
    """As `trace_in_process`, under each of the job's plans, whose meshes have one size.

    Args:
        job: as for `trace_in_process`.
        timeout: seconds for all plans together.

    Returns:
        For each plan its step, or why it could not be traced.

    Raises:
        TracingError: the model cannot be pickled.
    """
    try:
        data = pack(job)
    except MeasuringError as error:
        raise TracingError(str(error)) from error
    with tempfile.TemporaryDirectory(prefix="xla-adapters-") as name:
        folder = Path(name)
        (folder / _JOB).write_bytes(data)
        problem = ""
        try:
            ended = subprocess.run(
                [sys.executable, "-m", __name__, name],
                env=environment_for(job.plan.mesh.size),
                capture_output=True,
                timeout=timeout,
                check=False,
            )
            said = ended.stderr.decode(errors="replace").strip()
            problem = f"the process that traces the step ended with status {ended.returncode}: {said[-2000:]}"
        except subprocess.TimeoutExpired:
            problem = f"tracing the step took more than {timeout:g} s (its timeout)"
        paths = [folder / _ANSWER.format(number) for number in range(len(job.plans))]
        return [pickle.loads(path.read_bytes()) if path.is_file() else problem for path in paths]


def environment_for(devices: int) -> dict[str, str]:
    """The environment of a process that traces for devices that are no CPUs.

    Args:
        devices: how many it sees; with TorchTPU always one.

    Raises:
        ConfigError: with TorchTPU, the plugin that stands in for a TPU is not installed.
    """
    if runtime_name() == "torch_tpu":
        return _environment_of_torch_tpu()
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("XLA_", "PT_XLA"))},
        "PJRT_DEVICE": "CPU",
        "CPU_NUM_DEVICES": str(devices),
        # The step as devices that are no CPUs trace it.
        "XLA_ADAPTERS_CPU_TUNING": "0",
        # Operations name the line of Python that made them.
        "XLA_HLO_DEBUG": "1",
        "XLA_IR_DEBUG": "1",
        "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }


def _environment_of_torch_tpu() -> dict[str, str]:
    # The parent first, which `find_spec` would import.
    spec = find_spec(_PLUGIN) if find_spec(_PLUGIN.partition(".")[0]) is not None else None
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            f"with TorchTPU a step is traced on a PJRT plugin that stands in for a TPU: {INSTALL_FOR_TORCH_TPU}"
        )
    return {
        **os.environ,
        # Not the TPU of this host, if it has one: it may be in use.
        "TPU_LIBRARY_PATH": str(Path(spec.submodule_search_locations[0]) / "xla_cpu_pjrt.so"),
        # Otherwise it waits for minutes for a server that only Google's machines have.
        "TPU_SKIP_MDS_QUERY": "1",
        "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }


def _tracer() -> Callable[[StepJob], TracedStep]:
    """Starts the runtime; what traces a step with it."""
    runtime = get_runtime()
    runtime.abstract.prepare()
    if runtime.has_placeholders:
        from xla_adapters.preflight.placeholder_step import trace_step as trace
    else:
        from xla_adapters.preflight.traced_step import trace_step as trace

        runtime.device.initialize(spmd=True)
    return trace


def _main(folder: Path) -> None:
    trace = _tracer()
    data = (folder / _JOB).read_bytes()
    for number, plan in enumerate(unpack(data).plans):
        # Its model is moved to the device: another plan gets another copy.
        job = unpack(data)
        assert isinstance(job, StepJob)
        answer: TracedStep | str
        try:
            answer = trace(dataclasses.replace(job, plans=(plan,)))
        except (*MODEL_FAILURES, XLAAdapterError) as error:
            traceback.print_exc()
            answer = described(error)
        # Renamed when it is complete: the process may be stopped at any time.
        part = folder / "part"
        part.write_bytes(pickle.dumps(answer))
        part.rename(folder / _ANSWER.format(number))


if __name__ == "__main__":
    from xla_adapters.preflight import trace_process

    # Not `__main__`'s own classes: what is pickled must be found by its module's name.
    trace_process._main(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    # Placeholders have nothing to be destroyed.
    os._exit(0)
