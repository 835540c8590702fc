# make demo and make test each do everything on a fresh clone; they need Python 3.11 and a package registry.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# With the frameworks that benchmarks compare with.
BENCH_STAMP := $(VENV)/.installed-bench

.PHONY: demo demo-digits demo-lightning test test-apart test-rest test-slow lint bench clean

demo: $(STAMP)
	$(BIN)/python -m examples.byte_lm

demo-digits: $(STAMP)
	$(BIN)/python -m examples.digits_vit

demo-lightning: $(STAMP)
	$(BIN)/python -m examples.lightning_digits

# In two processes: most tests are one process that computes on little more than one core.
APART := tests/hf_trainer tests/core
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

# All of them, whatever an earlier one missed.
BENCHMARKS := step_counts "step_counts --lightning" modes architectures sharding checkpoint "crash --peers" \
	host_overhead models memory compile_time

bench: $(BENCH_STAMP)
	@missed=; for benchmark in $(BENCHMARKS); do \
		echo "== $$benchmark"; $(BIN)/python -m benchmarks.$$benchmark --check || missed="$$missed, $$benchmark"; \
	done; test -z "$$missed" || { echo "missed targets: $${missed#, }"; exit 1; }

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints.txt --build-constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

$(BENCH_STAMP): $(STAMP)
	$(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints.txt --build-constraint constraints.txt --editable '.[bench]'
	touch $(BENCH_STAMP)

clean:
	rm -rf $(VENV) runs
