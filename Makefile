# Every target makes its own set-up; `make quickstart` and `make test` are all a new user needs.
SHELL := /bin/bash
PYTHON := .venv/bin/python
TODAY := .venv-today/bin/python
export LITELLM_LOCAL_MODEL_COST_MAP := True
# What of the tests touches verifiers and harbor: it runs on both pairs of versions.
BOTH_PAIRS := tests/sandbox tests/trials tests/tasks tests/environment tests/e2e/test_outcomes*.py tests/e2e/test_plugin*.py

.PHONY: help setup setup-today quickstart test lint unit today bench clean

help:
	@echo "make quickstart   train a tiny policy on real Harbor trials, in minutes, on a CPU"
	@echo "make test         lint, types, unit tests and end-to-end tests, on both pairs of verifiers and harbor"
	@echo "make lint         ruff and ty"
	@echo "make bench        the benchmarks (some minutes each)"

setup:
	@tools/setup

setup-today: setup
	@UV_PROJECT_ENVIRONMENT=.venv-today .tools/uv sync --quiet --frozen --no-default-groups --group dev --group pair-today

quickstart: setup
	$(PYTHON) -m src.train --config configs/quickstart.toml

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/ty check

unit: setup
	$(PYTHON) -m pytest tests

today: setup-today
	$(TODAY) -m pytest $(BOTH_PAIRS)

test: lint unit today

bench: setup
	$(PYTHON) benchmarks/trials.py
	.tools/uv run --frozen --extra local --group bench benchmarks/engine.py

clean:
	rm -rf .venv .venv-today .tools outputs
