# Two commands do it all: `make run` trains, `make test` tests. Both set up what they need.
PYTHON ?= python3
NAME ?= llama-$(shell date +%Y%m%d-%H%M%S)
RECIPE ?=
ARGS ?=
BIN := .venv/bin
READY := .venv/.ready

.DEFAULT_GOAL := help
.PHONY: help run test test-fast check fix bench clean

help:  ## show this
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(READY): requirements.lock pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	$(BIN)/python -m raydist.train.environment
	touch $@

run: $(READY)  ## set up, start a local Ray, submit the main job, follow it (RECIPE=, NAME=, ARGS=)
	@exec $(BIN)/raydist submit jobs/llama_zero3.py $(RECIPE) --name $(NAME) --storage $(CURDIR)/runs $(ARGS)

test: $(READY) check  ## set up and pass every test
	$(BIN)/python -m pytest

test-fast: $(READY)  ## unit, contract and architecture tests only
	$(BIN)/python -m pytest tests/unit tests/contract tests/architecture

check: $(READY)  ## lint, format, types, import arrows; edits nothing
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/pyright && $(BIN)/lint-imports

fix: $(READY)  ## let the linter mend and format
	$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

bench: $(READY)  ## measure against the rivals; docs/benchmarks.md has the results
	$(BIN)/python tests/bench/main_job.py

clean:  ## remove the environment and local runs
	rm -rf .venv runs
