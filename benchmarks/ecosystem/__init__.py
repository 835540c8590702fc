"""Trainers of many libraries, each with many models: does the step train as one graph, with the numbers of the CPU?

`with_*` hold one kind of trainer each, `cell` the measurement of a trainer with a model, the others models.
"""
