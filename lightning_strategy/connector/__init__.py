"""What Lightning's connector asks a strategy for while a Trainer or Fabric is constructed."""
