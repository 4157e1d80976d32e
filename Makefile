# Headrace: the same few commands by hand and in CI. `make help` lists them.
#
#   make up [MODEL=…] [PORT=8080] [REDIS_URL=redis://…] [POOL=…] [DEVICE=…]
#
# Other settings are HEADRACE_* variables (`.venv/bin/python -m worker --help`). On a machine without a GPU, point
# PIP_EXTRA_INDEX_URL at torch's index of CPU builds: it saves the download of CUDA.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
TYPED := headrace worker gateway kernels benchmarks examples

MODEL ?=
PORT ?=
REDIS_URL ?=
POOL ?=
DEVICE ?=
ARGS ?=
UP_FLAGS = $(if $(MODEL),--model "$(MODEL)") $(if $(PORT),--port "$(PORT)") \
	$(if $(REDIS_URL),--redis-url "$(REDIS_URL)") $(if $(POOL),--pool "$(POOL)") \
	$(if $(DEVICE),--device "$(DEVICE)")

.DEFAULT_GOAL := help
.PHONY: help up test check format bench bench-peers bench-scale exact chaos clean install model

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

up: $(VENV)/.installed ## start Redis, a worker and the gateway; serve until Ctrl-C
	@exec $(BIN)/headrace up $(UP_FLAGS) $(ARGS)

install: $(VENV)/.installed ## make the virtual environment

model: $(VENV)/.installed ## fetch the demo model
	@$(BIN)/headrace fetch >/dev/null

test: $(VENV)/.installed-test model ## run all tests, the quick ones first
	$(BIN)/python tests/run.py $(ARGS)

check: $(VENV)/.installed-test ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(TYPED)

format: $(VENV)/.installed-test ## format and fix what can be fixed
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

bench: $(VENV)/.installed-bench model ## measure on this machine
	$(BIN)/python -m benchmarks $(ARGS)

bench-peers: $(VENV)/.installed-bench model ## measure beside other servers, which it installs under the cache
	$(BIN)/python -m benchmarks.peers $(ARGS)

bench-scale: $(VENV)/.installed-bench model ## measure pools of up to 100 simulated workers on one Redis
	$(BIN)/python -m benchmarks.scale $(ARGS)

exact: $(VENV)/.installed model ## prove that answers do not depend on the crowd
	$(BIN)/python -m benchmarks.exact $(ARGS)

chaos: $(VENV)/.installed model ## kill and freeze everything under load; prove that nothing is lost
	$(BIN)/python -m benchmarks.chaos $(ARGS)

clean: ## remove the virtual environment and what tools left; keeps models and queues
	rm -rf $(VENV) build dist results .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is newer than what it was made from: the next `make` starts in seconds.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; set PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install --quiet --progress-bar on -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(PIP) install --quiet -c constraints.txt -e '.[test]'
	@touch $@

$(VENV)/.installed-bench: $(VENV)/.installed
	$(PIP) install --quiet -c constraints.txt -e '.[bench]'
	@touch $@
