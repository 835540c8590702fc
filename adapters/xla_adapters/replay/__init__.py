"""Step replay: after two passes that agree, the step's executable is run again without its Python."""
