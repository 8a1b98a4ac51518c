"""The questions of the guarantee adviser, in their order, and the answers to them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Literal

from semel.errors import ConfigError

Platform = Literal["service", "spark"]
Source = Literal["kafka", "program", "database"]
Target = Literal["kafka", "postgres", "sqlite", "calls"]
Loss = Literal["no", "yes"]
Duplicates = Literal["harmless", "annoying", "costly"]
Writes = Literal["replace", "add"]
YesNo = Literal["yes", "no"]
Deployment = Literal["single", "indexed", "statefulset"]


@dataclass(frozen=True, slots=True)
class Answers:
    """What is known of a pipeline. Questions that do not concern it keep their defaults."""

    platform: Platform = "service"
    source: Source = "kafka"
    target: Target = "kafka"
    loss: Loss = "no"
    duplicates: Duplicates = "costly"
    writes: Writes = "replace"
    takes_key: YesNo = "no"
    together: YesNo = "yes"
    database: Literal["postgres", "sqlite"] = "postgres"
    deployment: Deployment = "single"
    latency_ms: float | None = None
    """How soon a result must be visible; None if it does not matter."""
    work_s: float | None = None
    """How long one portion of work may take; None if it is short."""

    def __post_init__(self) -> None:
        for question in QUESTIONS:
            value = getattr(self, question.name)
            if question.choices and value not in question.choices:
                allowed = ", ".join(question.choices)
                raise ConfigError(f"{question.name}={value!r} is no answer: write one of {allowed}.")
        for name in ("latency_ms", "work_s"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and 0 <= value < 1e9):
                raise ConfigError(f"{name}={value!r} is no answer: write a number from 0 on, or leave it out.")
        self._check_fit()

    def _check_fit(self) -> None:
        if self.source == "database" and self.platform == "spark":
            raise ConfigError(
                "Rows of a service's database reach Kafka by an outbox, not by Spark: ask with platform=service for "
                "that part, and with source=kafka for the Spark job that reads the topic."
            )
        if self.source == "database" and self.target != "kafka":
            raise ConfigError("From a database the adviser knows the way into Kafka only: write target=kafka.")
        if self.source == "program" and self.target == "calls":
            raise ConfigError(
                "Without Kafka there is nothing to read again: use semel.Effects as docs/effects.md shows, or put the "
                "records into Kafka first (target=kafka) and make the calls from there (source=kafka)."
            )
        if self.source == "program" and self.platform == "service" and self.target != "kafka":
            raise ConfigError(
                "A program that writes its own records to a database needs no Kafka: one transaction of the database "
                "does it. Write target=kafka, or platform=spark for a job."
            )


@dataclass(frozen=True, slots=True)
class Question:
    """One question. `choices` are the answers with their meaning; without them it asks for a number."""

    name: str
    text: str
    choices: Mapping[str, str]
    concerns: Callable[[Mapping[str, Any]], bool] = lambda _: True

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


def _is_database(given: Mapping[str, Any]) -> bool:
    return given["target"] in ("postgres", "sqlite")


def _needs_no_loss(given: Mapping[str, Any]) -> bool:
    return given["loss"] == "no"


QUESTIONS: Final = (
    Question("platform", "Where does it run?", {"service": "a Python program", "spark": "Apache Spark, by PySpark"}),
    Question(
        "source",
        "Where do the records come from?",
        {
            "kafka": "a Kafka topic",
            "program": "the program itself: a file, requests, a daily job",
            "database": "a service's own tables, whose changes others must hear of",
        },
    ),
    Question(
        "target",
        "Where do the results go?",
        {
            "kafka": "a Kafka topic",
            "postgres": "a table in Postgres",
            "sqlite": "a table in SQLite",
            "calls": "calls to the outside: mail, HTTP, payments",
        },
        lambda given: given["source"] != "database",
    ),
    Question(
        "database",
        "Which database has the tables?",
        {"postgres": "Postgres", "sqlite": "SQLite"},
        lambda given: given["source"] == "database",
    ),
    Question(
        "loss",
        "May records be lost when something fails?",
        {"no": "no, each one matters", "yes": "yes: metrics, debug logs, clicks"},
        lambda given: given["platform"] == "service",
    ),
    Question(
        "duplicates",
        "What does a duplicate cost?",
        {
            "harmless": "nothing: whoever reads the results copes with repeats",
            "annoying": "a little: wrong counts, double rows",
            "costly": "money, or somebody's trust",
        },
        lambda given: _needs_no_loss(given) and given["platform"] == "service",
    ),
    Question(
        "writes",
        "What does a record do to the table?",
        {"replace": "it replaces the row of its key", "add": "it adds a row, or adds to a number"},
        _is_database,
    ),
    Question(
        "takes_key",
        "Does the callee ignore a call that it gets twice with one idempotency key?",
        {"no": "no, or unknown", "yes": "yes: most payment services, some mail services"},
        lambda given: given["target"] == "calls" and _needs_no_loss(given) and given["duplicates"] != "harmless",
    ),
    Question(
        "together",
        "Must several records appear together, or a restart send nothing again?",
        {"yes": "yes", "no": "no: each record stands for itself, and may come twice after a crash"},
        lambda given: (
            given["source"] == "program"
            and given["platform"] == "service"
            and _needs_no_loss(given)
            and given["duplicates"] != "harmless"
        ),
    ),
    Question(
        "deployment",
        "How are its instances told apart?",
        {
            "single": "there is one",
            "indexed": "each gets a number: INSTANCE=0, 1, 2, ...",
            "statefulset": "by the pod names of a Kubernetes StatefulSet",
        },
        lambda given: given["platform"] == "service" and given["target"] == "kafka" and given["source"] != "database",
    ),
    Question("latency_ms", "Within how many milliseconds must a result be visible? (empty: it does not matter)", {}),
    Question("work_s", "How many seconds may one portion of work take? (empty: it is short)", {}),
)


def defaults() -> dict[str, Any]:
    """The answers of somebody who says nothing."""
    return {one.name: one.default for one in fields(Answers)}


def read_answer(question: Question, text: str) -> Any:
    """An answer as it was typed: a choice or the beginning of one, its number, or a number.

    >>> read_answer(QUESTIONS[0], "sp"), read_answer(QUESTIONS[0], "1"), read_answer(QUESTIONS[-1], "2.5")
    ('spark', 'service', 2.5)
    """
    typed = text.strip().lower()
    if question.choices:
        names = list(question.choices)
        if typed.isdigit() and 1 <= int(typed) <= len(names):
            return names[int(typed) - 1]
        meant = [name for name in names if typed and name.startswith(typed)]
        if len(meant) == 1 or typed in names:
            return typed if typed in names else meant[0]
        raise ConfigError(f"{text!r} is no answer: write one of {', '.join(names)}.")
    if not typed:
        return None
    if not re.fullmatch(r"\d+(\.\d+)?", typed):
        raise ConfigError(f"{text!r} is no number.")
    return float(typed)
