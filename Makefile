# make demo and make test each do everything on a fresh clone; they need Python 3.11 and a package registry.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# With the frameworks that benchmarks compare with.
BENCH_STAMP := $(VENV)/.installed-bench
# With what the tests of these import.
PEERS_STAMP := $(VENV)/.installed-peers

# TorchTPU needs another torch than torch_xla, so it has an environment of its own.
TPU_VENV := .venv-torch-tpu
TPU_BIN := $(TPU_VENV)/bin
TPU_STAMP := $(TPU_VENV)/.installed

.PHONY: demo test test-apart test-rest test-slow test-long test-untuned test-untuned-apart \
	test-untuned-rest test-torch-tpu test-torch-tpu-apart test-torch-tpu-rest test-package test-versions peer-suites test-oldest test-newest \
	bench-torch-tpu lint docs bench clean

demo: $(STAMP)
	$(BIN)/python -m examples.byte_lm

# In two processes of about the same length: most tests are one process that computes on little more than one core.
APART := $(addprefix tests/,hf_trainer tracing cpu adapters examples lowerings $(if $(SLOW),crash))
PYTEST = $(BIN)/python -m pytest $(if $(SLOW),-m 'slow and not long')

test: $(STAMP)
	+$(MAKE) --no-print-directory -j2 --output-sync=target test-apart test-rest

test-slow: $(STAMP)
	+$(MAKE) --no-print-directory -j2 --output-sync=target SLOW=1 test-apart test-rest

# What repeats other tests with more cases, or times programs.
test-long: $(STAMP) $(TPU_STAMP)
	$(BIN)/python -m pytest -m long --ignore=tests/replay/test_reachable_changes.py
	$(TPU_BIN)/python -m pytest -m long tests/torch_tpu
	REACHABLE_ALL=1 $(BIN)/python -m pytest -m 'slow or long' tests/replay/test_reachable_changes.py

test-apart:
	$(PYTEST) $(APART)

test-rest:
	$(PYTEST) $(addprefix --ignore=,$(APART))

# Once more without the tuning for CPU devices: the step as other devices trace it. What is left out tests the tuning.
UNTUNED := tests/parity tests/runtime tests/replay/test_replay.py tests/sharding/test_distribute.py \
	tests/tracing/test_step_scope.py tests/tracing/test_optimizers.py tests/tracing/test_scans.py \
	$(addprefix --ignore=tests/runtime/,test_rng.py test_runtime.py)
UNTUNED_APART := $(addprefix tests/hf_trainer/test_training.py::test_,plain_training_is_one_graph \
	accumulation_per_micro_batch accumulation_unrolled clipping_bites checkpointing_parity_with_cpu \
	bf16_computes_in_bfloat16_and_keeps_float32_parameters) \
	$(addprefix tests/lightning_strategy/test_training.py::test_,automatic_optimization_is_one_graph \
	accumulation_is_a_graph_per_phase accumulation_unrolled_is_one_graph_per_update clipping_is_part_of_the_graph)

test-untuned: $(STAMP)
	+$(MAKE) --no-print-directory -j2 --output-sync=target test-untuned-apart test-untuned-rest

test-untuned-apart:
	XLA_ADAPTERS_CPU_TUNING=0 $(BIN)/python -m pytest $(UNTUNED_APART)

test-untuned-rest:
	XLA_ADAPTERS_CPU_TUNING=0 $(BIN)/python -m pytest $(UNTUNED)

# Tests of torch_xla that run on TorchTPU, too; which of them do not, and why, is in tests/torch_tpu/session.py.
ON_BOTH := $(addprefix tests/,tracing/test_exceptions.py tracing/test_rfc_stories.py tracing/test_step_scope.py \
	tracing/test_optimizers.py tracing/test_nesting.py tracing/test_activation_checkpointing.py tracing/test_index_check.py replay/test_replay.py \
	replay/test_replay_optimizers.py replay/test_replay_batch_in_writes.py replay/test_replay_guards.py \
	replay/test_replay_hidden.py replay/test_replay_reads.py replay/test_replaced_code.py \
	$(addprefix lightning_strategy/test_,training.py loops.py exceptions.py optimization.py))
ON_BOTH_APART := $(addprefix tests/,replay/test_reachable_changes.py \
	$(addprefix hf_trainer/test_,training.py errors_in_steps.py evaluation.py generation.py checkpoints.py index_check.py accelerate.py) \
	lightning_strategy/test_checkpoints.py adapters/test_resume.py \
	$(addprefix adapters/test_saves.py::test_,training_goes_on_while_a_checkpoint_is_written after_steps_and_after_time \
	a_save_that_fails_in_the_background_is_raised))

