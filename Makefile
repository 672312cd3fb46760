# The study's commands. Each works in a fresh clone: .venv is made when it is missing or outdated.
PYTHON ?= python3
BIN := .venv/bin

help:  ## list these commands
	@grep -E '^[a-z]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 12

study: .venv/.installed  ## train the quick study on two cores, in minutes; figures, tables, multipliers
	@$(BIN)/python -m q0lib.study

test: .venv/.installed  ## lint, types, tests
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/python -m pytest -n 2

mutants: .venv/.installed  ## break the code in small ways, one at a time: which test notices?
	@$(BIN)/python tests/mutants.py

notebooks: .venv/.installed  ## run every narrative notebook afresh and store its outputs
	@$(BIN)/python -m q0lib.sweeps.refresh

bench: .venv/.installed  ## training speed against this machine's matrix products
	@$(BIN)/python -m q0lib.bench

lab: .venv/.installed  ## open the notebooks
	@$(BIN)/jupyter lab notebooks

# environment.yml holds the pins; pip reads them as constraints on what pyproject.toml asks for.
.venv/.installed: pyproject.toml environment.yml
	@echo "installing into .venv (a minute or two)"
	@$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), f"Python 3.11 or later is needed, this is {sys.version}"'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@sed -nE 's/^ +- ([A-Za-z0-9_.-]+==[^ ]+).*/\1/p' environment.yml > .venv/constraints.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' .venv/constraints.txt)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c .venv/constraints.txt -e '.[dev]'
	@touch $@

.PHONY: help study test mutants notebooks bench lab
