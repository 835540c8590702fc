"""Training with Lightning Fabric: the user writes the loop and marks its steps."""
