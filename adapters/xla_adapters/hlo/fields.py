"""Field numbers of HLO's protobuf messages (`xla/service/hlo.proto`)."""

from __future__ import annotations

# Field numbers of HloModuleProto.
MODULE_NAME, MODULE_ENTRY_NAME, MODULE_COMPUTATIONS, MODULE_PROGRAM_SHAPE, MODULE_ENTRY = 1, 2, 3, 4, 6
# Field numbers of HloComputationProto.
COMPUTATION_NAME, INSTRUCTIONS, PROGRAM_SHAPE, COMPUTATION_ID, ROOT = 1, 2, 4, 5, 6
# Field numbers of HloInstructionProto.
NAME, OPCODE, SHAPE, LITERAL, PARAMETER_NUMBER, DIMENSIONS = 1, 2, 3, 8, 9, 14
ID, OPERANDS, CALLED, COMPARISON_DIRECTION, FRONTEND_ATTRIBUTES = 35, 36, 38, 63, 68
