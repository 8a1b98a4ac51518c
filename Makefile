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

.venv/.ready: pyproject.toml uv.lock scripts/setup.sh hatch_build.py src/semel/records/kernel.pyx
	@scripts/setup.sh
	@touch $@

.PHONY: demo
demo: setup ## one Spark pipeline with and without Semel, kill -9 for everything: what is lost and repeated (Java 17+)
	@scripts/need-java.sh
	@$(BIN)/semel demo

.PHONY: test
test: setup ## the everyday suite (Java 17+ for its Spark part)
	@scripts/need-java.sh
	@$(BIN)/pytest -n 3 --dist loadfile --durations=25

.PHONY: user
user: setup ## whole programs as users write them, restarted in the middle, counted by another client (Java 17+)
	@scripts/need-java.sh
	@$(BIN)/pytest tests/user -m user -n 2 --durations=10

.PHONY: page
page: setup ## the page of `semel ui` in a headless Chromium: every view, the one action, 1,000 partitions and 5,000 transactions
	@[ -n "$${SEMEL_CHROMIUM:-}" ] || command -v chromium chromium-browser >/dev/null || { echo "Chromium is missing. Install it: apt-get install chromium" >&2; exit 1; }
	@$(BIN)/pytest -m browser tests/web --durations=10

PYTHON ?= python3.13
PYTHON_VERSION = $(patsubst python%,%,$(PYTHON))

.PHONY: test-python
test-python: ## the everyday suite on another Python, in its own environment (PYTHON=python3.13; Java 17+)
	@scripts/need-java.sh
	@python=$$(scripts/find-python.sh "$(PYTHON_VERSION)") && \
	export UV_PROJECT_ENVIRONMENT=".venv-$(PYTHON_VERSION)" && PYTHON="$$python" scripts/setup.sh && \
	"$$UV_PROJECT_ENVIRONMENT/bin/pytest" -n 2 --dist loadfile

.PHONY: installs
installs: setup ## build the wheel, install it with each extra and on each Python, run every example there (Java 17+)
	@scripts/need-java.sh
	@PATH="$$PWD/.tools/bin:$$PATH" $(BIN)/pytest -m install tests/install

.PHONY: docs
docs: setup ## build the documentation as a site in site/, which needs no internet
	@PATH="$$PWD/.tools/bin:$$PATH" UV_PROJECT_ENVIRONMENT=.venv-docs NO_MKDOCS_2_WARNING=1 \
	uv run --quiet --locked --no-default-groups --group docs mkdocs build --strict --quiet

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
	@$(BIN)/pytest -m conformance --durations=25

.PHONY: conformance-whole
conformance-whole: setup ## the same with 100,000 messages a client and every client on every broker
	@scripts/need-java.sh mvn
	@SEMEL_WHOLE=1 $(BIN)/pytest -m conformance

.PHONY: chaos
chaos: setup ## kill the embedded broker 200 times, crash its disk at every boundary, kill Spark at every step (Java 17+, Maven)
	@scripts/need-java.sh mvn
	@SEMEL_CHAOS_KILLS="$${SEMEL_CHAOS_KILLS:-200}" SEMEL_SPARK_KILLS="$${SEMEL_SPARK_KILLS:-44}" \
	SEMEL_MIRROR_TRANSACTIONS="$${SEMEL_MIRROR_TRANSACTIONS:-20000}" \
	SEMEL_SPARK_CLUSTER_KILLS="$${SEMEL_SPARK_CLUSTER_KILLS:-20}" \
	SEMEL_SPARK_CLUSTER_RECORDS="$${SEMEL_SPARK_CLUSTER_RECORDS:-2000000}" $(BIN)/pytest -m chaos -n 2 --dist loadfile --durations=25

.PHONY: compat
compat: setup ## sink, source and Spark Connect on pyspark 3.5, 4.0, 4.2 and 4.3 (PARTS="4.0 3.5:sink" for fewer; Java 17+, Maven)
	@scripts/need-java.sh mvn
	@PATH="$$PWD/.tools/bin:$$PATH" $(BIN)/python tests/spark/compat.py $${PARTS:-}

.PHONY: simulate
simulate: setup ## 10,000 seeds of broker and client in virtual time, 200 transactions each (SEEDS=n for fewer)
	@$(BIN)/python -m semel.verify.simulation --seeds "$${SEEDS:-10000}" --transactions 200

.PHONY: simulate-broker
simulate-broker: setup ## shorter runs of the broker alone, with small clients of its own (SEEDS=n for fewer)
	@$(BIN)/python -m semel.verify.simulation --seeds "$${SEEDS:-10000}"

VERIFY_LONG := --workload copier --client semel --seed "$${SEED:-2026}" --option partitions=6 --option sources=2 \
	--option workers=3 --option rate=8000 --option batch_records_max=5000 --option transaction_timeout_ms=2000 \
	--option session_timeout_ms=2000 --option patience_s=10

.PHONY: verify-long
verify-long: setup ## 10 million records on the embedded broker under 200 kills, 2,000 cuts and 100 pauses past time-outs
	@$(BIN)/semel verify --time 20m --faults kill=5.5,restart=0.3,worker-kill=11,cut=260,zombie=8.5,storm=0.2,pause=1,hijack=1,repeat=6,reorder=3,late=3,delay=3 $(VERIFY_LONG)

.PHONY: verify-long-kafka
verify-long-kafka: setup ## a tenth of that on Apache Kafka 3.9 (Java 17+, Maven)
	@scripts/need-java.sh mvn
	@$(BIN)/semel verify --target kafka:3.9.2 --time 4m --faults kill=1.5,worker-kill=6,cut=200,zombie=4,storm=0.2,hijack=1,repeat=6,reorder=3,late=3,delay=3 $(VERIFY_LONG)

.PHONY: storm
storm: setup ## 2 million records copied while sessions join, leave, are killed and stopped 52 times, on Apache Kafka 4.x and 3.9 (Java 17+, Maven)
	@scripts/need-java.sh mvn
	@for target in kafka kafka:3.9.2; do $(BIN)/python -m semel.verify.session_storm --target $$target; done

.PHONY: hostile
hostile: setup ## a million damaged requests against the embedded broker
	@$(BIN)/python -m semel.verify.hostile

.PHONY: fuzz
fuzz: setup ## 10 million mutated batches through the compiled kernel under sanitizers, and 100,000 random tables against the reference (BATCHES=n for fewer; gcc)
	@scripts/fuzz-kernel.sh
	@SEMEL_RANDOM_TABLES=100000 $(BIN)/pytest tests/records/test_records_agreement.py -n 2 -k random_tables

.PHONY: bench
bench: setup ## every benchmark section (the client and broker sections need Java 17+ and Maven)
	@scripts/need-java.sh mvn
	@$(BIN)/semel bench
