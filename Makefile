# Two commands do everything: `make demo` and `make test`. Both make .venv first if it is not there,
# and leave an environment that is there as it is.

VENV ?= .venv
BIN := $(VENV)/bin
PYTHON := $(BIN)/python
OUT ?= demo-out

.DEFAULT_GOAL := help
.PHONY: help environment demo test test-all test-plain lint types sanitize simd bench clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | column -t -s "$$(printf '\t')" 2>/dev/null \
	  || grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST)

environment: $(BIN)/omniload ## make .venv from constraints.txt and install omniload into it

$(BIN)/omniload:
	@bash .ci/environment $(VENV)

demo: $(BIN)/omniload ## render images, make shards, train a tiny model on 2 ranks, print the figures
	@$(PYTHON) examples/demo.py --out $(OUT)

test: $(BIN)/omniload ## run the tests
	@$(PYTHON) -m pytest -m "not slow and not chaos and not packaging and not gpu"

test-all: $(BIN)/omniload ## run the tests, the slow and the packaging ones too
	@$(PYTHON) -m pytest -m "not gpu"

test-plain: $(BIN)/omniload ## run the tests of what Numba compiles as plain Python
	@NUMBA_DISABLE_JIT=1 $(PYTHON) -m pytest tests/test_isf.py tests/test_baselines.py tests/test_buffered.py tests/test_balance.py tests/test_pipeline_simulate.py

lint: $(BIN)/omniload ## ruff: rules and format
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: $(BIN)/omniload ## mypy, strict
	@bash .ci/types $(PYTHON)

sanitize: $(BIN)/omniload ## test the C++ code under the address and undefined-behaviour sanitizers
	@bash .ci/sanitize $(PYTHON)

simd: $(BIN)/omniload ## replace Pillow in .venv by Pillow-SIMD where it builds with JPEG and WebP
	@bash .ci/simd $(VENV)

bench: $(BIN)/omniload ## the benchmarks behind the figures of the README
	@$(BIN)/omniload bench grouping && $(BIN)/omniload bench pack

clean: ## remove what builds and demos leave behind; .venv stays
	@rm -rf build dist demo-out omniload_vlm.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
