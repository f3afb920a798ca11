PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed

.PHONY: demo test slow chaos check bench browser docs format clean judges judges-table

demo: $(INSTALLED)
	@$(BIN)/shardwise demo

test: $(INSTALLED) browser
	@$(BIN)/pytest -q -n 3 --dist worksteal -m "not slow"

# Tests that take seconds, or kill and stop processes.
slow: $(INSTALLED)
	@$(BIN)/pytest -q -n 3 --dist worksteal -m slow

# Jobs that publish and subscribe are killed and stopped at random, for SECONDS without and SECONDS with deltas.
chaos: SECONDS ?= 300
chaos: $(INSTALLED)
	@SHARDWISE_CHAOS_SECONDS=$(SECONDS) $(if $(SEED),SHARDWISE_CHAOS_SEED=$(SEED)) TORCH_CPP_LOG_LEVEL=FATAL \
	$(BIN)/pytest -q -s tests/publishing/test_chaos.py

# Real engines (vLLM), and other frameworks, in environments of their own; where one cannot be had, one line says so.
judges:
	@PYTHON=$(PYTHON) tests/judges/run vllm -q
	@PYTHON=$(PYTHON) tests/judges/run frameworks -q

judges-table:
	@PYTHON=$(PYTHON) tests/judges/run vllm -q --write-table
	@PYTHON=$(PYTHON) tests/judges/run frameworks -q --write-table

check: $(INSTALLED)
	@$(BIN)/ruff format --quiet --check
	@$(BIN)/ruff check --quiet
	@$(BIN)/mypy

bench: $(INSTALLED)
	@$(BIN)/python -m benchmarks --write docs/performance.md

# The pages are tested in a real browser, which comes from the packages of the system.
browser:
	@if command -v chromium && command -v chromedriver; then exit 0; fi >/dev/null; \
	as_root=$$(test "$$(id -u)" = 0 || echo sudo -n); \
	if command -v apt-get >/dev/null && $$as_root true 2>/dev/null; then \
		echo "installing chromium, for the tests of the pages"; \
		$$as_root apt-get -qq update && $$as_root apt-get -qq install -y chromium chromium-driver >/dev/null; \
	else \
		echo "Chromium is missing, and installing it takes apt-get and root: tests/report/test_browser.py will fail." >&2; \
		echo "Have chromium and chromium-driver installed." >&2; \
	fi

# The theme announces its successor on every run unless told not to.
docs: $(INSTALLED)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "site/index.html"

format: $(INSTALLED)
	@$(BIN)/ruff format --quiet
	@$(BIN)/ruff check --quiet --fix

clean:
	@rm -rf .venv .venv-judges .venv-judges-frameworks .hypothesis .mypy_cache .pytest_cache .ruff_cache demo dist site
	@find src tests benchmarks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# The stamp is written last and lies in .venv, so a failed install or a removed .venv is made good by the next run.
$(INSTALLED): pyproject.toml constraints-dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing into .venv"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints-dev.txt -e '.[dev]'
	@touch $@
