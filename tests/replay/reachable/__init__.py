"""A corpus of small training programs, and a search for changes that a replayed step does not notice.

`programs_*.py` hold the programs, `walker.py` finds everything that a step may reach, `mutations.py` changes one
thing of it, and `checks.py` runs a program with such a change twice: traced, and replayed where that is offered.
"""
