"""Lightning's and transformers' own tests, run with the trainers of this package; `python -m tests.peer_suites --help`.

The tests are their authors': a folder with them is given, unchanged. A test counts if it passes on the plain CPU with
the stock trainer, and makes a trainer that this package can take the place of.
"""
