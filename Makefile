# `make demo` and `make test` do everything, from a fresh clone; a second call skips what is done.
.POSIX:
.PHONY: help demo test check unit jobs browser benchmarks clean

PYTEST = .venv/bin/python -m pytest

help:
	@echo "make demo        set up .venv, record a small training job on 4 ranks, show what comes out"
	@echo "make test        set up .venv and run the whole gate: format, lint, types, every test"
	@echo "make check       format, lint and types only;  make unit | jobs | browser: some of the tests"
	@echo "make benchmarks  measure what dtprof costs"
	@echo "make clean       remove .venv, caches and recorded runs"

demo:
	@.ci/environment demo
	@.venv/bin/dtprof demo

test: check unit jobs browser
	@echo "==> all of the gate has passed"

check:
	@.ci/environment test
	@.ci/step "checking the format" .make/format.log .venv/bin/ruff format --check .
	@.ci/step "linting" .make/lint.log .venv/bin/ruff check .
	@.ci/step "checking types" .make/types.log .venv/bin/mypy

unit:
	@.ci/environment test
	@.ci/prometheus
	@echo "==> unit tests"
	@$(PYTEST) -q -m "not jobs and not browser and not gpu" -n 2

jobs:
	@.ci/environment test
	@echo "==> tests that run multi-process jobs on gloo"
	@$(PYTEST) -q -m "jobs and not alone and not gpu" -n 2 --dist loadscope --durations 15
	@echo "==> tests of jobs whose times are measured, one after the other"
	@$(PYTEST) -q -m "alone and not gpu" --durations 5

browser:
	@.ci/environment test
	@.ci/browser
	@echo "==> tests in a headless Chromium"
	@$(PYTEST) -q -m "browser and not gpu"

benchmarks:
	@.ci/environment test
	@.venv/bin/python -m benchmarks

clean:
	rm -rf .venv .make dtprof-runs .mypy_cache .ruff_cache .pytest_cache .hypothesis
