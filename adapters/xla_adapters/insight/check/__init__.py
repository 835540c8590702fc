"""`xla-adapters check`: runs the first steps of a script on CPU devices, and reports what is slow or refused on XLA."""
