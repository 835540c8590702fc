"""Programs that measure this package, each `python -m benchmarks.NAME`."""
