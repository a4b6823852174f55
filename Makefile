# What people run. Everything sets up .venv by itself; nothing but Python 3.11+ has to be there before.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Tests run small models beside a server and an event loop: one thread that sleeps when idle is fastest,
# several that spin for each other on busy cores are slower by orders of magnitude.
TEST_ENV := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

.PHONY: help setup demo test test-slow chaos check tiny constraints redis clean

help: ## list these targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: $(READY) ## make .venv with everything (the other targets do it by themselves)

demo: $(READY) ## serve a small chat model to a dozen jobs on this machine and watch the batch
	@$(BIN)/chairlift demo

test: $(READY) redis ## all quick tests, on Valkey and, where it can be had, Redis
	@$(TEST_ENV) $(BIN)/pytest -m "not slow"

test-slow: $(READY) redis ## the long tests: real models, fresh installations
	@$(TEST_ENV) $(BIN)/pytest -m slow --timeout 1800

chaos: $(READY) redis ## everything goes wrong for MINUTES (30), from a SEED if given; a table at the end
	@$(TEST_ENV) PYTHONPATH=tests $(BIN)/python -m chaos.run --minutes $(or $(MINUTES),30) \
	    $(if $(SEED),--seed $(SEED)) $(CHAOS)

check: $(READY) ## lint, format and types
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy

tiny: $(READY) ## train the tiny model of the tests again (minutes)
	@$(TEST_ENV) PYTHONPATH=tests $(BIN)/python -m tiny.train

constraints: $(READY) ## write constraints.txt from what is installed in .venv
	@$(BIN)/pip freeze --exclude-editable | deploy/constraints-from-freeze > constraints.new
	@mv constraints.new constraints.txt

# The embedded Valkey comes with the installation. Redis does not: it is installed where that needs no
# question asked, else the tests go without.
redis:
	@if command -v redis-server > /dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
	    echo "installing redis-server for the tests"; \
	    (apt-get update -qq && DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 \
	        apt-get install -qq --no-install-recommends redis-server) > /dev/null 2>&1 \
	        || echo "redis-server could not be installed: testing on Valkey alone"; \
	else echo "redis-server is not installed: testing on Valkey alone"; fi

clean: ## remove what was built, but for the model cache
	@rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=")'
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV) \
	    || { echo "cannot make $(VENV): on Debian and Ubuntu, install python3-venv"; exit 1; }
	@echo "installing into $(VENV) (the first time takes minutes: torch alone is large)"
	@$(BIN)/pip install --disable-pip-version-check --no-input -e '.[dev]' -c constraints.txt 2> $(VENV)/install.log \
	    | awk '/^Collecting|^Installing/ { printf "."; fflush() } END { print "" }' \
	    || { tail -20 $(VENV)/install.log; exit 1; }
	@touch $@
