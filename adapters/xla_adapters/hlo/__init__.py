"""Reads and writes HLO modules (protobuf) as graphs, without XLA's own Python classes."""
