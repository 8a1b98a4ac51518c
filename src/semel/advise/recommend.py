"""The decision: answers in; guarantee, reason, cost, `transactional.id` and programs out."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from semel.advise.measured import Figures
from semel.advise.program import Names, Program, build
from semel.advise.questions import Answers

Guarantee = Literal["at-most-once", "at-least-once", "exactly-once"]

_BROKER_TRANSACTION_MAX_S: Final = 900
"""Kafka's default transaction.max.timeout.ms."""
_SESSION_TRANSACTION_S: Final = 30
"""The default transaction timeout of a session."""
_ANNOYING_LATENCY_MS: Final = 20
"""Below this a duplicate that is only annoying is the lesser evil."""


@dataclass(frozen=True, slots=True)
class Advice:
    """What the adviser says."""

    answers: Answers
    guarantee: Guarantee
    promise: str
    reasons: tuple[str, ...]
    costs: tuple[str, ...]
    cautions: tuple[str, ...]
    transactional_id: str
    before: tuple[str, ...]
    """What to install and to create before the programs are started."""
    programs: tuple[Program, ...]

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return asdict(self)


def recommend(
    answers: Answers | None = None,
    *,
    names: Names | None = None,
    figures: Figures | None = None,
    **given: Any,
) -> Advice:
    """Choose a guarantee and print the program for it.

    The keywords are the answers of `Answers`; `names` has the topics, tables and addresses for the program.

    >>> advice = recommend(source="kafka", target="kafka", loss="no", duplicates="costly", deployment="statefulset")
    >>> advice.guarantee, advice.programs[0].file
    ('exactly-once', 'pipeline.py')
    """
    answers = answers or Answers(**given)
    names = names or Names()
    guarantee, reasons = _choose(answers)
    programs = build(answers, guarantee, names)
    return Advice(
        answers=answers,
        guarantee=guarantee,
        promise=_promise(answers, guarantee),
        reasons=reasons,
        costs=_costs(answers, guarantee, figures),
        cautions=tuple(_cautions(answers, guarantee)),
        transactional_id=_transactional_id(answers, guarantee, names),
        before=_before(answers, names, programs),
        programs=programs,
    )


def _choose(answers: Answers) -> tuple[Guarantee, tuple[str, ...]]:
    if answers.platform == "spark" and answers.target == "calls":
        guarantee, reasons = _choose_for_calls(answers)
        return guarantee, ("Spark writes what has to be called into a topic, exactly once; a service calls.", *reasons)
    if answers.platform == "spark":
        return "exactly-once", (
            "Spark runs a whole micro-batch again after a failure, so a sink that does not recognise it repeats "
            "thousands of records at once.",
            "The exactly-once sink costs milliseconds a batch and needs no jar, so there is no reason to take less.",
        )
    if answers.loss == "yes":
        return "at-most-once", (
            "Records may be lost, so the position is committed before the work and nothing is sent twice.",
            "It is the cheapest way, with the lowest latency.",
        )
    if answers.source == "database":
        return "exactly-once", (
            "A service that writes to its database and then to Kafka can crash between the two.",
            "With an outbox both are one transaction of the database, and the relay brings each row to Kafka once.",
        )
    if answers.duplicates == "harmless":
        return "at-least-once", (
            "Nothing may be lost and repeats are harmless, so the position is committed after the work.",
            *(
                ("A row that replaces the one of its key looks the same when it is written again.",)
                if answers.target in ("postgres", "sqlite") and answers.writes == "replace"
                else ()
            ),
        )
    if answers.target == "calls":
        return _choose_for_calls(answers)
    if answers.source == "program" and answers.together == "no":
        return "at-least-once", (
            "Each record stands for itself, so a transaction has nothing to hold together.",
            "The idempotent producer stores each send once, however often it is retried. Only a restart of the "
            "program may send records again.",
        )
    is_tight = answers.latency_ms is not None and answers.latency_ms < _ANNOYING_LATENCY_MS
    if answers.duplicates == "annoying" and answers.target == "kafka" and is_tight:
        return "at-least-once", (
            f"Results must be visible within {answers.latency_ms:g} ms, and readers of committed records wait for the "
            "end of each transaction.",
            "A duplicate is annoying and not costly, so repeats after a crash are the lesser evil: let readers drop "
            "them by the key or an event id.",
        )
    return "exactly-once", (
        "Nothing may be lost, and a duplicate costs too much.",
        "The results and the position in the input are one Kafka transaction."
        if answers.target == "kafka"
        else "The rows and the position in the input are one transaction of the database.",
    )


def _choose_for_calls(answers: Answers) -> tuple[Guarantee, tuple[str, ...]]:
    if answers.takes_key == "yes":
        return "exactly-once", (
            "Nothing may be lost, and a duplicate costs too much.",
            "The callee recognises the idempotency key, so a call is repeated until it is confirmed.",
        )
    return "at-most-once", (
        "There is no exactly-once for a callee that does not take an idempotency key: after a crash during a call "
        "nobody but the callee knows whether it was carried out.",
        "So each call is made at most once, and those of which nobody knows are listed for a person to decide.",
    )


def _is_claimed(answers: Answers) -> bool:
    """Whether calls are claimed in a database: where neither loss nor duplicates are taken lightly."""
    return answers.target == "calls" and answers.loss == "no" and answers.duplicates != "harmless"


def _promise(answers: Answers, guarantee: Guarantee) -> str:
    if answers.target == "calls" and guarantee == "at-most-once" and answers.loss == "no":
        return "Each call is carried out at most once, and every call that is in doubt is listed."
    return {
        "at-most-once": "No record counts twice. A crash loses what was under way.",
        "at-least-once": "No record is lost. After a crash some count twice.",
        "exactly-once": "Each record counts once, whatever is killed, retried or cut off.",
    }[guarantee]


