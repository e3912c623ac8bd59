# The two commands of a newcomer are `make demo` and `make test`; each sets up what it needs in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := pyproject.toml setup.py src/kvbaton/transports/_mover.c

.PHONY: demo test check lint types layers unit coverage runtime processes sim mutants bench docs clean

demo: $(VENV)/.serve
	@$(BIN)/kvbaton up --check
	@echo
	@echo "To go on:   $(BIN)/kvbaton up                     a cluster to talk to, at http://127.0.0.1:8000"
	@echo "            $(BIN)/kvbaton up --prefill 2 --decode 2 --mode push"
	@echo "            $(BIN)/kvbaton sim --seeds 0..199      two hundred clusters under faults"
	@echo "            make test                          everything this project claims, checked"

# Everything: about six minutes on two cores.
test: lint types layers coverage runtime sim processes mutants

# Often: under two minutes.
check: lint types layers unit sim

lint: $(VENV)/.dev
	$(BIN)/ruff check src tests tools
	$(BIN)/ruff format --check src tests tools

types: $(VENV)/.dev
	$(BIN)/mypy

layers: $(VENV)/.dev
	$(BIN)/lint-imports --no-cache

unit: $(VENV)/.dev
	$(BIN)/pytest -n 2 tests/protocol tests/scenarios tests/runtime tests/sim

# Branch coverage of the protocol, by its own tests alone: 100 % or the build fails.
coverage: $(VENV)/.dev
	$(BIN)/pytest -n 2 --cov --cov-report= tests/protocol tests/scenarios
	$(BIN)/coverage report

runtime: $(VENV)/.dev
	$(BIN)/pytest -n 2 tests/runtime tests/sim

# Real sockets, real processes, a real model.
processes: $(VENV)/.dev
	$(BIN)/pytest -n 2 tests/engine tests/transports tests/control tests/api tests/router tests/cli
	$(BIN)/pytest tests/e2e

sim: $(VENV)/.dev
	$(BIN)/kvbaton sim --seeds 0..149

mutants: $(VENV)/.dev
	$(BIN)/kvbaton sim --mutants

bench: $(VENV)/.serve
	$(BIN)/kvbaton bench transfer

docs: $(VENV)/.dev
	$(BIN)/python tools/protocol_docs.py

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "kvbaton needs Python 3.11 or newer; name one: make PYTHON=python3.11 demo"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.serve: $(VENV)/bin/python $(SOURCES)
	$(BIN)/pip install -q --disable-pip-version-check -e '.[serve]'
	@touch $@

$(VENV)/.dev: $(VENV)/bin/python $(SOURCES)
	$(BIN)/pip install -q --disable-pip-version-check -e '.[serve,dev]'
	@touch $@ $(VENV)/.serve

clean:
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage
