"""Steps on a runtime without lazy tensors: traced with placeholders in place of the tensors that they use."""
