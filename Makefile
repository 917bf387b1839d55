# Needs only Python 3.11 to 3.13 and make. Everything lands in .venv; nothing outside the repository is touched.

PYTHON ?= $(firstword $(foreach p,python3 python3.13 python3.12 python3.11 python,$(shell \
	$(p) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null && echo $(p))))
BIN := .venv/bin
STAMP := .venv/installed
CLIENTS := .venv/clients/installed
CACHE := $(CURDIR)/.venv/cache
COMPILED := .venv/cache/compiled

# Tools keep their caches inside .venv, so that a run leaves the working tree as it was.
export PYTHONPYCACHEPREFIX := $(CACHE)/pyc
export MYPY_CACHE_DIR := $(CACHE)/mypy
export RUFF_CACHE_DIR := $(CACHE)/ruff
export HYPOTHESIS_STORAGE_DIRECTORY := $(CACHE)/hypothesis
export PYTHONUNBUFFERED := 1
# Otherwise each of the many processes that the tests start would compile all of Temper again.
unexport PYTHONDONTWRITEBYTECODE

# Images: `make images TAG=1.2.3 REGISTRY=registry.example.com/ IMAGE_ARGS="--build-arg VARIANT=cpu"`, docs/guides/images.md.
IMAGES := gateway engine
REGISTRY ?=
IMAGE_ARGS ?=
IMAGE_SOURCE ?= unknown
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
TAG ?= $(VERSION)
REVISION = $(shell git rev-parse HEAD 2>/dev/null || echo unknown)
CREATED = $(shell TZ=UTC0 git log -1 --date=format-local:%Y-%m-%dT%H:%M:%SZ --format=%cd 2>/dev/null || echo unknown)
SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null || echo 0)
DOCKER ?= $(shell command -v docker >/dev/null 2>&1 && docker info >/dev/null 2>&1 && echo docker || echo buildah)
BUILD_docker = docker build
BUILD_buildah = buildah build --isolation chroot --format docker --timestamp $(SOURCE_DATE_EPOCH)
# pip's variables go along where they are set; its configuration file goes as a secret, for it may have a password.
PIP_ARGS = $(foreach v,PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_NO_INDEX,$(if $($v),--build-arg $v)) \
	$(if $(PIP_CONFIG_FILE),--secret id=pip.conf$(comma)src=$(PIP_CONFIG_FILE)) \
	$(if $(WHEELS),--build-context wheels=$(WHEELS))
comma := ,

.PHONY: help setup clients up demo test test-all lint style fix hooks docs proto bench clean images images-check

help: ## show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

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

clients: $(CLIENTS) ## install the clients from npm and PyPI that tests run, 2.1 GB, in .venv

$(CLIENTS): $(STAMP) $(addprefix tests/conformance/clients/,package.json package-lock.json requirements.txt)
	@$(BIN)/python -m tests.conformance.clients.install
	@touch $@

up: setup ## start everything on http://localhost:8420
	@$(BIN)/temper up

demo: setup ## start everything, watch the model learn, stop
	@$(BIN)/temper demo

lint: style ## style, types, generated code
	$(BIN)/python -m observability.generate --check
	$(BIN)/python -m docs_tools.generate --check

style: setup # the part of lint that no test has: tests/unit/docs and tests/unit/observability have the other
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers 2
	$(BIN)/python proto/generate.py --check

# Once in an environment: each of the four processes of `make test` would compile all that tests import by itself.
$(COMPILED): $(STAMP)
	@found=$$($(BIN)/python -m pytest --collect-only -qq 2>&1) || { echo "$$found" >&2; exit 1; }
	@touch $@

fix: setup ## style mended, generated files written anew
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python proto/generate.py
	$(BIN)/python -m observability.generate
	$(BIN)/python -m docs_tools.generate
	$(BIN)/python -m tests.chart.values_docs

hooks: setup ## have git run `make fix`'s quick part before each commit
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt pre-commit
	$(BIN)/pre-commit install

# Four processes for two cores: two have the tests of a whole Temper (tests/conftest.py), which wait for its processes
# half of the time, and then help the others with the rest. One thread in each, or threads would wait for each other.
# Lint runs beside them, in the time that they wait; what it says comes last.
define run_tests
@scratch=$$(mktemp -d); $(MAKE) --no-print-directory style >"$$scratch/style" 2>&1 & style=$$!; \
trap 'kill $$style' INT TERM; $(MAKE) --no-print-directory $(COMPILED) && \
OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 4 --durations=10 --basetemp="$$scratch/test" $(1) $(ARGS); tests=$$?; \
wait $$style; style=$$?; cat "$$scratch/style"; \
if [ $$tests = 0 ] && [ $$style = 0 ]; then rm -rf "$$scratch"; else echo "left for inspection: $$scratch" >&2; exit 1; fi
endef

test: $(CLIENTS) ## lint, and a test of every promise; ARGS=--write-costs records what files take
	$(call run_tests,-m "not thorough")

test-all: $(CLIENTS) ## lint and all tests, some 45 minutes on 2 cores
	$(call run_tests)

docs: setup ## the documentation as a site in build/site, links checked
	@$(BIN)/python -c 'import material' 2>/dev/null || \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[docs]'
	@NO_MKDOCS_2_WARNING=1 PYTHONPATH=. $(BIN)/python -m mkdocs build --strict --quiet
	@echo "build/site/index.html"

proto: setup ## regenerate the protobuf stubs
	$(BIN)/python proto/generate.py

bench: setup ## speed on this machine, written to benchmarks/results
	$(BIN)/python -m benchmarks.serving.bench

images: ## build the images temper/gateway and temper/engine with docker or buildah
	@set -e; for name in $(IMAGES); do \
		SOURCE_DATE_EPOCH=$(SOURCE_DATE_EPOCH) $(BUILD_$(DOCKER)) $(PIP_ARGS) \
			--build-arg VERSION=$(VERSION) --build-arg REVISION=$(REVISION) --build-arg CREATED=$(CREATED) \
			--build-arg SOURCE=$(IMAGE_SOURCE) --build-arg SOURCE_DATE_EPOCH=$(SOURCE_DATE_EPOCH) $(IMAGE_ARGS) \
			--tag $(REGISTRY)temper/$$name:$(TAG) --file services/$$name/Dockerfile .; \
	done

images-check: setup ## build images on a bootstrapped Debian, look into them, run them (root; ENGINE=1: the engine, too)
	$(BIN)/python -m images.check $(if $(ENGINE),--engine)

clean: ## remove .venv and local data
	rm -rf .venv .temper build *.egg-info
