# Octavo, from a checkout to a running server: `make serve`. `make help` names the rest.
# Assumed: python3 >= 3.11, a C++20 compiler, make. Everything else goes into .venv.

PYTHON ?= python3
MODEL ?= smollm2-135m

# Whatever compiler the machine has, unless one is named; CMake reads it from the environment.
ifeq ($(origin CXX),default)
CXX := $(firstword $(shell command -v c++ g++ clang++) c++)
endif
export CXX

# What the threads sleep on, and the last part of C++20 that compilers and their libraries learnt.
CXX_PROBE := \#include <atomic>\nvoid probe(std::atomic<int>& a) { a.wait(0); a.notify_all(); }\n

VENV := .venv
BIN := $(VENV)/bin
DONE := $(VENV)/done
NATIVE := $(wildcard src/octavo/kernels/native/*.cpp src/octavo/kernels/native/*.h)
NATIVE_TESTS := $(wildcard tests/kernels/native/*.cpp)
BUILD_TOOLS := scikit-build-core nanobind cmake ninja
# Errors are shown, chatter is not.
INSTALL := $(BIN)/python -m pip --disable-pip-version-check install --quiet --quiet

.PHONY: serve test test-all bench check format build clean help

serve: build  ## Set up, fetch the model and serve it on 127.0.0.1:8000 (MODEL=, ARGS=)
	@test -f "$(MODEL)" || $(BIN)/octavo pull "$(MODEL)"
	@exec $(BIN)/octavo serve "$(MODEL)" $(ARGS)

test: $(DONE)/native $(DONE)/dev  ## Set up and run every test but the slow ones (ARGS=)
	$(BIN)/python -m pytest $(ARGS)

test-all: $(DONE)/native $(DONE)/dev  ## Every test, the slow ones too (ARGS=)
	$(BIN)/python -m pytest -m "slow or not slow" $(ARGS)

bench: build $(DONE)/dev  ## Compare speed with other engines, measure start-up and idling; takes minutes (MODEL=, ARGS=)
	@test -f "$(MODEL)" || $(BIN)/octavo pull "$(MODEL)"
	$(BIN)/python benchmarks/versus_peers.py --models "$(MODEL)" $(ARGS)
	$(BIN)/python benchmarks/idle_and_start.py --model "$(MODEL)"

check: $(DONE)/dev  ## ruff, ruff format, mypy --strict, clang-format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(if $(NATIVE),$(BIN)/clang-format --dry-run -Werror $(NATIVE) $(NATIVE_TESTS))

format: $(DONE)/dev  ## Rewrite the sources the way `make check` wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(if $(NATIVE),$(BIN)/clang-format -i $(NATIVE) $(NATIVE_TESTS))

build: $(DONE)/native  ## Bring the extension up to date (only what changed)

clean:  ## Remove the environment and everything built (fetched models stay)
	rm -rf $(VENV) build dist

help:  ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo "MODEL= names a model or a GGUF file, ARGS= adds options: make serve MODEL=my.gguf ARGS='--port 8001'"

# All that is missing is named in one line, before anything is downloaded.
$(DONE)/venv:
	@missing=; hint=; \
	if ! command -v $(PYTHON) >/dev/null; then \
	  missing="$$missing, python3 (3.11 or later)"; hint="$$hint python3 python3-venv python3-dev"; \
	elif ! $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then \
	  missing="$$missing, python3 3.11 or later (this is $$($(PYTHON) --version); name another with PYTHON=)"; \
	else \
	  $(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	    { missing="$$missing, Python's venv module"; hint="$$hint python3-venv"; }; \
	  test -f "$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" || \
	    { missing="$$missing, Python's C headers"; hint="$$hint python3-dev"; }; \
	fi; \
	if ! command -v $(CXX) >/dev/null; then \
	  missing="$$missing, a C++20 compiler"; hint="$$hint g++"; \
	elif ! printf '$(CXX_PROBE)' | $(CXX) -std=c++20 -fsyntax-only -x c++ - 2>/dev/null; then \
	  missing="$$missing, a C++20 compiler with std::atomic::wait ($(CXX) is none; name another with CXX=)"; \
	fi; \
	if [ -n "$$missing" ]; then \
	  echo "make: missing: $${missing#, }$${hint:+ (Debian, Ubuntu: apt install$$hint)}" >&2; exit 1; \
	fi
	@echo "Creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@mkdir -p $(DONE) && touch $@

$(DONE)/tools: $(DONE)/venv
	@echo "Installing the build tools"
	@$(INSTALL) $(BUILD_TOOLS)
	@touch $@

# The editable install builds in build/, where the next build compiles only what changed.
$(DONE)/native: $(DONE)/tools pyproject.toml CMakeLists.txt $(NATIVE)
	@echo "Building the extension"
	@$(INSTALL) --no-build-isolation --editable .
	@touch $@

# Not as an extra of the package: checks need no compiled extension.
DEV_REQUIREMENTS := import tomllib; \
  project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
  print(*project["dependencies"], *project["optional-dependencies"]["dev"])

$(DONE)/dev: $(DONE)/tools pyproject.toml
	@echo "Installing what tests and checks need"
	@$(INSTALL) $$($(BIN)/python -c '$(DEV_REQUIREMENTS)')
	@touch $@
