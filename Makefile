# make demo   a language model learns addition on this machine: its own .venv, install, run, into runs/demo
# make test   lint, types, then every test that needs no GPU: about a quarter of an hour on two cores
# make test-backends   Megatron-core on gloo ranks, layouts and whole runs: about 7 minutes on two cores
# make test-agents   environments of packages that are no dependencies, and SDKs of others: about 20 minutes on two cores
# make test-system   a real browser, a real Slurm, random faults with their seed: programs from tests/system/install.sh
# make api    the API reference as HTML, into build/api
# make settings   docs/settings.md and docs/combinations.md, from the configs and their rows
# All install what they need; PYTHON and TORCH can be overridden: make demo TORCH=torch==2.12.0

PYTHON ?= $(shell for p in python3.11 python3.12 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null && echo $$p && break; done)
TORCH  ?= torch==2.13.0
TRITON ?= $(shell uname -s | sed -n 's/Linux/triton==3.6.0/p')
VENV   := .venv
BIN    := $(VENV)/bin
QUIET  := $(shell test -t 2 || echo -qq)  # a terminal shows pip's progress
PIP    := $(BIN)/python -m pip $(QUIET) --disable-pip-version-check
FAST   := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= # each of the many processes would compile the package anew
# In the order of their folders: the long files of few tests, those of dist, come before the many short ones of unit.
# What agents and backends import takes each worker longer than all other imports.
TESTS  := $(FAST) $(BIN)/pytest -q --dist loadfile --no-loadscope-reorder --ignore tests/agents --ignore tests/backends tests

.PHONY: demo test lint unit dist test-backends test-agents test-system chaos fuzz api settings clean

demo: $(VENV)/.demo
	@aside=runs/demo-$$(date +%Y%m%d-%H%M%S); \
	if test -e runs/demo; then mv runs/demo $$aside && echo "the earlier runs/demo is now $$aside"; fi
	$(BIN)/spmd-rl run examples/arithmetic/recipe.py --config examples/arithmetic/demo.toml --nproc 2

test: lint
	$(TESTS) -n 4 -m "not gpu and not system and not backends and not agents"
	@$(BIN)/python -m benchmarks.since_gpu_tests

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/mypy

unit: $(VENV)/.dev
	$(TESTS) -n 2 -m "not dist and not gpu and not system and not agents"

dist: $(VENV)/.dev
	$(TESTS) -n 4 -m "dist and not gpu and not system and not backends"

test-backends: $(VENV)/.backends
	$(FAST) $(BIN)/pytest -q -m backends tests/backends

test-agents: $(VENV)/.agents
	$(FAST) $(BIN)/pytest -q -m agents tests/agents

test-system: $(VENV)/.dev
	tests/system/install.sh
	$(FAST) $(BIN)/pytest -q -s -m system tests

chaos: $(VENV)/.dev
	$(FAST) $(BIN)/python -m tests.system.chaos --faults 200 --jobs 2 --save

fuzz: $(VENV)/.dev
	$(FAST) $(BIN)/python -m tests.fuzz --frames 600000

api: $(VENV)/.docs
	$(BIN)/python -m docs.build_api build/api
	@echo "open build/api/index.html"

settings: $(VENV)/.dev
	$(BIN)/python -m docs.build_settings
	$(BIN)/python -m docs.build_combinations

# A stamp is as old as the environment it speaks of: it is made anew when what it was built from changes.
$(VENV)/.demo: setup.py constraints.txt
	@test -n "$(PYTHON)" || { echo "spmd-rl needs Python 3.11 or 3.12: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11"; exit 1; }
	@echo "installing into $(VENV) (once; a few minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install "$(TORCH)" --constraint constraints.txt
	@$(PIP) install --editable . "$(TORCH)" --constraint constraints.txt
	@touch $@

$(VENV)/.dev: $(VENV)/.demo pyproject.toml Makefile
	@$(PIP) install --editable ".[dev]" "$(TORCH)" $(TRITON) --constraint constraints.txt
	@touch $@

$(VENV)/.backends: $(VENV)/.dev setup.py
	@$(PIP) install --editable ".[megatron]" "$(TORCH)" $(TRITON) --constraint constraints.txt
	@touch $@

$(VENV)/.agents: $(VENV)/.dev setup.py
	@$(PIP) install --editable ".[agents,environments,verifiers,openenv]" "$(TORCH)" $(TRITON) --constraint constraints.txt
	@$(PIP) install --no-deps trl==1.16.0 # its chat templates
	@touch $@

$(VENV)/.docs: $(VENV)/.demo Makefile
	@$(PIP) install --editable ".[docs]" "$(TORCH)" --constraint constraints.txt
	@touch $@

clean:
	rm -rf $(VENV) runs build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
