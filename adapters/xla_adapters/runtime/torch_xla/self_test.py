"""`why_no_replay`: whether this version of torch_xla runs cached graphs as the one this folder was written for."""

from __future__ import annotations

import torch
import torch_xla

from xla_adapters.runtime.interface import Runtime


def why_no_replay(runtime: Runtime) -> str | None:
    """Compiles two tiny graphs and runs one of them again; see `Runtime`."""
    if _runs_cached_graphs(runtime):
        return None
    return f"torch_xla {torch_xla.__version__} does not run cached graphs as 2.9 does"


def _runs_cached_graphs(runtime: Runtime) -> bool:
    tracing, transfers, executables = runtime.tracing, runtime.transfers, runtime.executables
    lazy, values, counters = runtime.lazy, runtime.values, runtime.counters
    eager = tracing.eager()
    tracing.set_eager(False)
    try:
        state, batch = transfers.to_device(torch.arange(3.0)), transfers.to_device(torch.ones(3))
        tracing.flush()
        before = lazy.inner(state)
        alias, (own, given) = state.view(3), lazy.handles([state, batch])
        state.mul_(1.5).add_(batch)
        output = lazy.inner(state)
        inputs = executables.inputs([output])
        kinds = [{own: "state", given: "batch"}.get(item.handle, "number") for item in inputs]
        if sorted(kinds) != ["batch", "number", "state"]:
            return False
        name = executables.compile([output], [before])
        lazy.fill([output], executables.run(name, [item.value for item in inputs]))
        compiled = counters.compile_totals()[0]
        names, writes = lazy.storage_marks([state])
        for factor in (2.0, 3.0):
            (number,) = transfers.upload_numbers([(factor, torch.float32)])
            feed = {"state": state, "batch": batch, "number": number}
            values.write([state], executables.run(name, [feed[kind] for kind in kinds]))
        if counters.compile_totals()[0] != compiled:
            return False
        expected = ((torch.arange(3.0) * 1.5 + 1) * 2 + 1) * 3 + 1
        found = transfers.to_host([state, alias])
        values.write([alias], [batch])
        told = lazy.storage_marks([state]) == (names, [writes[0] + 3])
        return told and all(torch.equal(value, expected) for value in found)
    except (AttributeError, RuntimeError, TypeError, KeyError):
        return False
    finally:
        tracing.set_eager(eager)
