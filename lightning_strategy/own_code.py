from __future__ import annotations
from typing import Any
def obstacle_in_code(module: Any, name: str) -> str | None:
    return None
