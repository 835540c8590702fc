"""What TorchTPU launches per training step; `python -m benchmarks.torch_tpu`."""
