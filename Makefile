# Every target sets up .venv by itself; only Python (3.11 or newer) and make are needed.
#   make train    train the tiny recipe on real text, minutes on two cores; EXTRAS=train,tensorboard adds its files
#   make test     the test suite
#   make check    format, lint, types
#   make docs     the pages of docs/ as a site, in build/site

PYTHON ?= python3
EXTRAS ?= train
VENV := .venv
BIN := $(VENV)/bin

.PHONY: train test check docs format clean

train: $(VENV)/stamp-$(EXTRAS)
	$(BIN)/jshard train models/gpt.py

# A file is run by one worker: its tests share what is compiled. tests/durations.py has the long files begin.
test: $(VENV)/stamp-test
	$(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder \
		-n $$($(BIN)/python -c 'import os; print(min(4, 1 + (os.cpu_count() or 1)))')

check: $(VENV)/stamp-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

docs: $(VENV)/stamp-docs
	DISABLE_MKDOCS_2_WARNING=true NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict --config-file docs/mkdocs.yml

format: $(VENV)/stamp-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# One stamp per extra: installed once, and again when pyproject.toml changes.
$(VENV)/stamp-%: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$*]'
	touch $@

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "jshard needs Python 3.11 or newer: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

clean:
	rm -rf $(VENV) build dist
