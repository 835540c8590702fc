"""torch's core operators: which of them are part of a step's graph, and with the numbers of the CPU?

`sources` holds the sample inputs, `cases` chooses those of each operator, `measure` runs one in a step, `row` collects
what an operator's samples showed, `groups` runs many operators in forked children.
"""
