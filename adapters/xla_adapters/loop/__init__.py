"""What the adapters of both trainers need around their compiled steps, and is no hook of a framework."""
