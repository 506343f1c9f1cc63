# Two commands for a newcomer, on a machine with Python 3.11 and nothing else:
#   make demo    install, simulate a cohort, fit, predict, write demo/
#   make test    install the development tools, run every test
# and, for readers of the paper,
#   make paper   every table and figure of its experiments, written to paper/
#
# The environment is .venv. It is made once and brought up to date when pyproject.toml or
# constraints.txt change (stamp files); a second run starts at once. The package is installed
# editable, so changes of the source need no reinstallation.

PYTHON ?= $(shell python3.11 -c '' 2>/dev/null && echo python3.11 || echo python3)
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
ARGS ?=
SCRIPTS ?= $(sort $(wildcard benchmarks/*.py))

# The isolated environments that pip builds packages in follow the same pins: older pip reads
# the first name there, newer pip the second.
export PIP_CONSTRAINT := constraints.txt
export PIP_BUILD_CONSTRAINT := constraints.txt

# Tests run in two workers: one thread each fills two cores, more would compete. Each begins with
# a half of them, so that what tests of one file share is made once.
WORKERS := 2
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1

# Damaged files per target of `make fuzz`.
CASES ?= 10000

.PHONY: help demo paper proof test fuzz lint format docs bench studies clean
.DELETE_ON_ERROR:

help:
	@echo "make demo    simulate a cohort, fit, predict held-out slides, write demo/"
	@echo "make paper   every table and figure of the paper, in paper/ (ARGS=--quick: two minutes)"
	@echo "make test    every test and every documented example (ARGS='-k graphs' selects)"
	@echo "make fuzz    damaged files by the thousand, under limits (CASES=10000 per target)"
	@echo "make lint    ruff, format check, mypy"
	@echo "make format  let ruff rewrite what it can"
	@echo "make proof   tests with a known answer, for every model, on one page"
	@echo "make docs    the documentation site, in site/"
	@echo "make bench   speed and memory against stated bars (gpmil bench)"
	@echo "make studies every script in benchmarks/, or SCRIPTS=..."
	@echo "make clean   remove what was built, keep .venv"

demo: .venv/.stamp-run
	$(BIN)/gpmil demo $(ARGS)

paper: .venv/.stamp-run
	$(ONE_THREAD) $(BIN)/gpmil paper $(ARGS)

proof: .venv/.stamp-run
	$(ONE_THREAD) $(BIN)/gpmil proof $(ARGS)

test: .venv/.stamp-dev
	$(ONE_THREAD) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

fuzz: .venv/.stamp-dev
	cd tests && $(ONE_THREAD) ../$(BIN)/python -m fuzz.campaign --cases $(CASES) $(ARGS)

lint: .venv/.stamp-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: .venv/.stamp-dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: .venv/.stamp-dev
	$(ONE_THREAD) $(BIN)/sphinx-build --fail-on-warning --keep-going --quiet -d site/.doctrees docs site
	rm -rf site/.doctrees

bench: .venv/.stamp-run
	$(BIN)/gpmil bench $(ARGS)

studies: .venv/.stamp-dev
	@set -e; for script in $(SCRIPTS); do \
		echo "$$script"; $(BIN)/python "$$script" $(ARGS); done

clean:
	rm -rf build dist site docs/_made demo paper paper-parts proof proof-parts .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks docs -name __pycache__ -type d -prune -exec rm -rf {} +

# An environment that is already there is used, not made anew.
.venv/.stamp-venv:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; \
	sys.exit(None if (3, 11) <= v < (3, 14) else \
	"gpmil needs Python 3.11, 3.12 or 3.13, but $(PYTHON) is %d.%d: run make PYTHON=python3.11" % v)'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	touch $@

.venv/.stamp-run: .venv/.stamp-venv pyproject.toml constraints.txt
	@echo "installing gpmil into .venv (once; minutes, most of them for torch)"
	$(PIP) torch
	$(PIP) --editable .
	touch $@

.venv/.stamp-dev: .venv/.stamp-run
	@echo "installing the development tools into .venv (once)"
	$(PIP) --editable '.[dev]'
	touch $@
