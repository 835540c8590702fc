"""The programs of the command line: `check`, `doctor` and `preflight`, and the TPU compiler that `plan` asks, too."""

from xla_adapters.sharding.measure.compilers import PlanCompiler, register


def _compiler(topology: str, devices: int) -> PlanCompiler:
    # Imported late: a training that does not compile for absent TPUs needs none of it.
    from xla_adapters.tools.measuring import tpu_compiler

    return tpu_compiler(topology, devices)


register(_compiler)
