# Every target sets up what it needs in .venv; `make test` and `make demo` work on a fresh clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
FLOOR := .venv-floor
NEWEST := .venv-newest
DOCS := .venv-docs
# Tests are small: two workers with one thread each are faster than one with all threads.
WORKERS ?= 2
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
# Write bytecode even if the environment disables it: otherwise every worker compiles the tests, 8 s each.
export PYTHONDONTWRITEBYTECODE :=
QUICK := -m "not (slow or distributed or gpu or sweep)"
COMPILED := tests/contrastive/triton_tiles/test_every_launch.py
INTERPRETED = $$(grep -rl --include='test_*.py' 'mark\.interpreted' tests)

.PHONY: help setup test lint types unit interpreted quick sweep floor floor-sweep newest wheel dist docs demo bench monitors-table failures-table clean

help:  ## Show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 16

setup: $(STAMP)  ## Create .venv with the versions of constraints.txt

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

# Uses the time in which ranks of other tests wait for each other; prints its output at the end.
interpreted: WORKERS := 1
interpreted: $(STAMP)
	@output=$$(TRITON_INTERPRET=1 $(PYTEST) -m "interpreted and not sweep" $(INTERPRETED) 2>&1); \
	status=$$?; echo "$$output"; exit $$status

test: lint  ## Lint, check types, run all tests except those of `sweep`
	@$(MAKE) --no-print-directory -j3 types interpreted unit

quick: lint  ## Lint, run the quick tests
	$(PYTEST) $(QUICK)

sweep: $(STAMP)  ## Run the tests that `test` omits: every kernel in every variant
	$(PYTEST) -m sweep
	TRITON_INTERPRET=1 $(PYTEST) -m "interpreted and sweep" $(INTERPRETED)

floor: BIN := $(FLOOR)/bin
floor: $(FLOOR)/.installed  ## Run the quick tests and compile kernels with the lowest versions of pyproject.toml
	$(PYTEST) $(QUICK)
	$(PYTEST) -m "not sweep" $(COMPILED)

floor-sweep: BIN := $(FLOOR)/bin
floor-sweep: $(FLOOR)/.installed  ## Compile every kernel in every variant with the lowest Triton
	$(PYTEST) -m sweep $(COMPILED)

$(FLOOR)/.installed: pyproject.toml .ci/floor.py
	$(PYTHON) -m venv $(FLOOR)
	$(PYTHON) .ci/floor.py > $(FLOOR)/constraints.txt
	$(FLOOR)/bin/pip install --quiet --constraint $(FLOOR)/constraints.txt --editable '.[demo,dev]'
	@touch $@

newest: BIN := $(NEWEST)/bin
newest:  ## Run the quick tests with the newest available versions
	$(PYTHON) -m venv $(NEWEST)
	$(BIN)/pip install --quiet --upgrade --upgrade-strategy eager --editable '.[demo,dev]'
	$(PYTEST) $(QUICK)

wheel:  ## Run the code blocks of README and docs with the built wheel, outside the tree
	PYTHON=$(PYTHON) .ci/wheel

dist: $(STAMP)  ## Build the wheel and the source distribution of the last commit in dist/
	rm -rf dist
	$(BIN)/python -m build --outdir dist

docs: $(DOCS)/.installed  ## Build the documentation in site/; warnings and dead links are errors
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

# Only the `docs` extra: its tools read the sources and import neither torch nor Lightning.
$(DOCS)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DOCS)
	sed -n '/^docs = \[/,/^\]/s/^  "\(.*\)",$$/\1/p' pyproject.toml > $(DOCS)/requirements.txt
	$(DOCS)/bin/pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --requirement $(DOCS)/requirements.txt
	@touch $@

demo: $(STAMP)  ## Train and test a CLIP on glyphs, draw retrieved glyphs; ARGS=--fast takes two minutes
	$(BIN)/python examples/glyph_clip/run.py $(ARGS)

bench: $(STAMP)  ## Repeat the README's measurements on this machine's CPU, in a quarter of an hour
	$(BIN)/python benchmarks/contrastive_loss.py --device cpu
	$(BIN)/python benchmarks/contrastive_loss.py --device cpu --objective sigmoid --scale 10 --repeats 3
	$(BIN)/python benchmarks/contrastive_loss.py --device cpu --batch 16384 --width 256 --repeats 1 --max-seconds 5
	$(BIN)/python benchmarks/optimizer_step.py --device cpu --size S16 --rounds 5
	$(BIN)/python benchmarks/precision.py --device cpu --size tiny --image 32 --rounds 1
	$(BIN)/python benchmarks/monitor_overhead.py --device cpu --pairs 1
	$(BIN)/python benchmarks/tables.py

monitors-table: $(STAMP)  ## Count the false alarms of all monitors in healthy runs
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.monitors.table $(TABLE)

failures-table: $(STAMP)  ## Cause failures; count which are detected and which remedies cure them
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.monitors.failures_table $(TABLE)

clean:  ## Remove the virtual environments and all build outputs
	rm -rf $(VENV) $(FLOOR) $(NEWEST) $(DOCS) build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache
