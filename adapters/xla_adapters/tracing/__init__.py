"""Traces one step as one graph: graph breaks, hooks on modules and optimizers, and undoing a step that fails."""
