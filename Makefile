# Every task of the project. CI calls the same targets.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
PIP := $(BIN)/pip --disable-pip-version-check
# Editable installs of the Rust packages, in the one cargo profile that tests use too. maturin must
# be on PATH because build isolation is off: nothing is fetched to compile a changed line.
RUST_INSTALL := PATH="$(CURDIR)/$(BIN):$$PATH" MATURIN_PEP517_ARGS="--profile dev" \
	$(PIP) install --quiet --no-build-isolation --no-deps -e ./kernels -e ./frontend
RUST_SOURCES := Cargo.toml Cargo.lock rust-toolchain.toml \
	$(shell find frontend kernels -name '*.rs' -o -name 'Cargo.toml' -o -name 'pyproject.toml')
HOST ?= 127.0.0.1
PORT ?= 8000
MODEL ?= smollm2

.DEFAULT_GOAL := help
.PHONY: help serve test setup setup-torch setup-test setup-lint build check-tools lint fmt proto goldens bench bench-cpu bench-frontend bench-sampling bench-sched size wheels clean

help: ## Show this list
	@grep -hE '^[a-z][a-z-]*:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

serve: setup ## Build what is missing, fetch the model once, serve it: make serve [MODEL=…] [PORT=…]
	@exec $(BIN)/rung serve $(MODEL) --host $(HOST) --port $(PORT)

test: setup-test ## Run every test that this machine can run, fast tiers first
	@$(PY) -m tests.run

setup: $(VENV)/.setup-serve build ## Prepare .venv for CPU serving: the engine, the frontend, the kernels

setup-torch: $(VENV)/.setup-torch build ## Add torch, for the float32 reference runner

setup-test: $(VENV)/.setup-test build

setup-lint: $(VENV)/.setup-lint

build: $(VENV)/.build ## Compile the Rust packages into .venv (a second without changes)

check-tools:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "Rung needs Python 3.10 or newer; %s is %d.%d. Set PYTHON=." % (sys.executable, *sys.version_info[:2]))'
	@command -v cargo >/dev/null || { echo 'Rung needs Rust 1.95 or newer: no cargo on PATH (install rustup).' >&2; exit 1; }
	@command -v cc >/dev/null || { echo 'Rung needs a C compiler: no cc on PATH (Debian: apt install build-essential).' >&2; exit 1; }

$(VENV)/.base: constraints.txt | check-tools
	@echo '== Creating $(VENV)'
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@$(PIP) install --quiet -c constraints.txt maturin hatchling editables
	@touch $@

$(VENV)/.setup-serve: pyproject.toml constraints.txt $(VENV)/.base
	@echo '== Installing Python packages (200 MB; make setup-torch adds what the reference runner needs)'
	@$(PIP) install --quiet --no-build-isolation -c constraints.txt -e .
	@touch $@

$(VENV)/.setup-torch: $(VENV)/.setup-serve
	@echo '== Installing torch (some minutes, 5 GB)'
	@$(PIP) install --quiet --no-build-isolation -c constraints.txt -e '.[torch]'
	@touch $@

$(VENV)/.setup-test: $(VENV)/.setup-torch
	@echo '== Installing test packages'
	@$(PIP) install --quiet --no-build-isolation -c constraints.txt -e '.[torch,test]'
	@touch $@

$(VENV)/.setup-lint: $(VENV)/.setup-torch
	@echo '== Installing lint packages'
	@$(PIP) install --quiet --no-build-isolation -c constraints.txt -e '.[torch,test,lint]'
	@touch $@

$(VENV)/.build: $(RUST_SOURCES) $(VENV)/.base
	@echo '== Compiling the Rust packages (about 5 minutes on 2 cores the first time)'
	@$(RUST_INSTALL)
	@touch $@

lint: setup-lint build ## ruff, mypy, import rules, rustfmt, clippy, buf, file sizes
	@$(PY) -m tests.lint

fmt: setup-lint ## Format Python and Rust
	@$(BIN)/ruff format engine kernels/rung_kernels tests
	@$(BIN)/ruff check --fix --quiet engine kernels/rung_kernels tests
	@cargo fmt

proto: setup-test ## Regenerate the protobuf code of both sides
	@$(PY) -m tests.contract.codegen
	@RUNG_REGENERATE=1 cargo test --quiet -p rung-frontend --test codegen

goldens: setup-test ## Recompute tests/golden with transformers (minutes)
	@$(PY) -m tests.golden.make_golden

bench: setup-test ## Output tok/s, TTFT and TPOT at 1, 4 and 16 users, beside the machine's limits
	@$(PY) -m tests.bench.serving

bench-cpu: setup-test ## Native CPU runner: prefill and decode beside the machine's own limits
	@$(PY) -m tests.bench.cpu --model $(MODEL)

bench-frontend: check-tools ## The frontend before a mock engine: CPU, memory, added latency at 1 to 4,096 streams
	@cargo bench --quiet -p rung-frontend --bench frontend

bench-sampling: setup-test ## Host cost of choosing a token by parameter, and of a grammar's masks
	@$(PY) -m tests.bench.sampling

bench-sched: setup-test ## The scheduler against the usual policies, simulated on traces (3 minutes)
	@$(PY) -m tests.bench.sched

size: ## The longest source files
	@git ls-files '*.py' '*.rs' ':!*/gen/*' | xargs wc -l | sort -rn | head -20

wheels: $(VENV)/.base ## Release wheels of the three packages in dist/
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(PIP) wheel --quiet --no-build-isolation --no-deps -w dist . ./kernels ./frontend
	@ls -1 dist

clean: ## Remove everything that was built
	rm -rf $(VENV) target dist
