"""`steps_per_execution`: several replayed calls of a step are collected and run by one executable."""
