# Two commands do all set-up on a machine with Python 3.11+, make and pip: `make run` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# Tests of numbers must hold on other processors, with other threads and with other random numbers.
NUMERICAL := $(foreach name,methods caden forms auto_steps conformance lbfgs solvers theory problems messages copies guarantees network networks models clock run schedules graphs rivals compiled,tests/test_$(name).py)
VARIANTS ?= ATEN_CPU_CAPABILITY=default ATEN_CPU_CAPABILITY=avx2 MKL_CBWR=COMPATIBLE OPENBLAS_CORETYPE=Haswell \
	OPENBLAS_CORETYPE=Nehalem CADEN_COMPILED=off CADEN_TEST_THREADS=2 CADEN_TEST_THREADS=4 CADEN_TEST_SEED=1 CADEN_TEST_SEED=2

.PHONY: run test test-all test-portable lint bench clean

run: $(VENV)/installed
	$(BIN)/caden run

test: $(VENV)/installed-test
	$(BIN)/python -m pytest -n 2 --dist loadgroup

test-all: $(VENV)/installed-test
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m ""

test-portable: $(VENV)/installed-test
	@for variant in $(VARIANTS); do \
		echo "== $$variant"; env $$variant $(BIN)/python -m pytest -n 2 --dist loadgroup $(NUMERICAL) || exit 1; \
	done

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
