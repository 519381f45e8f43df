# make demo   a first look, from a bare checkout      make venv     the environment only
# make demo-code   a model that writes code edits a file and answers (491 MB to download); goes on where it was ended
# make demo-page   the demo model on a page in the browser
# make fast   format, lint, quick tests without torch  make check    format, lint and types
# make test   everything that must pass               make nightly  the tests that make test leaves out
# make attack   three minutes of hostile bundles and requests
# make image   the steps of deploy/Containerfile without an image builder: the service starts, answers, and has this size
# make clients   evaluation and load tools with a service (3 GB of environments the first time)
# make cpus   drafts of small bundles as on other CPUs; make cpus-setup gets what that needs
# python -m benchmarks   modes of bundles and other runtimes, in turns: answers, rows, prefill, concurrent requests
# make docs   pages and API reference in build/docs    make tables   writes the tables of docs/results into the pages
# make wheels   wheels for Linux, macOS and Windows, one without native operators, and the sdist, in dist
# make clean    leaves the sources and the environment
#
# PYTHON=python3.12 chooses the interpreter of a new environment, JOBS=4 runs the tests on four CPUs (2 by default),
# TESTS="tests/runtime/decode/test_plan.py -k tree" runs some of them, CPU=avx2 as on a CPU without AVX512 and VNNI.

VENV := .venv
BIN := $(VENV)/bin
PACKAGE := build/package/spaceport
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

# What each target installs; torch is needed to export the model, the rest of what demo leaves out by the tests.
EXTRAS_demo := cpu,export
EXTRAS_code := cpu,gguf,serve
EXTRAS_page := cpu,export,serve
EXTRAS_test := cpu,tune,dev
EXTRAS_docs := docs
EXTRAS_wheels := wheels

# The first interpreter that really runs: a name on the path may be an empty shim.
SUPPORTED := import ensurepip, sys, venv; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.10 python3; do \
	if $$p -c '$(SUPPORTED)' 2>/dev/null; then echo $$p; break; fi; done)

JOBS ?= 2
TESTS ?=
CPU ?=
SECONDS ?= 180
SEED ?= 1

# Whole files go to the processes, the longest first: what a file shares is made once.
PYTEST = $(if $(CPU),PYTHONPATH=tests $(BIN)/python -m cpus --only $(CPU) --pytest --,$(BIN)/python -m pytest) -n $(JOBS) --dist loadfile --no-loadscope-reorder

.PHONY: demo demo-code demo-page fast test nightly attack image clients cpus cpus-setup cuda-setup check types format docs tables venv wheels clean

demo: $(VENV)/.spaceport-demo $(VENV)/.spaceport-kernels
	@$(BIN)/spaceport demo

CODER := build/coder/Qwen2.5-Coder-0.5B-Instruct.gguf
demo-code: $(VENV)/.spaceport-code $(VENV)/.spaceport-kernels
	@$(BIN)/python -m recipes.weights $(CODER)
	@$(BIN)/spaceport demo --code $(CODER) --threads 0 --cache build/demo $(addprefix --adapter ,$(wildcard tools/demo/coder/adapter))

demo-page: $(VENV)/.spaceport-page $(VENV)/.spaceport-kernels
	@$(BIN)/spaceport demo --page --cache build/demo

fast: format
	@echo "fast: pytest"
	@$(PYTEST) --fast $(TESTS)

# Types are checked by one of the tests, beside the others.
test: format
	@echo "test: pytest"
	@$(PYTEST) $(TESTS)

# SECONDS=3600 runs a longer campaign, SEED=2 another one, ONLY=service one part.
attack: venv
	@PYTHONPATH=tests $(BIN)/python -m attack --seconds $(SECONDS) --seed $(SEED) $(if $(ONLY),--only $(ONLY))

# Needs root and mmdebstrap (apt-get install mmdebstrap); gets packages from Debian and PyPI.
image: venv
	@PYTHONPATH=tests $(BIN)/python -m support.container_image

# Creates an environment for each tool from tests/real_clients/requirements; CLIENTS="--only lm-eval" runs one of them.
clients: venv
	@PYTHONPATH=tests $(BIN)/python -m real_clients --work build/clients $(CLIENTS)

cpus-setup: venv
	@if command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
		apt-get install -y -qq --no-install-recommends qemu-user mmdebstrap binutils gcc libc6-dev >/dev/null; fi
	@PYTHONPATH=tests $(BIN)/python -m cpus --setup

cpus: venv
	@PYTHONPATH=tests $(BIN)/python -m cpus

cuda-setup: venv
	@PYTHONPATH=tests $(BIN)/python -m stand_in_cuda.libraries

