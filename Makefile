# Two commands on a fresh machine with Python 3.11 or later: `make demo` and `make test`. Both set up .venv themselves.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint docs clean

demo: .venv/core
	$(BIN)/pale doctor
	$(BIN)/pale cost --paper
	$(BIN)/pale info pale_tiny --size 224 224
	$(BIN)/pale demo -o runs/demo

test: lint
	$(BIN)/python -m pytest -n 2 --dist worksteal

docs: .venv/dev
	$(BIN)/mkdocs build --strict

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell .
	$(BIN)/mypy

.venv/core: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable '.[det]'
	touch $@

.venv/dev: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch .venv/core $@

clean:
	rm -rf .venv build dist runs site
