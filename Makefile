# `make demo` and `make test` do everything, from a fresh clone; a second call skips what is done.
.POSIX:
.PHONY: help demo test test-all environment tools check compiled unit jobs alone browser fuzz parity sanitizers clients matrix gpu benchmarks site wheels sbom clean

PYTEST = .venv/bin/python -m pytest
# What `make test` leaves to `make test-all`, which sets this to nothing: tests that show once more what another shows.
CHOSEN = and not thorough
# Damaged inputs of each reader: `make fuzz INPUTS=1000000` takes hours.
INPUTS = 10000
# Empty counts as unset. A Python that keeps no bytecode compiles dtprof anew in each of the thousands of processes of the tests.
PYTHONDONTWRITEBYTECODE =
export PYTHONDONTWRITEBYTECODE

help:
	@echo "make demo        set up .venv, record a small training job on 4 ranks, show what comes out"
	@echo "make test        set up .venv and run the whole gate: format, lint, types, tests (13 minutes on 2 cores)"
	@echo "make test-all    the gate with every variant of a test, all layouts of the trainer, and fuzzing (hours)"
	@echo "make check       format, lint and types only;  make unit | jobs | browser | fuzz | parity: some of the tests"
	@echo "make gpu         tests, benchmarks and training on a CUDA device; figures as files (PART=build|tests|bench|trainer|layouts, SECONDS=540)"
	@echo "make matrix      try dtprof on other versions of Python and torch (an hour, PyPI; PAIRS='3.12:2.8.0 ...')"
	@echo "make clients     run programs of Lightning, DeepSpeed, Megatron-Core and others, from PyPI, under dtprof (minutes)"
	@echo "make benchmarks  measure what dtprof costs (RECORD=FOLDER keeps the values, COMPARE='BEFORE AFTER' compares two kept files)"
	@echo "make site        build the documentation site: .make/site/index.html"
	@echo "make wheels      build the wheels, with prebuilt native hooks, and the sdist (PAIRS='3.12:2.9.1 ...' for some)"
	@echo "make sbom        write the bill of materials of an installed dtprof: dist/dtprof.cdx.json"
	@echo "make clean       remove .venv, caches and recorded runs"

demo:
	@.ci/environment demo
	@.venv/bin/dtprof demo

# Several at a time, or a core is idle: pip waits for the network, mypy and a browser run on one core, and jobs wait for time
# limits and for their slowest rank.
test:
	@$(MAKE) -s -j 2 environment tools
	@$(MAKE) -s -j 4 check compiled unit browser
	@$(MAKE) -s jobs
	@$(MAKE) -s alone
	@echo "==> all of the gate has passed"

test-all:
	@$(MAKE) -s test CHOSEN=
	@$(MAKE) -s parity fuzz sanitizers
	@echo "==> every test has passed"

environment:
	@.ci/environment test

tools:
	@.ci/prometheus
	@.ci/browser

check:
	@.ci/environment test
	@.ci/step "checking the format" .make/format.log .venv/bin/ruff format --check .
	@.ci/step "linting" .make/lint.log .venv/bin/ruff check .
	@.ci/step "checking types" .make/types.log .venv/bin/mypy

# Compiled beforehand, or all tests of jobs would wait for the first that needs it.
compiled:
	@.ci/environment test
	@.ci/step "compiling the native hook" .make/hook.log .venv/bin/python -c \
		'from dtprof.capture.native import build; from dtprof.records import schema; build.ensure(schema.cpp_header(), timeout_s=600)'
	@.ci/step "compiling the simulated accelerator" .make/accelerator.log \
		.venv/bin/python -m tests.accelerator.compiled_device

unit:
	@.ci/environment test
	@.ci/prometheus
	@echo "==> unit tests"
	@$(PYTEST) -q -m "not jobs and not browser and not gpu $(CHOSEN)" -n 2

jobs:
	@.ci/environment test
	@echo "==> tests that run multi-process jobs on gloo"
	@$(PYTEST) -q -m "jobs and not alone and not gpu $(CHOSEN)" -n 2 --dist loadscope --durations 15

alone:
	@.ci/environment test
	@echo "==> tests of jobs whose times are measured, one after the other"
	@$(PYTEST) -q -m "alone and not gpu $(CHOSEN)" --durations 5

browser:
	@.ci/environment test
	@.ci/browser
	@echo "==> tests in a headless Chromium"
	@$(PYTEST) -q -m "browser and not gpu $(CHOSEN)" tests/browser

# Each framework in an environment of its own, .make/clients/NAME; NAMES="deepspeed-zero1 ..." runs some.
clients:
	@.ci/environment test
	@echo "==> clients of other frameworks"
	@.venv/bin/python -m tests.clients $(NAMES)

# atheris is not there for every Python; make test tries some damaged inputs without it.
fuzz:
	@.ci/environment test
	@for target in $$(.venv/bin/python -c 'from tests.fuzz.targets import TARGETS; print(*TARGETS)'); do \
		.ci/step "reading $(INPUTS) damaged inputs of $$target" .make/fuzz-$$target.log \
			.venv/bin/python -m tests.fuzz $$target --inputs $(INPUTS) || exit 1; \
	done

# The native hook compiled with AddressSanitizer and ThreadSanitizer, in a job that issues from several threads.
sanitizers:
	@.ci/environment test
	@.venv/bin/python -m tests.stress.sanitizers

parity:
	@.ci/environment test
	@.ci/step "training every layout of the reference trainer" .make/parity.log \
		.venv/bin/python -m reference_trainer.parity

# Pairs of a Python and a torch, from PyPI: tests/matrix/__main__.py lists the default ones. WHEEL=FILE tries a wheel of dtprof.
PAIRS =
WHEEL =
matrix:
	@.ci/environment test
	@.venv/bin/python -m tests.matrix $(PAIRS) $(if $(WHEEL),--wheel $(WHEEL)) --write docs/explanation/measurements/versions.md

# On a machine with a GPU, a Python that has torch for CUDA, and no network: PART=build|tests|bench|trainer|layouts, each under
# ten minutes; SECONDS=540 ends all of them within that, the most telling first; ONLY=NAME,... takes up what was left out;
# KEEP=FOLDER keeps what is recorded.
# `.ci/gpu-wheels` gets beforehand what else it needs.
PART = all
SECONDS =
ONLY =
KEEP =
gpu:
	@.ci/gpu $(PART) $(if $(SECONDS),--seconds $(SECONDS)) $(if $(ONLY),--only $(ONLY)) $(if $(KEEP),--keep $(KEEP))

RECORD =
COMPARE =
benchmarks:
	@.ci/environment test
	@.venv/bin/python -m benchmarks $(if $(RECORD),--record $(RECORD)) $(if $(COMPARE),--compare $(COMPARE))

# Prebuilt hooks for every supported torch and Python, from PyPI (hours; PAIRS='3.12:2.9.1 ...' for some), wheels and sdist.
wheels:
	@.ci/environment test
	@.venv/bin/python .ci/wheels.py $(PAIRS)

# Strict: a link that leads nowhere, and a page outside the navigation, is an error.
site:
	@.ci/environment test
	@.ci/step "building the documentation site" .make/site.log \
		.venv/bin/sphinx-build -W --keep-going -c docs . .make/site
	@echo ".make/site/index.html"

sbom:
	@.ci/environment test
	@.ci/sbom

clean:
	rm -rf .venv .make dtprof-runs .mypy_cache .ruff_cache .pytest_cache .hypothesis
