# Two commands set everything up by themselves: `make train` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
RUN ?= default

.PHONY: train test check clean

train: $(VENV)/.installed ## the main job: judge, split both ways, train
	$(BIN)/outsize demo --name $(RUN)

test: $(VENV)/.installed ## the tests
	$(BIN)/python -m pytest

check: $(VENV)/.installed ## style, types and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean: ## remove the virtual environment and everything runs wrote
	rm -rf $(VENV) runs

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "outsize needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Try: make PYTHON=python3.11 $(MAKECMDGOALS)")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[hf,dev]"
	@touch $@
