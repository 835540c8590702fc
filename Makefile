# make demo and make test each do everything on a fresh clone; they need Python 3.11 and a package registry.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo demo-digits demo-lightning test test-slow lint bench clean

demo: $(STAMP)
	$(BIN)/python -m examples.byte_lm

demo-digits: $(STAMP)
	$(BIN)/python -m examples.digits_vit

demo-lightning: $(STAMP)
	$(BIN)/python -m examples.lightning_digits

test: $(STAMP)
	$(BIN)/python -m pytest

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/python -m benchmarks.step_counts --check
	$(BIN)/python -m benchmarks.step_counts --lightning --check
	$(BIN)/python -m benchmarks.modes --check
	$(BIN)/python -m benchmarks.architectures --check
	$(BIN)/python -m benchmarks.sharding --check
	$(BIN)/python -m benchmarks.checkpoint --check

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints.txt --build-constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) runs
