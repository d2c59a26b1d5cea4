# One environment in .venv, installed from pyproject.toml under the pins of constraints.txt; nothing is done twice.
# `make help` lists what there is.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
EXTRAS := test,report,bench,docs,lint

.PHONY: help install demo test lint bench docs soak clean

help:  ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## */  make \1\t/' | expand -t 16

install: $(STAMP)  ## the environment alone

# Installed again when what it is made from changes. The stamp is written last: an install that was cut off is redone.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "dist_ckpt needs Python 3.11 or newer; say which: make PYTHON=python3.12 …" >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (once; about a minute)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

demo: $(STAMP)  ## train on two ranks, signal, kill, resume, prove it bit-equal (about 90 s)
	@$(BIN)/python launch/demo.py

# Most tests wait for ranks, signals and kills: three side by side keep two cores busy.
JOBS ?= 3

test: $(STAMP)  ## all tests but the slow ones and those that need a GPU
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

lint: $(STAMP)  ## ruff, mypy strict, the layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP)  ## dist_ckpt beside the machine's limits and other libraries (about 15 min; quicker: ARGS='--size 64MiB')
	$(BIN)/dist-ckpt bench $(ARGS)

docs: $(STAMP)  ## the site, warnings as errors, into site/
	$(BIN)/mkdocs build --strict

# Searches are guided by coverage where atheris has a wheel for this Python; elsewhere they mutate blindly.
soak: $(STAMP)  ## the slow tests: all, or MINUTES=60 of them
	@$(BIN)/python -c 'import atheris' 2>/dev/null || $(BIN)/python -m pip install -qq --disable-pip-version-check \
	  --only-binary :all: -c constraints.txt '.[fuzz]' || echo "atheris can't be installed: fuzzing without coverage" >&2
	DIST_CKPT_TEST_MINUTES=$(MINUTES) DIST_CKPT_TEST_ORDER=$${ORDER:-$$(date +%s)} \
	  $(BIN)/python -m pytest -n 2 --dist worksteal -o faulthandler_timeout=0 -m "slow and not gpu" $(ARGS)

clean:  ## remove the environment and what the tools left; runs/ stays
	rm -rf $(VENV) site build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
