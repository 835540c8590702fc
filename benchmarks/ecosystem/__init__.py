"""Trainers of many libraries, each with many models: does the step train as one graph, with the numbers of the CPU?

`models` holds the models, `with_*` one kind of trainer each, `cells` the measurement of one pair.
"""
