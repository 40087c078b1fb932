# Each target sets up what it needs; see CONTRIBUTING.md.
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEV := $(VENV)/.ready-dev
FAILED := $(VENV)/pytest-cache/v/cache/lastfailed
DRIVERS := gvisor qemu bubblewrap
WORKERS ?= $(shell expr $$(nproc) + 1)  # most tests wait for machines

.DEFAULT_GOAL := help
.PHONY: help demo test retest check bench format

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(READY): pyproject.toml scripts/bootstrap
	@scripts/bootstrap $(VENV) .
	@touch $@

$(DEV): pyproject.toml scripts/bootstrap
	@scripts/bootstrap $(VENV) '.[dev,agents]'
	@touch $(READY) $@

demo: $(READY) ## install what is missing, build the template, run the demo
	@$(BIN)/mcp-sandbox setup
	@$(BIN)/mcp-sandbox demo

test: $(DEV) ## all tests, with real machines of every driver; WORKERS=1 runs them one after the other
	@set -e; for driver in $(DRIVERS); do \
		MCP_SANDBOX_ALLOW_NAT=true $(BIN)/mcp-sandbox setup --images --driver $$driver; \
		$(BIN)/mcp-sandbox --driver $$driver template build python-data-analysis; \
	done
	@$(BIN)/mcp-sandbox --driver gvisor template build bash cpp-algorithm go-algorithm javascript websearch-tools
	@$(BIN)/mcp-sandbox --driver bubblewrap template build websearch-tools
	@$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadgroup --no-loadscope-reorder --durations 20 --durations-min 10

retest: $(DEV) ## the tests that failed last, one after the other
	@grep -qs :: $(FAILED) || { echo "No test has failed: repair what else stopped 'make test'." >&2; exit 1; }
	@$(BIN)/python -m pytest --last-failed --numprocesses 1 --dist loadgroup  # which is a part of the tests' names

check: $(DEV) ## formatting, lint, types, import rules
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest -q tests/unit/test_import_arrows.py

format: $(DEV) ## format the code and fix lint
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: $(READY) ## measure the numbers we promise
	@$(BIN)/mcp-sandbox setup
	@$(BIN)/mcp-sandbox bench
