# Needs Python 3.11 or later; PYTHON=python3.12 chooses one. CONSTRAINTS= installs the newest versions.
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= -c constraints.txt

.PHONY: quickstart install test check

quickstart: install
	$(VENV)/bin/aespa-pl fit --config configs/quickstart_w2.yaml

install: $(VENV)/installed

test: $(VENV)/installed-dev
	$(VENV)/bin/python -m pytest -n 2 --dist worksteal --durations=25

check: $(VENV)/installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# torch first: resolved together with the rest, pip may pick another build of it.
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -q $(CONSTRAINTS) torch
	$(VENV)/bin/python -m pip install -q $(CONSTRAINTS) -e .
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(VENV)/bin/python -m pip install -q $(CONSTRAINTS) -e ".[dev]"
	touch $@
