# The project's commands. `make help` lists them.
#
# Every command runs in $(VENV), which has the versions of locks/ with their hashes; LOCKED=off takes the newest that fit. pip
# takes packages from its configured index; where it has none of its own and there is no NVIDIA GPU, tools/torch_index.py
# adds the one with torch's CPU build.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
LOCKED ?= on
# Processes that run tests; each file of tests runs in one of them.
WORKERS ?= 2

PY := $(VENV)/bin/python
PROTO_FILES := protos/engine/v1/engine.proto protos/grammar/v1/grammar.proto protos/kserve/v2/inference.proto \
	protos/transfer/v1/transfer.proto
SOURCES := benchmarks client gpu_engine grammar_service http_gateway kernels protos service_runtime shared_mem specgrammarbench tests tools
# What an installation is made from; a change installs again.
INSTALLED_FROM := pyproject.toml setup.py client/pyproject.toml $(wildcard locks/*.txt shared_mem/native/*.[ch] kernels/native/*.[ch])
BUF_VERSION := 1.75.0
C_SOURCES := $(wildcard shared_mem/native/*.[ch] kernels/native/*.[ch] kernels/cuda/*.cu tests/shared_mem/*.[ch] \
	tests/kernels/*.[ch] benchmarks/speed/*.c tools/fuzz/native/*.[ch])
# The kernels of one vector unit use gcc's builtins, which clang does not know.
TIDY_SOURCES := $(wildcard shared_mem/native/*.c) $(addprefix kernels/native/,dispatch.c step.c suffix.c team.c)

.DEFAULT_GOAL := help
.PHONY: help demo serve test test-slow coverage check check-cubins lint types imports test-gpu compose-test simulate model mutants fuzz test-sanitizers \
	bench bench-acceptance bench-isolation soak bench-gpu gpu-hour docs docs-version protos locks sbom audit wheels images \
	release clean

help: ## List the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

# A stamp says that $(VENV) holds the package with the extras of that name, as pyproject.toml and setup.py define them now.
# .dev holds everything of .runtime, so that a fresh clone compiles and installs once.
$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# A locked file has all that its packages need, and no package is built, so nothing comes in beside what is locked; the wheel of
# torch is the one without a hash. Each of the two takes flags of pip as $(1).
PIP_LOCKED = $(PY) -m pip install --quiet --no-deps --require-hashes --only-binary :all: $(1)
define INSTALL_TORCH_AND_PROJECT
	$(PY) -m pip install --quiet $(1) $$($(PY) tools/torch_index.py) --requirement locks/torch.txt
	$(PY) -m pip install --quiet --no-deps --no-build-isolation --editable client --editable .
endef

# Before minutes in which pip says nothing.
define SAY_AND_CHECK
	@command -v $${CC:-gcc} >/dev/null || { echo "error: there is no C compiler ($${CC:-gcc}), which a checkout needs: \
apt-get install gcc, or dnf install gcc; a wheel needs none (docs/install.md)" >&2; exit 1; }
	@echo "installing $(1) into $(VENV): some minutes and 1 to 2 GB, once"
endef

$(VENV)/.runtime: $(INSTALLED_FROM) | $(VENV)/bin/python
	$(call SAY_AND_CHECK,what a server needs)
ifeq ($(LOCKED),off)
	$(PY) -m pip install --quiet $$($(PY) tools/torch_index.py) --editable client --editable '.[engine,llguidance,embedded,http]'
else
	$(call PIP_LOCKED) --requirement locks/runtime.txt
	$(call INSTALL_TORCH_AND_PROJECT)
endif
	$(call PIP_LOCKED) --requirement locks/embedded.txt
	@touch $@

# pip compiles bytecode in one process, so `check` has it compiled in two, beside the type checker.
$(VENV)/.dev: $(INSTALLED_FROM) | $(VENV)/bin/python
	$(call SAY_AND_CHECK,what tests and checks need)
ifeq ($(LOCKED),off)
	$(PY) -m pip install --quiet --no-compile $$($(PY) tools/torch_index.py) --editable client \
		--editable '.[engine,llguidance,embedded,xgrammar,dev]'
else
	$(call PIP_LOCKED,--no-compile) --requirement locks/dev.txt
	$(call INSTALL_TORCH_AND_PROJECT,--no-compile)
endif
	$(call PIP_LOCKED,--no-compile) --requirement locks/embedded.txt
	@touch $(VENV)/.runtime $@

# Apart from $(VENV): what lists and audits an environment is not in it.
$(VENV)-supply/.made: locks/supply.txt
	$(PYTHON) -m venv $(VENV)-supply
	$(VENV)-supply/bin/python -m pip install --quiet --no-deps --require-hashes --only-binary :all: --requirement locks/supply.txt
	@touch $@

$(VENV)-docs/.made: locks/docs.txt
	$(PYTHON) -m venv $(VENV)-docs
	$(VENV)-docs/bin/python -m pip install --quiet --no-deps --require-hashes --only-binary :all: --requirement locks/docs.txt
	@touch $@

demo: $(VENV)/.runtime ## Start both processes on the embedded model and stream one guided answer
	$(PY) -m gpu_engine demo $(ARGS)

serve: $(VENV)/.runtime ## Serve the embedded model; ARGS="--model DIR --listen HOST:PORT ..."
	$(PY) -m gpu_engine serve $(ARGS)

# tests/conftest.py says what the workers take, and in which order. A worker that died is not replaced: xdist would wait forever
# for the tests that it had.
PYTEST := $(PY) -m pytest --numprocesses=$(WORKERS) --no-loadscope-reorder --max-worker-restart=0

test: check ## Lint, type-check and run the tests that are not slow; ARGS="-k NAME ..." goes to pytest
	$(PYTEST) -m "not slow" $(ARGS)

test-slow: $(VENV)/.dev $(VENV)-supply/.made ## Run the slow tests: long, and rarely the only ones to fail
	$(PYTEST) -m "slow and not sanitizers" $(ARGS)

coverage: $(VENV)/.dev ## Run the tests that are not slow under coverage (twice as long), and list files by their share of lines
	rm -f .coverage .coverage.*
	$(VENV)/bin/coverage run -m $(subst $(PY) -m ,,$(PYTEST)) -m "not slow" $(ARGS)
	$(VENV)/bin/coverage combine --quiet
	$(VENV)/bin/coverage report

check: $(VENV)/.dev ## Check the format, lint, strict types and import contracts
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target types lint imports $(VENV)/.bytecode

# Some packages hold files for another version of Python, which do not compile: pip passes over them, too.
$(VENV)/.bytecode: $(VENV)/.dev
	$(PY) -m compileall -qq -j 2 $(VENV)/lib $(SOURCES) >/dev/null || true
	@touch $@

lint: $(VENV)/.dev
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/clang-format --dry-run --Werror $(C_SOURCES)
	$(VENV)/bin/clang-tidy --quiet $(TIDY_SOURCES) -- -std=gnu11 -pthread

types: $(VENV)/.dev
	$(VENV)/bin/mypy

imports: $(VENV)/.dev
	$(VENV)/bin/lint-imports
	cd client && $(abspath $(VENV))/bin/lint-imports --config pyproject.toml
	cd specgrammarbench && $(abspath $(VENV))/bin/lint-imports --config pyproject.toml

check-cubins: $(VENV)/.dev ## Compile every GPU kernel for five kinds of GPU, and compare what it takes with the table
	$(PY) -m tests.kernels.cuda.cubins

test-gpu: $(VENV)/.dev ## Run the tests that need a CUDA device
	$(PY) -m pytest -m gpu $(ARGS)

model: $(VENV)/.dev ## Check the step plane in all interleavings, and its own faults (needs spin and gcc: apt-get install spin gcc)
	$(PY) -m tools.step_plane model
	$(PY) -m tools.step_plane mutants

mutants: $(VENV)/.dev ## Seed faults in the sources and say what catches each (needs gcc); ARGS="NAME ..."
	$(PY) -m tools.mutants $(ARGS)

test-sanitizers: $(VENV)/.dev ## Run the C code under gcc's ThreadSanitizer, AddressSanitizer, UBSan and analyzer
	$(PY) -m pytest -m "slow or sanitizers" tests/shared_mem/test_sanitizers.py tests/kernels/test_sanitizers.py tests/tools/fuzz/test_native.py $(ARGS)

$(VENV)/.fuzz: $(VENV)/.dev
	$(PY) -m pip install --quiet --editable '.[fuzz]'
	@touch $@

fuzz: $(VENV)/.fuzz ## Run every target of the fuzzer for five minutes; ARGS="TARGET --seconds 20 --executions N"
	$(PY) -m tools.fuzz $(ARGS)

compose-test: $(VENV)/.dev ## Build the container images and test them under compose (needs Docker)
	docker compose --file compose.yaml --file compose.http.yaml --file compose.smg.yaml build
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

soak: $(VENV)/.dev ## Send random traffic with faults for 30 minutes, then look for what was left; ARGS="--minutes N --plot FILE.png"
	$(PY) -m benchmarks soak $(ARGS)

bench-gpu: $(VENV)/.dev ## Measure the figures that need a CUDA device, in ten minutes; ARGS="--quick ..."
	$(PY) -m benchmarks bench_gpu --only hostfunc exposed pairs kill tokens llama smol kernels $(ARGS)

gpu-hour: $(VENV)/.dev ## Run every test and figure that needs a CUDA device, in 40 minutes; run again, it goes on where it was cut
	$(PY) -m benchmarks bench_gpu --budget-s 2400 --json gpu-hour.json --report gpu-hour.md --resume $(ARGS)

# mkdocs names every link and anchor that leads nowhere, and fetches nothing. Without REPOSITORY, such as
# https://github.com/a/b/blob/main, links to files that are no pages are plain text.
docs: $(VENV)/.dev $(VENV)-docs/.made ## Build the site of the documentation in build/site, and check its links and spelling
	$(VENV)-docs/bin/codespell *.md llms.txt client docs http_gateway/page protos
	$(PY) -m tools.site build/pages --repository "$(REPOSITORY)"
	PATH="$(abspath $(VENV))-docs/bin:$$PATH" NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs build --strict $(ARGS)

docs-version: docs ## Put the site of VERSION=0.5.0 next to other versions on the local branch gh-pages, and that into build/site.bundle
	PATH="$(abspath $(VENV))-docs/bin:$$PATH" NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mike deploy --update-aliases "$(VERSION)" latest
	$(VENV)-docs/bin/mike set-default latest
	git bundle create build/site.bundle gh-pages

protos: $(VENV)/.dev ## Lint the .proto files and regenerate the committed code, and the client's synchronous modules
	@if command -v buf >/dev/null; then echo buf lint; buf lint; \
	elif command -v npx >/dev/null; then echo npx buf lint; npx --yes --package=@bufbuild/buf@$(BUF_VERSION) buf lint; \
	else echo "buf lint is skipped: neither buf nor npx is installed"; fi
	$(PY) -m grpc_tools.protoc -I. --plugin=protoc-gen-mypy_grpc=$(VENV)/bin/protoc-gen-mypy_grpc \
		--python_out=. --pyi_out=. --grpc_python_out=. --mypy_grpc_out=quiet:. $(PROTO_FILES)
	$(PY) -m tools.client_wire --write
	$(PY) -m tools.client_twins --write

locks: $(VENV)-supply/.made ## Pin every dependency with its hashes, in locks/; ARGS="--upgrade" takes the newest that fit
	$(VENV)-supply/bin/python -m tools.locks --write $(ARGS)

sbom: $(VENV)/.runtime $(VENV)-supply/.made ## List all components of the environment as CycloneDX in lockstep.cdx.json
	$(VENV)-supply/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --output-file lockstep.cdx.json $(PY)

audit: $(VENV)-supply/.made ## Look the locked versions up among known vulnerabilities (needs pypi.org, or ARGS="-s osv")
	@for lock in dev docs engine grammar-llguidance grammar-xgrammar supply cuda; do \
		echo "locks/$$lock.txt"; \
		$(VENV)-supply/bin/pip-audit --strict --disable-pip --require-hashes --requirement locks/$$lock.txt $(ARGS) || exit 1; \
	done

wheels: $(VENV)-supply/.made ## Build the wheels in dist/ (needs gcc, and gcc-aarch64-linux-gnu); ARGS="--only x86_64 client"
	$(VENV)-supply/bin/python -m tools.wheels $(ARGS)

images: ## Build and try the container images (needs Docker or podman); ARGS="--prefix REGISTRY/PATH/ --push"
	$(PYTHON) -m tools.images $(ARGS)

release: $(VENV)-supply/.made ## Check the release VERSION=0.5.0 and write its wheels and notes to dist/; publishes nothing
	$(VENV)-supply/bin/python -m tools.release "$(VERSION)"

clean: ## Remove the virtual environment and all build outputs
	rm -rf $(VENV) $(VENV)-docs $(VENV)-supply lockstep.cdx.json build dist *.egg-info client/build client/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find $(SOURCES) \( -name __pycache__ -o -name '*.so' -o -name node_modules \) -prune -exec rm -rf {} +
