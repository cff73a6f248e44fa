# Everything from nothing: a stock Python 3.11 with pip and venv, and a network for the first run.

PYTHON ?= python3
BIN = .venv/bin
PROJECT = {{cookiecutter.__folder}}
LOCK = $(PROJECT)/requirements.lock

.PHONY: test demo bench rules faults lint clean

test: .venv/installed
	$(BIN)/python -m pytest

# Generate a project with the default answers, train it, and show what came of it.
demo: .venv/installed
	rm -rf demo
	$(BIN)/python -m cookiecutter . --no-input --default-config --output-dir demo
	cd demo/my-lightning-project && ../../$(BIN)/python -m my_lightning_project fit

# Ratios against plain PyTorch, with machine and versions; about 15 minutes.
bench: .venv/installed
	$(BIN)/python benchmarks/loader.py
	$(BIN)/python benchmarks/fit.py

# What each rule's test says once the rule's behaviour is taken out; about 6 minutes.
rules: .venv/installed
	$(BIN)/python tests/mutations.py

# Faults put into real processes, and what they cost; about 40 minutes.
faults: .venv/installed
	$(BIN)/python tests/faults/campaign.py

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/ruff check '$(PROJECT)/{{cookiecutter.package_name}}'
	$(BIN)/ruff format --check '$(PROJECT)/{{cookiecutter.package_name}}'

# Made anew when the versions change, because what they no longer name must not linger. pip reads dependency groups from
# 25.1 on. The stamp comes last, so that an installation that broke off is not taken for a whole one.
.venv/installed: $(LOCK) pyproject.toml
	rm -rf .venv
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --requirement '$(LOCK)' --group dev
	touch $@

clean:
	rm -rf .venv demo .pytest_cache .ruff_cache .mypy_cache
