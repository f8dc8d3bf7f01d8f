# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# On a busy machine, threads that spin at OpenMP barriers can slow torch down a hundredfold.
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: demo test soak lint types bench sanitize clean

demo: $(STAMP)
	$(BIN)/python -m actckpt demo $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest $(ARGS)

# Nothing may grow over 20,000 steps; `make test` runs the same over 2,000.
soak: $(STAMP)
	$(BIN)/python -m pytest -m soak $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/python -m pytest benchmarks $(ARGS)

# A compiler is all it needs.
sanitize:
	scripts/engine_sanitize

# torch first and pinned: a range would pull another build of it.
$(STAMP): pyproject.toml setup.py constraints.txt $(shell find csrc -name '*.cpp' -o -name '*.h')
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test,lint,plot]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) build actckpt/*.so *.egg-info
