"""Pre-flight: compiles training steps for TPUs that are not there."""

from xla_adapters.sharding.measure import PlanCompiler, register


def _compiler(topology: str, devices: int) -> PlanCompiler:
    # Imported late: a training that does not compile for absent TPUs needs none of it.
    from xla_adapters.preflight.measuring import tpu_compiler

    return tpu_compiler(topology, devices)


register(_compiler)
