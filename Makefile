# Installs into .venv and runs the service, its tests and its benchmarks.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || command -v python3.14 || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
# The local version selects the CPU build, which has no CUDA packages of several gigabytes.
TORCH  := 2.13.0
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
# Exact versions of all packages and the hashes of their files, so that new releases do not change what is
# tested. torch is not in them, since its builds differ by device, system and Python.
LOCKED := deploy/requirements
LOCKS  := $(foreach name,run build model encoder,-r $(LOCKED)/$(name).txt)
PIP    := $(BIN)/pip install --progress-bar on --no-deps
# uv is several times faster than pip. pip is used where uv is missing or fails, such as with options of pip's
# configuration that it lacks.
UV     := $(BIN)/python deploy/uv.py pip install --no-deps --require-hashes
GPU    := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | head -c1)
# Fraction of the parameters of linear layers to keep. 1 serves the dense model. Below 1, the model is factorized in
# the background, and the factorized model is served from the next start.
KEEP   ?= 1
UP     ?=
# Arguments of the serving benchmark.
SERVING ?=
# Duration in seconds, seed and ranks per worker of the soak, or its number of cancelled requests.
SECONDS ?= 600
TP      ?= 1
SEED    ?=
CANCELS ?=
# Additional arguments of pytest, and its number of processes: more than two cores, since tests also wait.
PYTEST ?=
JOBS   ?= 3
# Number of deployments that tests run at once.
DEPLOYMENTS ?= 2
# Additional arguments of pip-audit, such as --ignore-vuln ID.
AUDIT  ?=

# Seeds of the fault tests, one run for each.
FAULT_SEEDS ?= $(shell shuf -i 1-1000000 -n 3)

# Tests start hundreds of processes; without byte code, each would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help up down fast test test-long test-operate test-clients test-all-clients test-gpu faults check check-types check-imports check-format audit equality bench serving soak speed link-policy install clean

help:                     ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## (.*)/  \1\t\2/' | expand -t 16

up: $(VENV)/.ready        ## install, then start a deployment on loopback
	$(BIN)/headrace up --keep $(KEEP) --dense-meanwhile $(UP)

down:                     ## stop what `make up` started
	$(BIN)/headrace down

fast: $(VENV)/.ready-dev  ## unit tests only
	OMP_NUM_THREADS=1 $(BIN)/pytest tests -n $(JOBS) --dist worksteal -m "not (e2e or slow or long or gpu or operate or clients)" $(PYTEST)

test: $(VENV)/.ready-dev  ## all tests except `long`, `gpu`, `operate` and `clients`
	OMP_NUM_THREADS=1 $(BIN)/pytest tests -n $(JOBS) --dist worksteal -m "not (e2e or long or gpu or operate or clients)" $(PYTEST)
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/e2e tests/faults -n $(DEPLOYMENTS) --dist loadfile -m "e2e and not (long or gpu or operate)" $(PYTEST)

test-long: $(VENV)/.ready-dev ## tests of about ten seconds or more
	OMP_NUM_THREADS=1 $(BIN)/pytest tests -n $(JOBS) --dist loadfile -m "long and not (e2e or gpu or operate)" $(PYTEST)
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/e2e tests/faults -n $(DEPLOYMENTS) --dist loadfile -m "long and e2e and not (campaign or gpu or operate)" $(PYTEST)

test-operate: $(VENV)/.ready-dev ## images, and Prometheus, Chromium and other Debian programs against a deployment
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/operate -n $(DEPLOYMENTS) --dist loadfile -m operate $(PYTEST)

test-clients: $(VENV)/.ready-dev ## packages of openai, anthropic, LangChain and lm-eval against a deployment
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/clients -m "clients and not more_clients" $(PYTEST)

test-all-clients: $(VENV)/.ready-dev ## all clients, see services/gateway/CLIENTS.md
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/clients -m clients $(PYTEST)