# On XLA:CPU, which stands in for the TPU; without a C compiler they are skipped.
test-torch-tpu: $(TPU_STAMP)
	+$(MAKE) --no-print-directory -j2 --output-sync=target test-torch-tpu-apart test-torch-tpu-rest

test-torch-tpu-apart:
	$(TPU_BIN)/python -m pytest $(ON_BOTH_APART)

test-torch-tpu-rest:
	$(TPU_BIN)/python -m pytest tests/torch_tpu $(ON_BOTH)

# What is built, installed in fresh environments of each Python that there is.
test-package: $(STAMP)
	$(BIN)/python -m pytest -m 'slow or long' tests/package

# The adapters with the oldest and with the newest libraries that pyproject.toml allows, each in an environment of its own.
VERSIONED := $(addprefix tests/,contract hf_trainer lightning_strategy adapters test_requirements.py)

# The tests of Lightning and transformers, from folders that have them: make peer-suites LIGHTNING=... TRANSFORMERS=...
peer-suites: $(PEERS_STAMP)
	@test -n "$(LIGHTNING)$(TRANSFORMERS)" || { $(BIN)/python -m tests.peer_suites --help; exit 2; }
	$(if $(LIGHTNING),$(BIN)/python -m tests.peer_suites lightning $(LIGHTNING))
	$(if $(TRANSFORMERS),$(BIN)/python -m tests.peer_suites transformers $(TRANSFORMERS))

test-versions: test-oldest test-newest

test-oldest test-newest: test-%: .venv-%/.installed
	.venv-$*/bin/python -m pytest $(VERSIONED)

bench-torch-tpu: $(TPU_STAMP)
	$(TPU_BIN)/python -m benchmarks.torch_tpu --check
	$(TPU_BIN)/python -m benchmarks.warm_start --check

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Offline; a warning is an error.
docs: $(STAMP)
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet docs build/docs

# All of them, even if an earlier one missed a target.
BENCHMARKS := step_counts "step_counts --lightning" ecosystem "ecosystem --architectures" "ecosystem --bf16" "ecosystem --multimodal" operators explain sharding checkpoint "crash --peers" \
	replay_coverage verification host_overhead generation models compile_time warm_start shapes input_wait

bench: $(BENCH_STAMP)
	@missed=; for benchmark in $(BENCHMARKS); do \
		echo "== $$benchmark"; $(BIN)/python -m benchmarks.$$benchmark --check || missed="$$missed, $$benchmark"; \
	done; test -z "$$missed" || { echo "missed targets: $${missed#, }"; exit 1; }

# Installing compiles it.
PLUGIN := adapters/xla_adapters/runtime/compile_cache/plugin.c

$(STAMP): pyproject.toml constraints.txt $(PLUGIN)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints.txt --build-constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

$(BENCH_STAMP): $(STAMP)
	$(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints.txt --build-constraint constraints.txt --editable '.[bench]'
	touch $(BENCH_STAMP)

$(PEERS_STAMP): $(STAMP)
	$(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints.txt --build-constraint constraints.txt --editable '.[peer-suites]'
	touch $(PEERS_STAMP)

# uv is told of the folders with wheels that pip knows: one may have a torch without CUDA, which is much smaller.
$(TPU_STAMP): pyproject.toml constraints-torch-tpu.txt $(PLUGIN)
	test -x $(TPU_BIN)/python || $(PYTHON) -m venv $(TPU_VENV)
	$(TPU_BIN)/python -m pip install --quiet --constraint constraints-torch-tpu.txt uv
	UV_FIND_LINKS="$$PIP_FIND_LINKS" $(TPU_BIN)/uv pip install --quiet --python $(TPU_BIN)/python --constraint constraints-torch-tpu.txt \
		--build-constraint constraints-torch-tpu.txt --editable '.[torch-tpu-dev]'
	touch $(TPU_STAMP)

# Resolved anew each time that it is installed.
.venv-oldest/.installed: RESOLUTION := lowest-direct
.venv-newest/.installed: RESOLUTION := highest
.venv-oldest/.installed .venv-newest/.installed: .venv-%/.installed: pyproject.toml $(PLUGIN)
	test -x .venv-$*/bin/python || $(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet uv
	.venv-$*/bin/python -m uv pip install --quiet --python .venv-$*/bin/python --upgrade --resolution $(RESOLUTION) --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) $(TPU_VENV) .venv-oldest .venv-newest runs build
