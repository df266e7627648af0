# Two commands do all set-up on a machine with Python 3.11+, make and pip: `make run` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: run test test-all lint bench clean

run: $(VENV)/installed
	$(BIN)/caden run

test: $(VENV)/installed-test
	$(BIN)/python -m pytest -n 2 --dist loadgroup

test-all: $(VENV)/installed-test
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m ""

lint: $(VENV)/installed-test
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

bench: $(VENV)/installed
	$(BIN)/caden bench

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e .
	touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(PIP) -e ".[test]"
	touch $@
