# Every target works from a clean clone: the first one that runs makes .venv, later ones install nothing.

PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.installed
LOCK := requirements/cpu.txt requirements/dev.txt

.DEFAULT_GOAL := help
.PHONY: help setup quickstart test test-all test-fast test-gpu bench learn lint smollm2 world

help:
	@echo "make setup       create $(VENV) with everything pinned (about 3 minutes, once)"
	@echo "make quickstart  see a language model get better by RLHF, on a CPU"
	@echo "make test        the tests that every change must pass"
	@echo "make test-all    and the longest ones: runs over several nodes, predictions of the pages, what DeepSpeed keeps in memory"
	@echo "make test-fast   the tests that need neither Ray nor vLLM"
	@echo "make test-gpu    what only a GPU can tell: PYTHON=… names a Python with torch for CUDA, transformers and peft (5 minutes)"
	@echo "make bench       measure speed against what is to be reached (about 20 minutes; leave the machine alone meanwhile)"
	@echo "make learn       six methods learn the quickstart's task, three seeds each (half an hour; runs quickstart first if need be)"
	@echo "make world       every method with the same budget of samples, in a world whose true reward is known (about 20 minutes)"
	@echo "make lint        ruff and mypy"
	@echo "make smollm2     SmolLM2-135M on a CPU: three updates each of SFT, DPO and KTO, then two GRPO steps (a few minutes)"

setup: $(STAMP)

$(STAMP): $(LOCK) requirements/install.sh pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or later is needed; name it with PYTHON=..."; exit 2; }
	@bash requirements/install.sh "$(PYTHON)" $(VENV) $(LOCK)
	@touch $@

quickstart: $(STAMP)
	@$(RUN) -m conveyor.cli quickstart

# One thread a process: the tests start several processes, and more threads than cores slow all of them.
test: export OMP_NUM_THREADS := 1
test: $(STAMP)
	$(RUN) -m pytest

test-all: export OMP_NUM_THREADS := 1
test-all: $(STAMP)
	$(RUN) -m pytest -m ""

test-fast: export OMP_NUM_THREADS := 1
test-fast: $(STAMP)
	$(RUN) -m pytest -m "not slow"

# Needs nothing of this project installed, so that it runs wherever there is a GPU.
test-gpu:
	$(PYTHON) tests/gpu/checks.py --json gpu-checks.json

bench: $(STAMP)
	@$(RUN) -m benchmarks

learn: $(STAMP)
	@$(RUN) -m benchmarks.learn

world: $(STAMP)
	@$(RUN) -m benchmarks.world

lint: $(STAMP)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	nice $(RUN) -m mypy

smollm2: $(STAMP)
	$(RUN) examples/smollm2/fetch.py
	for method in sft dpo kto grpo; do $(RUN) -m conveyor.cli train recipes/smollm2_$$method.yaml --overwrite true || exit; done