# With the files that make test leaves out as long as they have not changed since they passed.
nightly: venv
	@$(MAKE) --no-print-directory cuda-setup || echo "nightly: without the tests of ONNX Runtime with CUDA"
	@echo "nightly: pytest"
	@$(PYTEST) --unchanged -m "nightly or on_change" $(TESTS)

check: format types

types: venv $(PACKAGE)
	@echo "check: mypy"
	@$(BIN)/python -m mypy

# The package as it is installed, of links: mypy and the API reference follow folders, and not the names in setup.py.
$(PACKAGE): setup.py
	@mkdir -p $@ && ln -sfn $(addprefix $(CURDIR)/,exporter graphs kernels runtime serving tools training verify src/spaceport/*) $@ && touch $@

format: venv
	@echo "check: ruff format"
	@$(BIN)/python -m ruff format --check .
	@echo "check: ruff"
	@$(BIN)/python -m ruff check .

# Needs neither torch nor a backend. Fails on a broken link, and on a page that would load anything over a network.
docs: $(VENV)/.spaceport-docs $(PACKAGE)
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	echo "docs: got Python 3.10 in $(VENV), expected 3.11 or newer: make docs VENV=.venv-docs PYTHON=python3.11" >&2; exit 1; }
	@mkdir -p build
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build >build/docs.log 2>&1 || { \
	grep -v '^INFO' build/docs.log >&2; exit 1; }
	@echo "docs: open build/docs/index.html; to search: $(BIN)/python -m http.server --directory build/docs"

# Compiled with ziglang for systems other than this one. build/lib may have files that are gone from the sources.
WHEELS := linux-x86_64 linux-aarch64 macos-arm64 windows-x86_64 any
wheels: $(VENV)/.spaceport-wheels
	@for system in $(WHEELS); do echo "wheels: $$system"; rm -rf build/lib; \
		SPACEPORT_BUILD_FOR=$$system $(BIN)/python -m build --wheel --no-isolation --outdir dist >build/wheel.log 2>&1 || { \
		tail -20 build/wheel.log >&2; exit 1; }; done
	@echo "wheels: sdist"; $(BIN)/python -m build --sdist --no-isolation --outdir dist >build/wheel.log 2>&1 || { \
		tail -20 build/wheel.log >&2; exit 1; }
	@ls -1 dist

tables:
	@python3 docs/drawing/tables.py

venv: $(VENV)/.spaceport-test $(VENV)/.spaceport-kernels

# Packages build without isolation, so that the version of the backend is pinned as well.
$(VENV)/.spaceport-%: pyproject.toml setup.py constraints.txt | $(BIN)/python $(VENV)/.spaceport-kernels
	@echo "venv: installing spaceport[$(EXTRAS_$*)] and the pinned packages that it needs into $(VENV)"
	@$(PIP) -q pip setuptools
	@{ $(PIP) --no-build-isolation -e '.[$(EXTRAS_$*)]' || touch $@.failed; } | awk '$(SHOWN)'; ! rm $@.failed 2>/dev/null
	@touch $@

# Of pip's lines: what is downloaded, and that the files are unpacked, which is the longer part where they are cached.
SHOWN = /^ *(Downloading|Using cached) .*whl / { sub(/^ */, ""); print "venv: " tolower(substr($$0, 1, 1)) substr($$0, 2); fflush() } \
	/^Installing collected/ { print "venv: unpacking " split($$0, _, ",") " packages"; fflush() }

# The native operators, unless they are newer than their sources. Without a compiler it says what is lost, and goes on.
$(VENV)/.spaceport-kernels: $(wildcard kernels/*.h kernels/*.cpp) kernels/build.py | $(BIN)/python
	@echo "venv: compiling the native operators"
	@$(BIN)/python kernels/build.py --if-possible
	@touch $@

$(BIN)/python:
	@chosen="$(PYTHON)"; test -n "$$chosen" || { \
	echo "venv: got no Python from 3.10 to 3.13, expected one on the path: install it, or name it with PYTHON=" >&2; exit 1; }; \
	echo "venv: creating $(VENV) with $$chosen"; "$$chosen" -m venv $(VENV)

clean:
	@echo "clean: removing caches, build outputs and what tests have built"
	@rm -rf build dist kernels/spaceport_kernels.* *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage
	@cd "$${SPACEPORT_TEST_CACHE:-$${XDG_CACHE_HOME:-$$HOME/.cache}/spaceport-tests}" 2>/dev/null && rm -rf built passed mypy || true
	@find benchmarks exporter graphs kernels recipes runtime serving src tests tools training verify -name __pycache__ -type d -prune -exec rm -rf {} +
