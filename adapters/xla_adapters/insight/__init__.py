"""Counters of compiles, executions and transfers, for stretches of code and for whole runs."""
