# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The versions of TransformerEngine whose code `make te` runs: the oldest and the newest that are known.
TE_VERSION ?= 2.9.0 2.20.2
TE_VENV ?= .venv-te
INTEGRATIONS ?= .venv-integrations
# The newest torch of the registry, installed once: remove the folder to take a newer one.
NEWEST ?= .venv-newest
DOCS ?= .venv-docs
NEWEST_SAMPLE := tests/contract/test_identity.py tests/contract/test_flat.py
NEWEST_SAMPLE += tests/unit/replay/test_interrupted.py tests/contract/rerun/test_backward.py tests/unit/core
# Processes that `make test` runs tests in; each test uses one thread.
WORKERS ?= 2
# A file's tests run in one process, and the few long ones of test_benchmarks.py do not come last.
XDIST := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
CONTRACT_ON_DEVICE := offload rerun replay test_threads.py test_budgets.py test_budgets_of_repeated_blocks.py
CONTRACT_ON_DEVICE += test_budget_matrix.py test_added_blocks.py
CONTRACT_ON_DEVICE := $(addprefix tests/contract/,$(CONTRACT_ON_DEVICE))
SOURCES := pyproject.toml setup.py constraints.txt $(shell find csrc -name '*.cpp' -o -name '*.h')

# On a busy machine, threads that spin at OpenMP barriers can slow torch down a hundredfold.
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: demo build test cpu device distributed soak coverage integrations newest lint types docs wheels bench sanitize te clean

demo: $(STAMP)
	$(BIN)/python -m actckpt demo $(ARGS)

# All that is compiled, the simulated device of the tests too.
build: $(STAMP)
	PYTHONPATH=tests:. $(BIN)/python -c "import sim.device"

test: cpu
	$(MAKE) device distributed ARGS=

cpu: build
	$(BIN)/python -m pytest $(XDIST) $(ARGS)

# The tests of the simulated device, what only a capacity shows, and the contract tests with tensors of the device:
# offloading, random state, and every fourth of the others (of the matrix of budgets: its losses, and every eighth). In
# processes of their own: once the device is imported, torch has an accelerator, and what other tests leave on it counts
# toward budgets.
device: build
	$(BIN)/python -m pytest --device sim tests/unit/sim_device $(ARGS)
	$(BIN)/python -m pytest --device sim tests/device $(ARGS)
	$(BIN)/python -m pytest $(XDIST) --device sim --sample 4 $(CONTRACT_ON_DEVICE) $(ARGS)

# Two processes that gloo connects: each kind of parallelism against plain training and torch's checkpoint.
distributed: build
	$(BIN)/python -m pytest tests/distributed $(ARGS)

# Nothing may grow over 20,000 steps; `make test` runs the same over 2,000. And all that `make device` has a part of,
# with 1,000 random programs in each of the five tests that draw them, and what of the device path the tests run.
soak: $(STAMP)
	$(BIN)/python -m pytest -m soak $(ARGS)
	$(BIN)/python -m pytest -m soak tests/distributed $(ARGS)
	$(BIN)/python -m pytest $(XDIST) --device sim --programs 1000 $(CONTRACT_ON_DEVICE) $(ARGS)
	$(MAKE) coverage ARGS=

# How many lines of the device path the tests run; fails below 95 %. ARGS=FILE writes the figures. Needs GCC.
coverage: $(STAMP)
	$(BIN)/python scripts/device_coverage $(ARGS)

# The tests that run code of other packages, in an environment of their own, with the extensions of the first one.
integrations: $(STAMP) $(INTEGRATIONS)/.installed
	PYTHONPATH=$(CURDIR) $(INTEGRATIONS)/bin/python -m pytest tests/integrations $(ARGS)

# A sample of the tests on the newest torch. The extension does not link against torch: that of the first one serves.
newest: $(STAMP) $(NEWEST)/.installed
	$(NEWEST)/bin/python -c "import torch; print('torch', torch.__version__)"
	OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR) $(NEWEST)/bin/python -m pytest $(NEWEST_SAMPLE) $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(shell find csrc tests -name '*.cpp' -o -name '*.h')

# The package itself, then what its users' type checkers make of it; pyright is pinned, since releases report differently.
types: $(STAMP)
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest actckpt._C --mypy-config-file pyproject.toml \
		--allowlist .ci/stub_allowlist --ignore-unused-allowlist
	$(BIN)/python -m pytest -rA tests/typing $(ARGS)

# The documentation as a site, build/site/index.html; a link that leads nowhere is an error.
docs: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build

# Sdist and wheel of this Python in dist/, checked, and the wheel tried in an empty environment. cibuildwheel builds those of
# a release (pyproject.toml, RELEASE.md).
wheels: $(STAMP)
	$(BIN)/python scripts/package_check dist

bench: $(STAMP)
	$(BIN)/python -m pytest benchmarks $(ARGS)

# A compiler is all it needs.
sanitize:
	scripts/engine_sanitize

# TransformerEngine's Python code on the CPU, in an environment of its own. ARGS="-k ..." picks tests.
te: $(STAMP)
	set -e; for version in $(TE_VERSION); do \
		PYTHON="$(PYTHON)" TE_VENV="$(TE_VENV)" TE_VERSION="$$version" scripts/te_on_cpu $(ARGS); \
	done

# torch first and pinned: a range would pull another build of it. pip's -v shows each source that is compiled.
$(STAMP): $(SOURCES)
	@echo "== 1/3: a virtual environment in $(VENV)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "== 2/3: torch, as constraints.txt pins it: the download is large where nothing is cached"
	$(BIN)/python -m pip install -c constraints.txt torch
	@echo "== 3/3: the other packages and actckpt, whose C++ is compiled: one to two minutes on two cores"
	$(BIN)/python -m pip install -v -c constraints.txt -e '.[test,lint,plot]'
	@touch $(STAMP)

# PyPI's torchvision, which timm asks for, goes with another build of torch and does not import beside this one. Of what
# torchtitan asks for, its activation checkpointing needs what $< has.
$(INTEGRATIONS)/.installed: tests/integrations/requirements.txt constraints.txt
	@echo "== $(INTEGRATIONS): torch and the packages of $<"
	test -x $(INTEGRATIONS)/bin/python || $(PYTHON) -m venv $(INTEGRATIONS)
	$(INTEGRATIONS)/bin/python -m pip install -c constraints.txt torch
	$(INTEGRATIONS)/bin/python -m pip install -c constraints.txt -r $<
	$(INTEGRATIONS)/bin/python -m pip install --no-deps torchtitan==0.3.0
	$(INTEGRATIONS)/bin/python -m pip uninstall --yes torchvision
	touch $@

$(NEWEST)/.installed:
	@echo "== $(NEWEST): the newest torch, a large download, once"
	test -x $(NEWEST)/bin/python || $(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install torch pytest pytest-xdist hypothesis numpy scipy rich matplotlib pybind11 setuptools
	touch $@

$(DOCS)/.installed: pyproject.toml
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install $$($(PYTHON) -c \
		"import re; print(*re.findall('\"(mkdocs[^\"]*)\"', open('pyproject.toml').read()))")
	touch $@

clean:
	rm -rf $(VENV) $(TE_VENV) $(INTEGRATIONS) $(NEWEST) $(DOCS) build dist actckpt/*.so *.egg-info
