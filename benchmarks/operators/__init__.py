"""torch's core operators: which of them are part of a step's graph, and with the numbers of the CPU?

`cases` chooses the sample inputs of each operator, `measure` runs them in a step, many operators in a forked child.
"""
