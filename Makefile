# Both main targets do all the set-up from a fresh clone:  make train   make test
PYTHON ?= python3
TORCH  ?= torch>=2.11,<2.14
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
export OMP_NUM_THREADS ?= 1

.PHONY: train test install lint types walls reference docs soak gpu clean help

help:
	@echo "make train    train a GPT on two ranks for about two minutes, into runs/"
	@echo "make test     linters and the whole test suite"
	@echo "make soak     the long fault campaigns, and late collectives under all parallel tests"
	@echo "make reference  docs/reference, the page of errors and the table in docs/design.md from the code"
	@echo "make docs     the documentation as a site, into build/site"
	@echo "make gpu      the tests that need an accelerator, then checks and the table of the first run (ten minutes on one device)"
	@echo "make install  the virtual environment in .venv alone"

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	@# torch first and by itself: with it in place nothing else pulls another build of it
	$(BIN)/pip install --quiet "$(TORCH)"
	$(BIN)/pip install --quiet -e ".[dev,docs,fp8,hf,kernels,onnx,tables]"
	@touch $@

install: $(READY)

train: $(READY)
	$(BIN)/shardwise train examples/gpt_stdlib.yaml --ranks 2 $(ARGS)

# Two halves run side by side, because most tests wait for processes that they start. Files begin in the order of
# tests/everyday.py, the longest first. The processes import compiled files, also where the environment forbids Python to
# write them: a process then starts in two thirds of the time.
test: lint types walls
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

walls: $(READY)
	$(BIN)/lint-imports

reference: $(READY)
	$(BIN)/python docs/make_reference.py
	$(BIN)/python docs/make_errors.py
	$(BIN)/python docs/make_design.py

docs: $(READY)
	$(BIN)/python docs/make_site.py $(ARGS)

soak: $(READY)
	$(BIN)/python -m pytest -m soak --timeout=3600 $(ARGS)
	$(BIN)/python -m pytest --late --timeout=3600 tests/parallel tests/engine $(ARGS)

gpu: $(READY)
	$(BIN)/python -m pytest -m gpu $(ARGS)
	$(BIN)/python benchmarks/accelerator/run.py

clean:
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
