# One verb each, the same that .ci/run calls. `make install` is a prerequisite of all others and
# does nothing when .venv is up to date.
PYTHON ?= python3
# Processes that share the tests out (tests/conftest.py); 0: pytest's own process runs them all.
WORKERS ?= 2
# Length of the long chaos test.
CHAOS_MINUTES ?= 10
BIN := .venv/bin
STAMP := .venv/.installed
TOOLS := .venv/.tools

PYTEST := $(BIN)/python -m pytest
# The tests with these marks, shared out; then those whose verdict depends on time, one by one.
define run_tests
failed=0; \
$(PYTEST) -n $(WORKERS) --no-loadscope-reorder -m "$(1) and not timing" $(2) || failed=1; \
$(PYTEST) -m "$(1) and timing" $$(grep -rl --include='test_*.py' mark.timing tests) || failed=1; \
exit $$failed
endef
# Without bytecode, each process that a test starts would compile all modules anew.
test test-quick test-long: export PYTHONDONTWRITEBYTECODE =

.PHONY: install tools demo test test-quick test-long flaky lint proto bench

install: $(STAMP)

$(STAMP): pyproject.toml paceline-server/pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Paceline needs Python 3.11 or newer, $(PYTHON) is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]' -e ./paceline-server
	@# Our CPU kernels (AVX-512). Without a compiler, torch's operations take their place.
	$(BIN)/python -m workers.engine.cpu.native
	@touch $@

tools: $(TOOLS)

$(TOOLS): $(STAMP) scripts/install_tools.py
	$(BIN)/python scripts/install_tools.py
	@touch $@

demo: install
	$(BIN)/paceline demo

test: install tools
	$(call run_tests,not release)

test-quick: install tools
	$(call run_tests,not long and not release)

test-long: install tools
	$(call run_tests,release,--chaos-minutes $(CHAOS_MINUTES))

# Tests marked `timing` that failed first in the last runs here, the latest last.
flaky:
	@cat .pytest_cache/d/failed-first/tests 2>/dev/null || echo "No test failed first."

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/codespell
	$(BIN)/buf lint
	$(BIN)/python scripts/check_breaking.py

proto: install
	$(BIN)/python scripts/generate_stubs.py

bench: install
	$(BIN)/paceline bench decode
