# `make help` lists the targets. PYTHON picks the interpreter .venv is made from.
PYTHON ?= python3
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
export CMAKE_BUILD_PARALLEL_LEVEL = $(JOBS)
export PATH := $(CURDIR)/.venv/bin:$(PATH)

CXX_FILES = $(wildcard csrc/*.h csrc/*.cpp csrc/sim/*.h csrc/sim/*.cpp tests/cpp/*.h tests/cpp/*.cpp tests/cpp/support/*.h tests/sim/*.cpp tests/fuzz/*.h tests/fuzz/*.cpp bench/core/*.h bench/core/*.cpp)
PYTEST = python -m pytest

.DEFAULT_GOAL := help
.PHONY: help env env-fast demo test test-fast cpp-dev cpp-asan-ubsan cpp-tsan bench soak fuzz lint format \
	wheel clean distclean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

env:  ## make or update .venv, with vLLM
	@$(PYTHON) scripts/check_python.py && $(PYTHON) scripts/setup_env.py full

env-fast:  ## make or update .venv, without vLLM
	@$(PYTHON) scripts/check_python.py && $(PYTHON) scripts/setup_env.py fast

demo: env  ## two engines, a router and a check of every token
	@python -m bench.demo

test: env cpp-dev cpp-asan-ubsan cpp-tsan  ## everything, sanitizers and real engines included
	$(PYTEST)

test-fast: env-fast cpp-dev  ## what needs no vLLM
	$(PYTEST) -m "not vllm"

cpp-dev cpp-asan-ubsan cpp-tsan: cpp-%: env-fast
	@scripts/run_cpp_tests.sh $*

bench: env  ## all benchmarks; results go to build/bench
	@python -m bench

soak: env  ## long randomized runs and load tests
	$(PYTEST) --soak -m soak

FUZZ_S ?= 300
fuzz: env-fast  ## the fuzz targets, FUZZ_S seconds each; FUZZ_ONLY="message engine" picks some
	@scripts/fuzz.sh $(FUZZ_S) $(FUZZ_ONLY)

lint: env-fast  ## formatters, linters, type checkers
	@scripts/lint.sh

format: env-fast  ## put every file into the project's format
	ruff check --fix-only --quiet . ; ruff format .
	clang-format -i $(CXX_FILES)

wheel: env-fast  ## dist/kvpush-*.whl, as a user's pip would build it
	python -m pip wheel --no-deps --wheel-dir dist .

clean:  ## remove what was built; .venv stays
	rm -rf build dist logs .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks

distclean: clean  ## and .venv too
	rm -rf .venv
