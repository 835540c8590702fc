"""Lightning on XLA devices. The strategy is not built yet; this package only reserves its place."""
