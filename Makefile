# Two commands on a fresh machine with Python 3.11 or later: `make demo` and `make test`. Both set up .venv themselves.
PYTHON ?= python3
BIN := .venv/bin
LOWEST := .venv-lowest
EXTRAS := hf,smp,export,track,det,video,serve
PYTEST := -m pytest -n 2 --dist worksteal

# `make test-gpu PYTHON=python3` takes an interpreter that has all it needs already, and installs nothing.
ifneq ($(filter command environment,$(origin PYTHON)),)
GPU_PYTHON := $(PYTHON)
else
GPU_PYTHON := $(BIN)/python
GPU_NEEDS := .venv/dev
endif

.PHONY: demo test test-slow test-gpu test-lowest test-interop lint docs clean

demo: .venv/core
	$(BIN)/pale doctor
	$(BIN)/pale cost --paper
	$(BIN)/pale info pale_tiny --size 224 224
	$(BIN)/pale demo -o runs/demo

test: lint
	$(BIN)/python $(PYTEST) -m "not slow and not gpu"

test-slow: .venv/dev
	$(BIN)/python $(PYTEST) -m "slow and not gpu"

# Fails where a family of kernels has not run, so without a GPU too. GPU_OPTIONS="-n 8" takes eight processes, which
# pytest-benchmark, where it is installed, would turn into an error.
test-gpu: $(GPU_NEEDS)
	PYTHONPATH=$(CURDIR)/src$${PYTHONPATH:+:$$PYTHONPATH} \
	  $(GPU_PYTHON) -m pytest -p no:benchmark -m gpu $(GPU_OPTIONS) --every-family --record=benchmarks/results/test_gpu.md

# The fast suite with the oldest versions of all dependencies that pyproject.toml allows.
test-lowest: $(LOWEST)/done
	$(LOWEST)/bin/python $(PYTEST) -m "not slow and not gpu" --record=benchmarks/results/versions.md

# Third-party clients, some in environments of their own; writes benchmarks/results/interop.json and docs/works-with.md.
test-interop: .venv/dev
	$(BIN)/python benchmarks/interop.py

docs: .venv/dev
	$(BIN)/mkdocs build --strict

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell .
	$(BIN)/python tools/retired_words.py
	$(BIN)/lint-imports
	$(BIN)/mypy

.venv/core: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable '.[det]'
	touch $@

.venv/dev: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch .venv/core $@

# The second line adds the tools of the tests and leaves what is there as it is.
$(LOWEST)/done: pyproject.toml
	test -x $(LOWEST)/bin/uv || { $(PYTHON) -m venv $(LOWEST) && $(LOWEST)/bin/pip install --quiet uv; }
	$(LOWEST)/bin/uv pip install --python $(LOWEST) --resolution lowest-direct --editable '.[$(EXTRAS)]'
	$(LOWEST)/bin/uv pip install --python $(LOWEST) --editable '.[$(EXTRAS),test]'
	touch $@

clean:
	rm -rf .venv .venv-interop $(LOWEST) build dist runs site