def _costs(answers: Answers, guarantee: Guarantee, figures: Figures | None) -> tuple[str, ...]:
    is_claimed = _is_claimed(answers)
    if guarantee != "exactly-once" and not is_claimed:
        return ("Nothing beside what you write and read anyway.",)
    if answers.platform == "spark" and not is_claimed:
        return (
            "A micro-batch of one record took 33 to 76 ms longer than into Spark's noop sink, on 2 cores (see "
            "docs/spark.md).",
            "Measure it on this machine: semel bench spark --quick",
        )
    if is_claimed:
        return ("A row in a table for each call, and two short transactions of the database.",)
    if answers.target in ("postgres", "sqlite"):
        return (
            "One row for the position of each partition in every transaction; with mode=upsert a look-up in the key's "
            "index for each row (docs/databases.md).",
            "Measure it on this machine: semel bench bridges",
        )
    costs = ["Results are visible when their transaction is committed; records that share one share its cost."]
    if figures is None:
        return (*costs, "Not measured on this machine yet: semel bench transactions")
    return (*costs, *figures.lines())


def _cautions(answers: Answers, guarantee: Guarantee) -> list[str]:
    said: list[str] = []
    exact = guarantee == "exactly-once"
    if exact and answers.target == "kafka":
        said.append(
            "Readers of the output must ask for committed records: isolation.level=read_committed, which is the "
            "default of Semel and librdkafka, and not of the Java client, kafka-python, aiokafka and Spark's own "
            "source."
        )
    if answers.platform == "spark":
        said.append("The checkpoint must survive. Keep it on a file system with atomic rename (semel doctor job.py).")
        if answers.latency_ms is not None and answers.latency_ms < 1_000:
            said.append(
                f"{answers.latency_ms:g} ms is short for micro-batches: a service (platform=service) has no batch to "
                "plan."
            )
    elif exact and answers.target == "kafka" and answers.latency_ms is not None and answers.latency_ms < 100:
        said.append(
            f"For {answers.latency_ms:g} ms keep transactions small (transaction_records_max) and leave "
            "transaction_linger_ms at 0; compare with the p99 of semel bench transactions."
        )
    if answers.work_s is not None:
        said += _cautions_of_work(answers, guarantee, answers.work_s)
    return said


def _cautions_of_work(answers: Answers, guarantee: Guarantee, work_s: float) -> list[str]:
    if answers.platform == "spark":
        return ["The work may take as long as it likes: the transaction is open only while the results are written."]
    if guarantee == "exactly-once" and answers.target == "kafka" and answers.source == "kafka":
        said = ["semel.run calls your function before it writes, so the transaction is not open meanwhile."]
        if work_s > _SESSION_TRANSACTION_S:
            said.append(
                f"If you write a session's loop yourself, work of {work_s:g} s does not fit into the transaction "
                f"timeout of {_SESSION_TRANSACTION_S} s: do it before the first send."
            )
        if work_s > _BROKER_TRANSACTION_MAX_S:
            said.append("Split work of more than 15 minutes into steps with a topic between them.")
        return said
    if _is_claimed(answers):
        return ["lease_s in the program is twice the work's time, and at least a minute: a restart waits for so long."]
    if answers.source == "kafka" and answers.target in ("kafka", "calls") and work_s > 60:
        return ["max.poll.interval.ms in the program is twice the work's time, so that the group waits for it."]
    return []


def _transactional_id(answers: Answers, guarantee: Guarantee, names: Names) -> str:
    if answers.platform == "spark" and answers.target in ("kafka", "calls"):
        return (
            f"{names.name}: the pipeline's name, one for the whole query however many executors write. A new driver "
            "fences the old one. Give each query its own name."
        )
    if guarantee == "exactly-once" and answers.source == "database":
        return f"Made from the relay's name ({names.name}): a second relay of that name takes over."
    is_claimed = _is_claimed(answers)
    if is_claimed or (guarantee == "exactly-once" and answers.target in ("postgres", "sqlite")):
        return "None: no Kafka transaction is used; progress is in the database. Run one process; a new one takes over."
    if guarantee != "exactly-once":
        is_read = answers.source == "kafka"
        return "None: no Kafka transaction is used." + (" Progress is in the offsets of the group." if is_read else "")
    return {
        "single": f"{names.name}-0, always the same: a restart fences the old process and ends its transaction.",
        "indexed": f"{names.name}-N with N from the variable INSTANCE: 0, 1, 2, ... Never give one number to two.",
        "statefulset": f"{names.name}-N with N from the pod's name: a StatefulSet gives a pod its name again after a "
        "restart. A Deployment does not; there each start would leave a transaction behind.",
    }[answers.deployment]


def _before(answers: Answers, names: Names, programs: tuple[Program, ...]) -> tuple[str, ...]:
    extras = sorted({extra for program in programs for extra in program.extras})
    packages = [f"'semel[{','.join(extras)}]'" if extras else "semel"]
    packages += sorted({package for program in programs for package in program.packages})
    topics = list(dict.fromkeys(topic for program in programs for topic in program.topics))
    lines = [f"pip install {' '.join(packages)}"]
    if topics:
        made = ", ".join(f'"{topic}"' for topic in topics)
        lines.append(
            f'python -c \'import semel; semel.Admin({{"bootstrap.servers": "{names.bootstrap}"}})'
            f".create_topics({made}, partitions=6)'  # unless they are there"
        )
    return tuple(lines)
