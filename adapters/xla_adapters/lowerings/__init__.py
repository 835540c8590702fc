"""Replacements for torch operators that torch_xla cannot trace well, or that would not stay sharded under SPMD."""
