# The commands of this project. Each sets up what it needs; the first run installs into .venv.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: up down test check bench train-demo train-h200 setup

up: setup        ## store, Ray, gateway on port 8000, demo base and adapters; Ctrl-C ends all of it
	@$(BIN)/loramux up

down:            ## end what a crashed `make up` left
	@if [ -x $(BIN)/loramux ]; then $(BIN)/loramux down; fi

test: setup      ## unit, contract, repository and integration tests
	@$(BIN)/python -m pytest

check: setup     ## style, layers, units and contracts, in a few minutes
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/python -m pytest tests/unit tests/repo tests/contracts

bench: setup     ## LoraMux beside stock Ray Serve LLM and vLLM's own server, in one run
	@$(BIN)/loramux bench beside

train-demo: setup ## GRPO on two cores in about half an hour; the same command goes on where it was stopped
	@$(BIN)/loramux train demo

train-h200: setup ## five seeds on one H200, one after the other, and what they came to; GPU=1 as for setup
	@$(BIN)/loramux train h200 --seeds 5

setup:           ## only make .venv; PYTHON=... names another Python, GPU=1 is for a GPU machine (Python 3.12)
	@command -v $(PYTHON) >/dev/null || { echo "set-up failed: there is no '$(PYTHON)'; install Python 3.11" >&2; exit 1; }
	@$(PYTHON) serve_app/set_up.py $(if $(GPU),--gpu)
