# `make demo` and `make test` set up all they need; see CONTRIBUTING.md.
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEV := $(VENV)/.ready-dev
DRIVERS := gvisor qemu bubblewrap

.DEFAULT_GOAL := help
.PHONY: help demo test check bench format

help: ## what there is to do
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(READY): pyproject.toml scripts/bootstrap
	@scripts/bootstrap $(VENV) .
	@touch $@

$(DEV): pyproject.toml scripts/bootstrap
	@scripts/bootstrap $(VENV) '.[dev]'
	@touch $(READY) $@

demo: $(READY) ## install what is missing, build the template, show the product at work
	@$(BIN)/mcp-sandbox setup
	@$(BIN)/mcp-sandbox demo

test: $(DEV) ## all tests, with real machines of every driver
	@for driver in $(DRIVERS); do \
		$(BIN)/mcp-sandbox setup --images --driver $$driver && \
		$(BIN)/mcp-sandbox --driver $$driver template build python-data-analysis || exit 1; \
	done
	@$(BIN)/python -m pytest

check: $(DEV) ## formatting, lint, types, and who may import whom
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest -q tests/unit/test_import_arrows.py

format: $(DEV) ## put the code into shape
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: $(READY) ## the numbers we promise, measured here and now
	@$(BIN)/mcp-sandbox setup
	@$(BIN)/mcp-sandbox bench
