"""Consume, transform, produce and commit as one: Semel's session beside confluent-kafka and the Java client.

Beside confluent-kafka in transactions of about 50,000 records, of equal and of ragged length; beside the Java client in
transactions of one record. confluent-kafka runs with its defaults and with the best of several tunings, which a short
trial finds out. All read the same input and take turns. Apache Kafka is started from Maven coordinates, or taken from
SEMEL_BENCH_BOOTSTRAP where that is set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from statistics import median

from semel.bench.client import PARTITIONS, kafka_to_measure, new_topic
from semel.bench.copiers import (
    DEFAULTS,
    SHAPES,
    TRANSACTION_RECORDS,
    TUNINGS,
    Shape,
    Tuning,
    copy_by_confluent,
    copy_by_session,
    fill,
)
from semel.bench.report import Bar, Row, Section
from semel.bench.singles import Job, Sizes, java_client, measure_rates, semel_client

RECORDS = 2_000_000
PART_RECORDS = 400_000
"""Enough for confluent-kafka with its defaults, which is slow, and for the trial of its tunings."""
ROUNDS = 5
TRIAL_ROUNDS = 2
_SINGLES = Sizes()

Rates = Mapping[str, list[float]]
"""Records a second of every turn, by who made them: semel, tuned, defaults."""


def run(records: int = RECORDS, rounds: int = ROUNDS, singles: Sizes = _SINGLES, *, java: bool = True) -> Section:
    """The section `session` of `semel bench`; without `java` what it is compared with is not measured."""
    rates: dict[Shape, Rates] = {}
    tunings: dict[Shape, Tuning] = {}
    with kafka_to_measure() as (bootstrap, broker):
        for shape in SHAPES:
            source = new_topic(bootstrap, f"session-in-{shape}")
            fill(bootstrap, source, records, shape)
            copy_by_session(bootstrap, source, min(records, TRANSACTION_RECORDS))  # what is only slow once
            tunings[shape] = best_tuning(bootstrap, source, min(records, PART_RECORDS))
            rates[shape] = _take_turns(bootstrap, source, records, rounds, tunings[shape])
        single = _measure_singles(bootstrap, singles, java=java)
    return Section(
        name="session",
        timed=f"records a second, {records:,} on {PARTITIONS} partitions, {rounds} turns each",
        columns=("best a second", "median a second", "Semel is x times as fast, best", "median"),
        rows=(
            *(row for shape in SHAPES for row in _rows(shape, rates[shape])),
            *_single_rows("one record read, written and committed", "copy", "semel.Session", single),
            *_single_rows("one record written and committed", "produce", "semel.Producer", single),
        ),
        bars=(
            Bar("equal records, median, against confluent-kafka tuned", 1.3, _over(rates["equal"], "tuned")),
            Bar("ragged records, median, against confluent-kafka tuned", 1.0, _over(rates["ragged"], "tuned")),
            Bar("equal records, median, against confluent-kafka's defaults", 4.0, _over(rates["equal"], "defaults")),
            Bar("one record read, written and committed, against the Java client", 1.0, _over_java(single, "copy")),
            Bar("one record written and committed, against the Java client", 1.0, _over_java(single, "produce")),
        ),
        notes=(
            f"{broker}, same machine; transactions of {TRANSACTION_RECORDS:,}; no compression",
            *(f"confluent-kafka tuned, {shape} records: {tuning.settings()}" for shape, tuning in tunings.items()),
            f"chosen from {len(TUNINGS)} tunings by the best of {TRIAL_ROUNDS} turns each",
            f"transactions of one record: all of {singles.turns} turns of {singles.turn}",
        ),
    )


def best_tuning(bootstrap: str, source: str, records: int) -> Tuning:
    """The tuning with which confluent-kafka is fastest on this machine and these records."""
    seconds = [
        min(copy_by_confluent(bootstrap, source, records, tuning)[0] for _ in range(TRIAL_ROUNDS)) for tuning in TUNINGS
    ]
    return TUNINGS[seconds.index(min(seconds))]


def _take_turns(bootstrap: str, source: str, records: int, rounds: int, tuning: Tuning) -> Rates:
    part = min(records, PART_RECORDS)
    ways: dict[str, tuple[int, Callable[[int], tuple[float, str]]]] = {
        "semel": (records, lambda count: copy_by_session(bootstrap, source, count)),
        "tuned": (records, lambda count: copy_by_confluent(bootstrap, source, count, tuning)),
        "defaults": (part, lambda count: copy_by_confluent(bootstrap, source, count, DEFAULTS)),
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, (count, copy) in ways.items():
            rates[name].append(count / copy(count)[0])
    return rates


def _rows(shape: Shape, rates: Rates) -> list[Row]:
    titles = {"semel": "semel.Session", "tuned": "confluent-kafka, tuned", "defaults": "confluent-kafka, defaults"}
    return [
        Row(
            f"{SHAPES[shape]}: {title}",
            (
                max(rates[name]),
                median(rates[name]),
                max(rates["semel"]) / max(rates[name]),
                _over(rates, name),
            ),
        )
        for name, title in titles.items()
    ]


def _over(rates: Rates, name: str) -> float:
    return median(rates["semel"]) / median(rates[name])


def _measure_singles(bootstrap: str, sizes: Sizes, *, java: bool) -> dict[tuple[str, Job], float]:
    source, target = new_topic(bootstrap, "single-in"), new_topic(bootstrap, "single-out")
    fill(bootstrap, source, sizes.records, "equal")
    with ExitStack() as stack:
        clients = {"semel": stack.enter_context(semel_client(bootstrap, source, target))}
        if java:
            clients["java"] = stack.enter_context(java_client(bootstrap, source, target))
        return measure_rates(clients, sizes)


def _over_java(single: dict[tuple[str, Job], float], job: Job) -> float | None:
    return single["semel", job] / single["java", job] if ("java", job) in single else None


def _single_rows(case: str, job: Job, ours: str, single: dict[tuple[str, Job], float]) -> tuple[Row, Row]:
    return (
        Row(f"{case}: {ours}", (single["semel", job], None, 1.0, None)),
        Row(f"{case}: Java client", (single.get(("java", job)), None, _over_java(single, job), None)),
    )
