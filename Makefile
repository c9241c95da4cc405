# One verb each; `make help` lists them. The environment is .venv here; after `make setup` nothing needs a network.

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
PINS := build/venv-vllm-0.33
JOBS ?= 2
PYTEST := $(PY) -m pytest -n $(JOBS) --dist worksteal
# One cache of compiled kernels for packs, demo and tests of this checkout.
export CUTE_KERNELS_CACHE_DIR ?= $(CURDIR)/build/cache
# An interpreter that runs and is new enough (a version manager's shim may be there and refuse).
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13 python3.10; do \
	$$p -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 14))' 2>/dev/null && echo $$p && break; done)

.PHONY: help setup docs demo test test-cpu test-compile test-emulator test-gpu test-pins compile-sm100 compile-sm120 lint type bench bench-loading clean-cache

help: ## Show this list
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | while IFS="$$(printf '\t')" read -r verb text; do printf '  %-14s %s\n' "$$verb" "$$text"; done

setup: $(STAMP) ## Create .venv and install the package with everything the tests need

$(STAMP): pyproject.toml constraints/newest.txt
	@test -n "$(PYTHON)" || { echo "no Python 3.10 to 3.13 found; set PYTHON=/path/to/python" >&2; exit 1; }
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --constraint constraints/newest.txt --editable '.[dev]'
	@touch $@

demo: $(STAMP) compile-sm100 compile-sm120 ## Build both packs and run a DeepSeek-V4 attention layer on the CPU (ARGS="--tokens 300")
	$(PY) -m cute_kernels demo $(ARGS)

test: $(STAMP) ## Run every test that needs no GPU: CPU, compile, emulator
	$(PYTEST) tests/cpu tests/compile tests/emulator $(ARGS)

test-cpu: $(STAMP) ## References, metadata, dispatch, the contract with FlashInfer, the cache
	$(PYTEST) tests/cpu $(ARGS)

test-compile: $(STAMP) ## Build the kernels for every target and check the machine code
	$(PYTEST) tests/compile $(ARGS)

test-emulator: $(STAMP) ## Execute the compiled PTX on the CPU
	$(PYTEST) tests/emulator $(ARGS)

test-gpu: $(STAMP) ## Run both families' source on an SM90 GPU, and the full path on Blackwell
	$(PY) -m pytest tests/gpu tests/blackwell $(ARGS)

test-pins: pyproject.toml constraints/vllm-0.33.txt ## Compile and contract tests with the versions vLLM 0.33.0 pins
	test -x $(PINS)/bin/python || $(PYTHON) -m venv $(PINS)
	$(PINS)/bin/python -m pip install --quiet --constraint constraints/vllm-0.33.txt --editable '.[dev]'
	$(PINS)/bin/python -m pytest -n $(JOBS) tests/compile tests/cpu/test_cache.py tests/cpu/test_aot.py tests/cpu/test_flashinfer_contract.py $(ARGS)

compile-sm100: $(STAMP) ## Build the AOT pack for 10.0 and 10.3 (build/packs/sm_100f)
	$(PY) -m cute_kernels compile --arch sm_100f --out build/packs/sm_100f --jobs $(JOBS)

compile-sm120: $(STAMP) ## Build the AOT pack for 12.0 and 12.1 (build/packs/sm_120f)
	$(PY) -m cute_kernels compile --arch sm_120f --out build/packs/sm_120f --jobs $(JOBS)

lint: $(STAMP) ## Check style and formatting
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

type: $(STAMP) ## Check types, everything but the tests
	$(PY) -m mypy

docs: $(STAMP) ## Write the generated pages under docs/ again (ARGS=--check compares only)
	$(PY) -m scripts.docs $(ARGS)

bench: $(STAMP) ## Time every kernel on this machine's GPU (ARGS="--peer vllm --out results.csv")
	$(PY) -m cute_kernels bench $(ARGS)

bench-loading: $(STAMP) ## Measure imports, pack loading and cache look-ups (no GPU)
	$(PY) -m benchmarks.loading $(ARGS)

clean-cache: ## Remove this checkout's compiled kernels and packs
	rm -rf build/cache build/packs
