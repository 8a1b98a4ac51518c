# Needs Python 3.11+ and make; Java 17+ for Spark, Maven only where a target says so. `make help` lists the targets.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

BIN := .venv/bin

.PHONY: help
help: ## list the targets
	@sed -n 's/^\([a-z][a-z-]*\):[^#]*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | awk -F '\t' '{ printf "  make %-18s %s\n", $$1, $$2 }'

.PHONY: setup
setup: .venv/.ready ## make .venv with everything in it

.venv/.ready: pyproject.toml uv.lock scripts/setup.sh
	@scripts/setup.sh
	@touch $@

.PHONY: demo
demo: setup ## see what Semel does, on the embedded broker
	@$(BIN)/semel demo

.PHONY: test
test: setup ## the everyday suite (Java 17+ for its Spark part)
	@$(BIN)/pytest

.PHONY: lint
lint: setup ## style and formatting
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

.PHONY: format
format: setup ## put imports and formatting right
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

.PHONY: types
types: setup ## pyright, strict on wire, records and core
	@$(BIN)/pyright

.PHONY: conformance
conformance: setup ## the same behaviour on the embedded broker and on Apache Kafka 4.x, 3.9 and 2.5 (Java 17+, Maven)
	@scripts/need-java.sh mvn
	@$(BIN)/pytest -m conformance

.PHONY: conformance-whole
conformance-whole: setup ## the same with 100,000 messages a client and every client on every broker
	@scripts/need-java.sh mvn
	@SEMEL_WHOLE=1 $(BIN)/pytest -m conformance

.PHONY: chaos
chaos: setup ## kill the embedded broker 200 times under load, crash its disk at every boundary, kill Spark at every step (Java 17+)
	@SEMEL_CHAOS_KILLS="$${SEMEL_CHAOS_KILLS:-200}" $(BIN)/pytest -m chaos

.PHONY: simulate
simulate: setup ## 10,000 seeds of the broker in virtual time, with all kinds of failures
	@$(BIN)/python -m semel.verify.simulation --seeds "$${SEEDS:-10000}"

.PHONY: hostile
hostile: setup ## a million damaged requests against the embedded broker
	@$(BIN)/python -m semel.verify.hostile

.PHONY: bench
bench: setup ## every benchmark section (the client and broker sections need Java 17+ and Maven)
	@scripts/need-java.sh mvn
	@$(BIN)/semel bench
