# Every target does its own set-up in .venv; `make test` and `make demo` work on a bare clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
FLOOR := .venv-floor
NEWEST := .venv-newest
DOCS := .venv-docs
# Tests are small: a core each serves them better than all cores together.
WORKERS ?= 2
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
# Every process that collects tests would compile them anew, 8 s of its time.
export PYTHONDONTWRITEBYTECODE :=
QUICK := -m "not (slow or distributed or gpu or sweep)"
INTERPRETED = $$(grep -rl --include='test_*.py' 'mark\.interpreted' tests)

.PHONY: help setup test lint types unit interpreted quick sweep floor newest wheel dist docs demo bench monitors-table failures-table clean

help:  ## Show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 16

setup: $(STAMP)  ## Create .venv with the pinned versions of constraints.txt

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --quiet --disable-pip-version-check --editable '.[demo,dev]'
	@touch $(STAMP)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

unit: $(STAMP)
	$(PYTEST) -m "not sweep"

# Fills the time in which ranks of the other tests wait for each other; says its lines together.
interpreted: WORKERS := 1
interpreted: $(STAMP)
	@output=$$(TRITON_INTERPRET=1 $(PYTEST) -m "interpreted and not sweep" $(INTERPRETED) 2>&1); \
	status=$$?; echo "$$output"; exit $$status

test: lint  ## Lint, check types, run all tests but those of `sweep`
	@$(MAKE) --no-print-directory -j3 types interpreted unit

quick: lint  ## Lint, run the tests that take less than a minute together
	$(PYTEST) $(QUICK)

sweep: $(STAMP)  ## Run what `test` leaves out: every kernel in every variant
	$(PYTEST) -m sweep
	TRITON_INTERPRET=1 $(PYTEST) -m "interpreted and sweep" $(INTERPRETED)

floor: BIN := $(FLOOR)/bin
floor: $(FLOOR)/.installed  ## Run the quick tests with the lowest versions of pyproject.toml
	$(PYTEST) $(QUICK)

$(FLOOR)/.installed: pyproject.toml .ci/floor.py
	$(PYTHON) -m venv $(FLOOR)
	$(PYTHON) .ci/floor.py > $(FLOOR)/constraints.txt
	$(FLOOR)/bin/pip install --quiet --constraint $(FLOOR)/constraints.txt --editable '.[demo,dev]'
	@touch $@

newest: BIN := $(NEWEST)/bin
newest:  ## Run the quick tests with the newest versions there are
	$(PYTHON) -m venv $(NEWEST)
	$(BIN)/pip install --quiet --upgrade --upgrade-strategy eager --editable '.[demo,dev]'
	$(PYTEST) $(QUICK)

wheel:  ## Install the built wheel where the tree is not, run README and docs with it
	PYTHON=$(PYTHON) .ci/wheel

dist: $(STAMP)  ## Build the wheel and the source distribution of the last commit in dist/
	rm -rf dist
	$(BIN)/python -m build --outdir dist

docs: $(DOCS)/.installed  ## Build the documentation in site/; a warning or a dead link fails
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

# The `docs` extra alone: its tools read the sources, and import neither torch nor Lightning.
$(DOCS)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DOCS)
	sed -n '/^docs = \[/,/^\]/s/^  "\(.*\)",$$/\1/p' pyproject.toml > $(DOCS)/requirements.txt
	$(DOCS)/bin/pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --requirement $(DOCS)/requirements.txt
	@touch $@

demo: $(STAMP)  ## Train a CLIP on glyphs, test it, draw what it finds; ARGS=--fast for two minutes
	$(BIN)/python examples/glyph_clip/run.py $(ARGS)

bench: $(STAMP)  ## Measure on this machine's CPU what the README claims, in a quarter of an hour
	$(BIN)/python benchmarks/contrastive_loss.py --device cpu
	$(BIN)/python benchmarks/contrastive_loss.py --device cpu --objective sigmoid --scale 10 --repeats 3
	$(BIN)/python benchmarks/contrastive_loss.py --device cpu --batch 16384 --width 256 --repeats 1 --max-seconds 5
	$(BIN)/python benchmarks/optimizer_step.py --device cpu --size S16 --rounds 5
	$(BIN)/python benchmarks/precision.py --device cpu --size tiny --image 32 --rounds 1
	$(BIN)/python benchmarks/monitor_overhead.py --device cpu --pairs 1
	$(BIN)/python benchmarks/tables.py

monitors-table: $(STAMP)  ## Count the false alarms of all monitors in healthy runs of real models
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.monitors.table $(TABLE)

failures-table: $(STAMP)  ## Plant failures, and count which are named and which remedies cure them
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.monitors.failures_table $(TABLE)

clean:  ## Remove the .venvs and everything that was made here
	rm -rf $(VENV) $(FLOOR) $(NEWEST) $(DOCS) build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache
