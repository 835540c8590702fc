"""Step replay: after two traced calls of a step agreed, its executable is run again without the step's Python."""
