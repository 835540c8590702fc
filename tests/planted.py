"""Files that run code when Python's own reader of pickles reads them: what a hostile checkpoint would hold."""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


class _Calls:
    """Its pickle calls a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


def touching(marker: Path) -> Any:
    """An object whose pickle makes a file."""
    return _Calls(os.system, f"touch '{marker}'")


def saved(value: Any, **options: Any) -> bytes:
    """What `torch.save` writes of it."""
    stream = io.BytesIO()
    torch.save(value, stream, **options)
    return stream.getvalue()


def plants(marker: Path) -> dict[str, bytes]:
    """Contents of a file, each of which makes the file `marker` if it is unpickled."""
    call = touching(marker)
    module = marker.parent / "planted_module.py"
    module.write_text(f"open({str(marker)!r}, 'w').close()\nvalue = 1\n")
    shell = f"touch '{marker}'".encode()
    return {
        "torch.save": saved({"weight": torch.ones(2), "more": [call]}),
        "torch.save without zip": saved([call], _use_new_zipfile_serialization=False),
        "torch.save of eval": saved(_Calls(eval, f"open({str(marker)!r}, 'w')")),
        **{f"pickle {protocol}": pickle.dumps([call], protocol=protocol) for protocol in (0, 2, 4, 5)},
        "an import": b"cplanted_module\nvalue\n.",
        "torch.save of an import": saved(json.dumps, _use_new_zipfile_serialization=False).replace(
            b"cjson\ndumps\n", b"cplanted_module\nvalue\n"
        ),
        "an instance": b"(S'" + shell + b"'\nios\nsystem\n.",
        "an object": b"(cos\nsystem\nS'" + shell + b"'\no.",
    }
