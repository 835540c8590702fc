"""`measure_plans`: compiles training steps under plans in a separate process, and reads XLA's dump of the programs.

It must be another process, because XLA reads its flags (`--xla_dump_to`) once. That process has as many virtual CPU
devices as the mesh.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from xla_adapters.errors import MODEL_FAILURES, XLAAdapterError
from xla_adapters.sharding.measure.job import Job, pack, unpack
from xla_adapters.sharding.measure.results import MeasuringError, PlanResult
from xla_adapters.sharding.plan import ShardingPlan

# The machine code is never run, so it need not be optimised.
_FLAGS = "--xla_dump_hlo_as_text --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def measure_plans(
    model: torch.nn.Module,
    batch: Any,
    plans: Sequence[ShardingPlan],
    *,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    timeout: float = 900,
) -> list[PlanResult]:
    """Compiles the training step under each plan; nothing is executed, and the model is not touched.

    Args:
        model: on any device; its values are not used.
        batch: the global batch: keyword arguments of `forward`, or positional ones.
        plans: for this model, on meshes of one size.
        around: returns a context for the forward pass; the other process must be able to import it.
        timeout: seconds for all plans together; the results of plans that were not reached have a `problem`.

    Returns:
        A result for each plan.

    Raises:
        MeasuringError: the model cannot be pickled, or the process failed before the first result.
    """
    data = pack(Job(model=model, batch=batch, plans=tuple(plans), around=around))
    with tempfile.TemporaryDirectory(prefix="xla-adapters-") as folder:
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("XLA_", "PT_XLA"))},
            "PJRT_DEVICE": "CPU",
            "CPU_NUM_DEVICES": str(plans[0].mesh.size),
            "XLA_FLAGS": f"--xla_dump_to={folder} {_FLAGS}",
            "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
        )
        results, ended, errors = _answers(process, data, timeout)
    if not results:
        raise MeasuringError(f"the process that measures {ended}: {errors[-2000:].strip()}")
    missing = PlanResult(problem=f"not reached: the process that measures {ended}")
    return [*results, *[missing] * (len(plans) - len(results))]


def _answers(process: subprocess.Popen[bytes], data: bytes, timeout: float) -> tuple[list[PlanResult], str, str]:
    """The results that the process returned, how it ended, and its error output."""
    assert process.stdin is not None
    late = threading.Event()

    def stop() -> None:
        late.set()
        process.kill()

    clock = threading.Timer(timeout, stop)
    clock.start()
    try:
        # Reads both output pipes while it writes the job.
        output, errors = process.communicate(data)
    finally:
        clock.cancel()
        process.kill()
        process.wait()
    if late.is_set():
        ended = f"had no more than {timeout:.0f} s"
    elif process.returncode == -signal.SIGKILL:
        ended = "was killed, as a machine does that is out of memory"
    else:
        ended = f"ended with status {process.returncode}"
    return list(_results(output)), ended, errors.decode(errors="replace")


def _results(output: bytes) -> Iterator[PlanResult]:
    while output:
        size, output = int.from_bytes(output[:8], "big"), output[8:]
        if len(output) < size:
            return
        yield pickle.loads(output[:size])
        output = output[size:]


def _main(folder: Path) -> None:
    data = sys.stdin.buffer.read()
    with _answering() as answer:
        from xla_adapters.runtime import get_runtime
        from xla_adapters.sharding.measure.compiled_step import compiled_step

        get_runtime().device.initialize(spmd=True)
        known: dict[bytes, PlanResult] = {}
        for plan in unpack(data).plans:
            try:
                result = compiled_step(unpack(data), plan, folder, known)
            except (*MODEL_FAILURES, XLAAdapterError) as error:
                # The other plans are still measured.
                traceback.print_exc()
                result = PlanResult(problem=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
            answer(pickle.dumps(result))


@contextmanager
def _answering() -> Iterator[Callable[[bytes], None]]:
    """Reserves stdout for results; what libraries print there goes to stderr."""
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "wb") as output:
        os.dup2(2, 1)

        def answer(message: bytes) -> None:
            output.write(len(message).to_bytes(8, "big") + message)
            output.flush()

        yield answer


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
