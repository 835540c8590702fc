"""Reads and writes HLO modules as encoded protobuf messages, without XLA's own Python classes."""
