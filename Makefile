PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed

.PHONY: demo test check bench format clean

demo: $(INSTALLED)
	@$(BIN)/shardwise demo

test: $(INSTALLED)
	@$(BIN)/pytest -q -n 2

check: $(INSTALLED)
	@$(BIN)/ruff format --quiet --check
	@$(BIN)/ruff check --quiet
	@$(BIN)/mypy

bench: $(INSTALLED)
	@$(BIN)/python -m benchmarks --write docs/performance.md

format: $(INSTALLED)
	@$(BIN)/ruff format --quiet
	@$(BIN)/ruff check --quiet --fix

clean:
	@rm -rf .venv .hypothesis .mypy_cache .pytest_cache .ruff_cache dist
	@find src tests benchmarks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# The stamp is written last and lies in .venv, so a failed install or a removed .venv is made good by the next run.
$(INSTALLED): pyproject.toml constraints-dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing into .venv"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints-dev.txt -e '.[dev]'
	@touch $@
