# make demo and make test each do everything on a fresh clone; they need Python 3.11 and a package registry.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo demo-digits demo-lightning test test-apart test-rest test-slow lint bench clean

demo: $(STAMP)
	$(BIN)/python -m examples.byte_lm

demo-digits: $(STAMP)
	$(BIN)/python -m examples.digits_vit

demo-lightning: $(STAMP)
	$(BIN)/python -m examples.lightning_digits

# In two processes: most tests are one process that computes on little more than one core.
APART := tests/hf_trainer tests/core tests/contract
PYTEST = $(BIN)/python -m pytest $(if $(SLOW),-m slow)

test: $(STAMP)
	+$(MAKE) --no-print-directory -j2 --output-sync=target test-apart test-rest

test-slow: $(STAMP)
	+$(MAKE) --no-print-directory -j2 --output-sync=target SLOW=1 test-apart test-rest

test-apart:
	$(PYTEST) $(APART)

test-rest:
	$(PYTEST) $(addprefix --ignore=,$(APART))

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
	$(BIN)/python -m benchmarks.crash --peers --check

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints.txt --build-constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) runs
