"""The runtime interface on torch_xla 2.9; the only folder that imports torch_xla."""
