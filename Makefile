# Everything a person types starts here. Each target does all of its own set-up, from nothing, without root:
# a virtual environment in this folder, the pinned packages, and (where needed) the models.
#
#   make demo       a real conversation, saved, ended, and resumed in another process
#   make test       the tests
#   make chromium   a Chromium for the tests of the page (make test sees to it by itself)
#   make check      format, lint, types, floors
#   make test-all   the tests with the slow ones
#   make workers    the service on many processes and real Redis servers that are killed, at full size (half an hour)
#   make llama      what goes to llama.cpp and comes from it, with llama-cpp-python (builds it once: ten minutes)
#   make fuzz       wrong files for every reader of other systems' files, ten minutes each (FUZZ_SECONDS=60: one)
#   make migrate    10,000 sessions from disk to Redis and back through kills, an archive of 5 GiB in little memory
#   make bench      figures, one JSON line each
#   make images     regenerate the docs' pictures of the page
#   make docs       regenerate what is made from the code: the command line's reference, the list of modules
#   make clean      forget what was built here (models and sessions stay)

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
JOBS   ?= 2
FUZZ_SECONDS ?= 600
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile

.DELETE_ON_ERROR:
.PHONY: help setup models chromium demo test test-all workers llama migrate check fuzz bench docs images clean

help:
	@sed -n 's/^#   //p' Makefile

setup: $(STAMP)

# An environment of an older Python, or one whose Python is gone, is made anew.
$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "tenuto: there is no '$(PYTHON)' here; install Python 3.11 or newer, or say make PYTHON=/path/to/python3" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "tenuto: Python 3.11 or newer is needed, and %s is %d.%d; say make PYTHON=/path/to/python3" % (sys.executable, sys.version_info[0], sys.version_info[1]))'
	@if ! $(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	  echo "making the virtual environment $(VENV)"; \
	  $(PYTHON) -m venv --clear $(VENV) || { echo "tenuto: '$(PYTHON) -m venv' failed (on Debian and Ubuntu it comes with the package python3-venv)" >&2; exit 2; }; \
	fi
	@echo "installing the pinned packages into $(VENV) (some minutes the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check "pip>=25.1"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e . --group dev
	@touch $@

models: $(STAMP)
	@$(BIN)/tenuto pull smollm2 gemma3-270m >/dev/null

chromium: $(STAMP)
	@$(BIN)/python -m tools.chromium

demo: $(STAMP)
	@$(BIN)/python -m benchmarks.demo

test: models chromium
	$(PYTEST) -m "not slow"

test-all: models chromium
	$(PYTEST)

# Prints what it saw, a line of JSON for each part.
workers: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -s -o faulthandler_timeout=0 -m slow tests/sessions/service/test_workers.py tests/sessions/service/test_failovers.py

# In an environment of its own: it is no part of what tenuto needs.
LLAMA := .venv-llama
$(LLAMA)/.installed:
	$(PYTHON) -m venv --clear $(LLAMA)
	$(LLAMA)/bin/python -m pip install --quiet --disable-pip-version-check llama-cpp-python==0.3.36
	@touch $@

llama: models $(LLAMA)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -s tests/sessions/migrate/test_llama_cpp.py tests/serialization/foreign/test_llama_cpp_states.py

# Prints what it saw, a line of JSON for each part. Needs 12 GB in the folder of temporary files.
migrate: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -s -o faulthandler_timeout=0 -m slow tests/sessions/migrate

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# A line of JSON for each reader. What breaks a law is written to the folder `findings`.
fuzz: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.serialization.foreign.fuzz --seconds $(FUZZ_SECONDS)

bench: models
	$(BIN)/python -m benchmarks

docs: $(STAMP)
	$(BIN)/python -m cli.docs > docs/cli.md
	$(BIN)/python -m tools.modules
	$(BIN)/python -m tests.exact.sizes
	$(BIN)/python -m tests.exact.architectures

images: models chromium
	TENUTO_IMAGES=docs/images $(PYTEST) -n 0 tests/sessions/service/page/test_images.py

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
