"""What to do about a finding: a change of the line itself where one is known that keeps the program's meaning."""

from __future__ import annotations

import linecache
import re

from xla_adapters.tools.check_facts import Place

# A name with attributes, indices and calls: `outputs.loss`, `losses[0]`, `loss.mean()`.
_OPERAND = r"[A-Za-z_][\w.]*(?:\[[^][]*\]|\([^()]*\)|\.[A-Za-z_]\w*)*?"
_READS = re.compile(rf"({_OPERAND})(?:\.detach\(\))?(?:\.cpu\(\))?\.(?:item|tolist|numpy)\(\)")
_NUMBERS = re.compile(rf"\b(?:float|int)\(({_OPERAND}(?:\(\))?)\)")
_TO_HOST = re.compile(rf"({_OPERAND})(?:\.detach\(\))?\.(?:cpu\(\)|to\((?:\"cpu\"|'cpu')\))")
_SYNCS = re.compile(r"^[\w.]*(?:mark_step|sync|wait_device_ops)\(.*\)$")
# What is done with a number that a tensor cannot take part in without a read.
_ON_HOST = re.compile(
    r"\b(?:round|math\.\w+|range|str|isinstance|format|np\.\w+)\(|\bf[\"']|\.format\(| [<>]=? | [!=]= "
)
_INDEX = re.compile(r"\[[^]]*(?:\.item\(\)|\bint\()")
_WIDE = ((re.compile(r"\.double\(\)"), ".float()"), (re.compile(r"\bfloat64\b"), "float32"))
_HALF = ((re.compile(r"\.half\(\)"), ".bfloat16()"), (re.compile(r"\bfloat16\b"), "bfloat16"))


def source_of(place: Place) -> str:
    """The text of a line, without its indentation; empty if it cannot be read."""
    return linecache.getline(place.file, place.line).strip() if place.line else ""


def read_remedy(line: str) -> tuple[str, str]:
    """What to do about a line that reads a tensor in a step.

    Args:
        line: of the source, stripped.

    Returns:
        What to do, and a patch; empty where that is not known, or the line cannot be changed by itself.
    """
    if line.startswith("print(") or re.match(r"(?:logg\w+|log)\.\w+\(", line):
        return "move the line behind the step, where the value may be read", f"-{line}"
    if line.startswith("assert "):
        return "leave the check out of the step, or make it behind the step", f"-{line}"
    if re.match(r"(?:if|elif|while)\b", line):
        return (
            "compute both sides and choose with torch.where(condition, a, b), or decide by something that the host "
            "knows without the device",
            "",
        )
    if _SYNCS.match(line):
        return "leave it out: the end of the step executes the graph", f"-{line}"
    if _INDEX.search(line):
        return "keep the shape: choose with torch.where and a mask, or use a bound that the host knows", ""
    if smaller := re.search(r"(?<![\w.])(min|max)\(", line):
        name = f"torch.{smaller[1]}imum"
        return f"keep both on the device, and choose with {name}(a, b.detach()); read the result behind the step", ""
    if _ON_HOST.search(line):
        return "compute it behind the step, where the value may be read", ""
    for pattern in (_READS, _NUMBERS, _TO_HOST):
        changed = pattern.sub(r"\1.detach()", line).replace(".detach().detach()", ".detach()")
        if changed != line:
            changed = changed.replace(".cpu()", "")
            return "keep it as a tensor on the device, and read it behind the step", f"-{line}\n+{changed}"
    return "", ""


def dtype_remedy(dtype: str, line: str) -> tuple[str, str]:
    """What to do about a line that makes a tensor of a dtype that other devices compute slowly, or not at all."""
    if dtype.startswith("complex"):
        return "compute with real and imaginary parts as two real tensors", ""
    changes, instead = (_WIDE, "float32") if dtype == "float64" else (_HALF, "bfloat16")
    changed = line
    for pattern, replacement in changes:
        changed = pattern.sub(replacement, changed)
    return f"use {instead}", f"-{line}\n+{changed}" if changed != line else ""
