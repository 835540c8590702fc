"""The runtime interface on TorchTPU (`torch_tpu` 0.2): the only place that imports it."""
