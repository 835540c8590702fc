"""HLO text for the tests."""

from __future__ import annotations

from xla_adapters.sharding import Mesh
from xla_adapters.sharding.hlo import CollectiveOp, read_hlo

GRID = Mesh.data_and_model(2, 4)
GLOBAL = "channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}, use_global_device_ids=true"


def program(*lines: str, header: str = "HloModule m, is_scheduled=true, num_partitions=8", before: str = "") -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return f"""{header}

%add (x: f32[], y: f32[]) -> f32[] {{
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}}

{before}
ENTRY %main (p: f32[32,32]) -> f32[32,32] {{
  %p = f32[32,32]{{1,0}} parameter(0)
{body}
}}
"""


def the_only(text: str, devices: int = 8) -> CollectiveOp:
    (operation,) = read_hlo(text, devices).operations
    return operation
