# Everything a newcomer or CI needs; each target sets itself up first.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
BASE   := $(VENV)/.windlass-base
DEV    := $(VENV)/.windlass-dev
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help setup demo test test-full run-tests test-gpu lint quick-lint format docs pictures clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

setup: $(DEV)  ## a virtual environment in .venv with the pinned packages, those of the tests too

$(BASE): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing windlass and the packages that it needs, pinned, into $(VENV) (a minute or two the first time)"
	@$(BIN)/pip install --quiet -c constraints.txt 'setuptools>=77'
	@$(BIN)/pip install --quiet -c constraints.txt --no-build-isolation -e .
	@$(BIN)/python -m compileall -q src  # else the first command of all compiles them
	@touch $@

$(DEV): $(BASE)
	@echo "installing the packages of the tests, pinned, into $(VENV) (a few minutes the first time)"
	@$(BIN)/pip install --quiet -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@

demo: $(BASE)  ## train the embedded default on this machine, then show curve, sample and report
	@$(BIN)/windlass train quickstart

test: MARKED := not full and not gpu
test-full: MARKED := not gpu
test: run-tests  ## what CI runs
test-full: run-tests  ## with the slower proofs

# mypy has one core busy for half a minute: it runs beside the tests
run-tests: quick-lint
	@$(BIN)/mypy >$(VENV)/mypy.txt 2>&1 & types=$$!; \
		$(BIN)/pytest -n logical --durations=25 -m "$(MARKED)"; code=$$?; \
		wait $$types || code=1; cat $(VENV)/mypy.txt; exit $$code

test-gpu:  ## on a machine with a CUDA device: no set-up; python3 has or PYTHONPATH holds the packages
	export PYTHONPATH=$(CURDIR)/src:$$PYTHONPATH CUBLAS_WORKSPACE_CONFIG=:4096:8; timed=tests/gpu/test_telemetry_gpu.py; \
		$(PYTHON) -m pytest -m gpu -n 6 tests/gpu --ignore=$$timed --durations=10; code=$$?; \
		$(PYTHON) -m pytest -m gpu $$timed && exit $$code

lint: quick-lint  ## style, types, layers, lengths, generated pages
	$(BIN)/mypy

quick-lint: $(DEV)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports --no-cache
	$(BIN)/python tools/shape.py
	$(BIN)/python docs/generate.py --check

format: $(DEV)  ## make the style so
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(DEV)  ## the generated pages, and the site of the documentation in site/
	$(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "open site/index.html; with a search: python3 -m http.server -d site"

pictures: $(DEV)  ## the pictures of the README and the docs: needs an idle machine, Chromium and tmux
	$(BIN)/python docs/pictures.py $(if $(TEXT),--text $(TEXT))

clean:  ## remove the environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache build site
