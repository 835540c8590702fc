"""`xla-adapters doctor`: versions, devices, known traps of this installation, and a short test of each feature."""
