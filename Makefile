# make test   lint, types, import contract, tests
# make demo   train the example on two local ranks
# Both create .venv from constraints.txt first. Another interpreter: make PYTHON=python3.12 …

SHELL := /bin/bash
PYTHON ?= $(shell for name in python3 python python3.14 python3.13 python3.12 python3.11; do \
    "$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$name"; break; }; done)
RANKS ?= 2
BIN := .venv/bin

.PHONY: test demo lint clean

test: .venv/installed lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses=2 --dist=worksteal --session-timeout=3000

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

demo: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m torch.distributed.run --standalone --nproc-per-node=$(RANKS) examples/train_text.py

# torch first and pinned, so that nothing else chooses its version.
.venv/installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "make: no Python >= 3.11 found; write: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf .venv out dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
