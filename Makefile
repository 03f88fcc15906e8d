# install, demo, test, test-slow, bench, docs, lint. Everything runs in .venv, which `install` makes.
PYTHON ?= python3
BIN := .venv/bin
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: install demo test test-slow lint bench docs clean

install: .venv/installed

.venv/installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet torch torchvision
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	touch .venv/installed

demo: install
	$(BIN)/mmlens demo --out demo

lint: install
	$(BIN)/ruff check mmlens tests benchmarks
	$(BIN)/ruff format --check mmlens tests benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" -n 2 --dist worksteal

test-slow: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow -n 2 --dist worksteal

bench: install
	cd benchmarks && for script in capture reading geometry metrics; do ../$(BIN)/python $$script.py --json $$script.json || exit 1; done

docs: install
	$(BIN)/mkdocs build --strict

clean:
	rm -rf build dist site demo .pytest_cache .ruff_cache .mypy_cache .hypothesis
