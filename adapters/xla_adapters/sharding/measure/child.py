"""`measure_plans`: compiles steps under plans in a process of its own, whose compiler writes its programs to a folder.

XLA reads its flags once, before the first program: a process that computes already cannot be told to write. The
process drives virtual CPU devices, as many as the mesh has.
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

# The machine code is never run: it need not be good.
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
        batch: keyword arguments of `forward`, or positional ones, of the global batch.
        plans: of this model, for meshes of one size.
        around: gives a context for the forward pass; a function that the other process can import.
        timeout: seconds for all plans together; those that were not reached have a `problem`.

    Raises:
        MeasuringError: the model cannot travel to the process, or the process failed as a whole.
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
    """What the process answered, how it ended, and its error output."""
    assert process.stdin is not None
    late = threading.Event()

    def stop() -> None:
        late.set()
        process.kill()

    clock = threading.Timer(timeout, stop)
    clock.start()
    try:
        # Both pipes are drained while the job is written.
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
        from xla_adapters.backend import get_backend
        from xla_adapters.sharding.measure.compiled_step import compiled_step

        get_backend().initialize(spmd=True)
        known: dict[bytes, PlanResult] = {}
        for plan in unpack(data).plans:
            try:
                result = compiled_step(unpack(data), plan, folder, known)
            except (*MODEL_FAILURES, XLAAdapterError) as error:
                # The other plans are measured all the same.
                traceback.print_exc()
                result = PlanResult(problem=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
            answer(pickle.dumps(result))


@contextmanager
def _answering() -> Iterator[Callable[[bytes], None]]:
    """Keeps the standard output for answers: what anybody prints goes to the error output."""
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "wb") as output:
        os.dup2(2, 1)

        def answer(message: bytes) -> None:
            output.write(len(message).to_bytes(8, "big") + message)
            output.flush()

        yield answer


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
