# Needs only Python 3.11 to 3.13 and make. Everything lands in .venv; nothing outside the repository is touched.

PYTHON ?= $(firstword $(foreach p,python3 python3.13 python3.12 python3.11 python,$(shell \
	$(p) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null && echo $(p))))
BIN := .venv/bin
STAMP := .venv/installed
CACHE := $(CURDIR)/.venv/cache

# Tools keep their caches inside .venv, so that a run leaves the working tree as it was.
export PYTHONPYCACHEPREFIX := $(CACHE)/pyc
export MYPY_CACHE_DIR := $(CACHE)/mypy
export RUFF_CACHE_DIR := $(CACHE)/ruff
export HYPOTHESIS_STORAGE_DIRECTORY := $(CACHE)/hypothesis
export PYTHONUNBUFFERED := 1
# Otherwise each of the many processes that the tests start would compile all of Temper again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup up demo test lint proto bench clean

help: ## show this list
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

setup: $(STAMP) ## create .venv with everything pinned in constraints.txt

# Not compiled: most of the packages' 16,000 files are never imported, and the first import compiles the others.
$(STAMP): pyproject.toml constraints.txt
	@if [ -z "$(PYTHON)" ]; then \
		echo "error: Temper needs Python 3.11, 3.12 or 3.13, and found none of them on PATH." >&2; \
		echo "       Install one, or name it: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)" >&2; exit 1; fi
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing into .venv (about a minute and 2 GB the first time)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[gateway,engine,cli,local,dev]'
	@# Without its dependencies: it asks for older rich and jiter than the rest, and runs with these (test_frameworks.py).
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps -c constraints.txt instructor
	@touch $@

up: setup ## start everything on http://localhost:8420
	@$(BIN)/temper up

demo: setup ## start everything, watch the model learn, stop
	@$(BIN)/temper demo

lint: setup ## style, types, generated code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers 2
	$(BIN)/python proto/generate.py --check

# Three processes for two cores: one has all tests of a whole Temper (tests/conftest.py), the others the rest, of which
# those of a real server mostly wait for it. One thread in each, or threads would wait for each other.
test: lint ## lint, then all tests; 12 to 18 minutes on 2 cores
	@scratch=$$(mktemp -d) && \
	if OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --basetemp="$$scratch/test" $(ARGS); \
	then rm -rf "$$scratch"; else status=$$?; echo "left for inspection: $$scratch" >&2; exit $$status; fi

proto: setup ## regenerate the protobuf stubs
	$(BIN)/python proto/generate.py

bench: setup ## speed on this machine, written to benchmarks/results
	$(BIN)/python -m benchmarks.bench

clean: ## remove .venv and local data
	rm -rf .venv .temper build *.egg-info
