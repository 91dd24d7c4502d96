# `make demo` and `make test` work on a fresh machine that has Python 3.11 or later.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
JUNIT := build/junit
# Two workers on few cores: more threads in each would only get in each other's way.
PYTEST := OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -q -n 2 --dist loadfile

export TF_CPP_MIN_LOG_LEVEL ?= 2

BACKENDS := tensorflow torch jax
GROUPS := core $(BACKENDS:%=keras-%)
# Keras takes its backend for the whole process, so its tests run apart, once per backend.
KERAS_TESTS := tests/keras_ext tests/contract/test_keras.py keras_ext

.PHONY: demo test $(GROUPS:%=test-%) matrix lint types format bench clean
.NOTPARALLEL:

demo: $(STAMP)
	$(BIN)/python -m examples.demo

test: $(GROUPS:%=test-%)

test-core: $(STAMP)
	$(PYTEST) --junitxml=$(JUNIT)/core.xml \
		tests strategies augment lightning_ext $(KERAS_TESTS:%=--ignore=%)

$(BACKENDS:%=test-keras-%): test-keras-%: $(STAMP)
	KERAS_BACKEND=$* $(PYTEST) --junitxml=$(JUNIT)/keras-$*.xml $(KERAS_TESTS)

matrix: $(STAMP)
	rm -rf $(JUNIT)
	status=0; \
	LKX_MATRIX=1 $(MAKE) --keep-going test || status=$$?; \
	$(BIN)/python -m benchmarks.matrix $(JUNIT) benchmarks/results/matrix.md || status=$$?; \
	exit $$status

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	$(BIN)/python -m benchmarks.layerwise_lr_decay

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache demo_output
	find . -name __pycache__ -prune -exec rm -rf {} +

$(STAMP): setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=python3.12 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[all,dev]'
	touch $@