faults: $(VENV)/.ready-dev ## every fault three times, with 50 restarts: FAULT_SEEDS="1 2 3"
	for seed in $(FAULT_SEEDS); do \
	  FAULT_SEED=$$seed FAULT_RESTARTS=50 OMP_NUM_THREADS=1 $(BIN)/pytest tests/faults $(PYTEST) || exit 1; \
	done

# Runs in a given interpreter without set-up: no virtual environment, no installation. Warnings are
# not errors there, since its packages and pytest plug-ins are not the ones of this project.
test-gpu:                 ## GPU tests: PYTHON=/path/to/python make test-gpu
	PYTHONPATH=$(CURDIR):$(CURDIR)/proto:$$PYTHONPATH $(PYTHON) -m pytest tests -m gpu -p no:cacheprovider -o filterwarnings=default $(PYTEST)

check: $(VENV)/.ready-dev ## formatter, linter, types, import contracts and `make audit`
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target check-types check-imports check-format audit

check-types:
	$(BIN)/mypy

check-imports:
	$(BIN)/lint-imports

check-format:
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

audit: $(VENV)/.ready-dev ## known vulnerabilities of the installed packages
	$(BIN)/python -m tests.audit $(AUDIT)

equality: $(VENV)/.ready-dev ## compare output of disaggregated and colocated workers
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.programs.equality

bench: $(VENV)/.ready-dev ## load test, disaggregated and colocated: runs/bench/report.html
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.programs.load_bench --out runs/bench

serving: $(VENV)/.ready-dev ## serving benchmark, see tests/programs/README.md: runs/serving/report.html
	$(BIN)/python -m tests.programs.serving_bench $(SERVING)

soak: $(VENV)/.ready-dev ## load, cancellations and faults; SECONDS=600 SEED=1 or CANCELS=10000
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.programs.soak --seconds $(SECONDS) \
	  --tp $(TP) $(if $(SEED),--seed $(SEED)) $(if $(CANCELS),--cancels $(CANCELS))

speed: $(VENV)/.ready-dev ## speed on one core, compared with transformers
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.programs.speed

link-policy: $(VENV)/.ready-dev ## KV transfer by codec setting on throttled links
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.programs.link_policy

install: $(VENV)/.ready   ## install the package, the default model and encoder

$(VENV)/bin/pip:
	@test -n "$(PYTHON)" && $(PYTHON) -c \
	  'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' \
	  || { echo "Python 3.11 to 3.14 is needed; PYTHON=/path/to/python3.13 make ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.torch: | $(VENV)/bin/pip
ifeq ($(GPU),)
	$(BIN)/pip install --progress-bar on --no-compile "torch==$(TORCH)+cpu" \
	  || $(BIN)/pip install --progress-bar on --no-compile --index-url $(TORCH_CPU_INDEX) "torch==$(TORCH)+cpu"
else
	$(BIN)/pip install --progress-bar on --no-compile "torch==$(TORCH)"
endif
	@touch $@

$(VENV)/.uv: | $(VENV)/bin/pip
	sed -n '/^uv==/,/[^\\]$$/p' $(LOCKED)/dev.txt > $@.txt
	-$(PIP) --require-hashes -r $@.txt
	@touch $@

$(VENV)/.ready: pyproject.toml $(wildcard $(LOCKED)/*.txt) proto/build_stubs.py $(wildcard proto/headrace/v1/*.proto) | $(VENV)/.torch $(VENV)/.uv
	$(UV) $(LOCKS) || $(PIP) --require-hashes $(LOCKS)
	$(PIP) --no-build-isolation -e .
	@touch $@

$(VENV)/.ready-dev: $(VENV)/.ready
	$(UV) -r $(LOCKED)/dev.txt || $(PIP) --require-hashes -r $(LOCKED)/dev.txt
	@touch $@

clean:                    ## remove the virtual environment and caches
	rm -rf $(VENV) .operate .clients .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
