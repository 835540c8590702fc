"""`trace_step`: traces a training step on TorchTPU, with tensors that have no memory."""

from __future__ import annotations

import torch
from torch.utils import _pytree

from xla_adapters.config import XLAConfig
from xla_adapters.replay.program import StepProgram
from xla_adapters.runtime import get_runtime
from xla_adapters.tools.job import StepJob
from xla_adapters.tools.placeholder_capture import PlaceholderStepCapture
from xla_adapters.tools.step_capture import TRAINING
from xla_adapters.tools.traced_step import TracedStep, move_attributes, run_step


def trace_step(job: StepJob) -> TracedStep:
    """Traces forward, loss, backward and update as a step of the training would; nothing has memory, nothing is run.

    The job's plan does not count: there is one device.
    """
    capture = PlaceholderStepCapture()
    program = StepProgram(name="preflight step", config=XLAConfig())
    with capture.capturing(), capture.taking(TRAINING):
        device = get_runtime().device.torch_device()
        job.model.to(device)
        move_attributes(job.model, lambda tensor: tensor.to(device))
        batch = _pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), job.batch)
        optimizer = job.optimizer([value for value in job.model.parameters() if value.requires_grad])
        program.open(inputs=batch)
        try:
            loss = run_step(job, batch, optimizer)
            program.close()
            del loss
        finally:
            program.abort()
    (step,) = capture.steps
    return step
