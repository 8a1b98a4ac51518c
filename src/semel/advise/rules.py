"""The doctor's rules: one table, and what a finding says. docs/doctor.md has a section for each, checked by a test."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

Severity = Literal["error", "warning", "note"]
SEVERITIES: Final[tuple[Severity, ...]] = ("error", "warning", "note")
Place = Literal["settings", "code", "cluster"]
PAGE: Final = "docs/doctor.md"


@dataclass(frozen=True, slots=True)
class Rule:
    """One kind of mistake."""

    id: str
    severity: Severity
    places: tuple[Place, ...]
    title: str
    reason: str
    """What can happen to the data."""
    fix: str

    @property
    def link(self) -> str:
        return f"{PAGE}#{self.id}"


@dataclass(frozen=True, slots=True)
class Finding:
    """One mistake that was found."""

    rule: Rule
    where: str
    """A file with its line, a setting, a topic, a group or a transactional id."""
    what: str
    commands: tuple[str, ...] = ()
    """Lines to write or commands to run that put it right. The doctor runs none of them."""

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "rule": self.rule.id,
            "severity": self.rule.severity,
            "where": self.where,
            "what": self.what,
            "reason": self.rule.reason,
            "fix": self.rule.fix,
            "commands": list(self.commands),
            "link": self.rule.link,
        }


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Errors first; of one severity in the order of the table, then by place. Repeats are left out."""
    ids = list(RULES)
    unique = dict.fromkeys(findings)
    return sorted(unique, key=lambda one: (SEVERITIES.index(one.rule.severity), ids.index(one.rule.id), one.where))


_SETTINGS: Final[tuple[Place, ...]] = ("settings", "code")
_CODE: Final[tuple[Place, ...]] = ("code",)
_CLUSTER: Final[tuple[Place, ...]] = ("cluster",)

_TABLE: Final = (
    # -- timeouts --------------------------------------------------------------------------------------------------
    Rule(
        "transaction-timeout-not-below-session-timeout",
        "warning",
        _SETTINGS,
        "`transaction.timeout.ms` is not below `session.timeout.ms`",
        "When an instance hangs, the group gives its partitions to another one, which then waits until the transaction "
        "of the first has timed out. Processing stands still for the difference.",
        "Set transaction.timeout.ms to two thirds of session.timeout.ms or less.",
    ),
    Rule(
        "transaction-timeout-above-broker-maximum",
        "error",
        ("settings", "cluster"),
        "`transaction.timeout.ms` is above the broker's `transaction.max.timeout.ms`",
        "The broker refuses the producer when it starts, so nothing is written.",
        "Lower transaction.timeout.ms, or raise transaction.max.timeout.ms on every broker.",
    ),
    Rule(
        "transaction-timeout-too-short",
        "warning",
        _CLUSTER,
        "Recent transactions took more than two thirds of `transaction.timeout.ms`",
        "A slightly slower one is aborted by its coordinator, and so is its repeat, which is no shorter: the pipeline "
        "stands still. Looked at for `--pipeline`.",
        "Raise transaction.timeout.ms to three times of what they take, or make them smaller.",
    ),
    Rule(
        "heartbeat-too-slow",
        "warning",
        _SETTINGS,
        "`heartbeat.interval.ms` is more than a third of `session.timeout.ms`",
        "One or two lost heartbeats remove a healthy member from its group; what it was working on is repeated.",
        "Set heartbeat.interval.ms to a third of session.timeout.ms or less.",
    ),
    # -- producing -------------------------------------------------------------------------------------------------
    Rule(
        "idempotence-contradicted",
        "error",
        _SETTINGS,
        "A setting contradicts idempotence or transactions",
        "The client refuses to start: a transactional or idempotent producer needs `acks=all`, retries, and at most "
        "five requests in flight.",
        "Remove the setting that contradicts.",
    ),
    Rule(
        "acks-not-all",
        "warning",
        _SETTINGS,
        "`acks` is 0 or 1",
        "Records that the producer believes stored are lost when a broker fails before others have copied them.",
        "Set acks=all, unless these records may be lost.",
    ),
    Rule(
        "idempotence-off",
        "warning",
        _SETTINGS,
        "Idempotence is switched off",
        "A retry after a lost answer stores the records twice, and may put them behind later ones.",
        "Remove enable.idempotence=false.",
    ),
    Rule(
        "idempotence-not-on",
        "note",
        _CODE,
        "A confluent-kafka producer without `enable.idempotence`",
        "librdkafka has idempotence off unless it is asked for, unlike the Java client: a retry after a lost answer "
        "stores the records twice.",
        "Set enable.idempotence=true.",
    ),
    Rule(
        "retries-off",
        "warning",
        _SETTINGS,
        "`retries` is 0",
        "Records are given up at the first lost answer or change of leader.",
        "Remove retries; bound the time with delivery.timeout.ms.",
    ),
    # -- transactional ids -----------------------------------------------------------------------------------------
    Rule(
        "transactional-id-changes",
        "error",
        _SETTINGS,
        "The `transactional.id` is another one after each start",
        "A new instance cannot fence the old one or end its transaction: a zombie can still commit, which repeats "
        "records, and readers wait until the abandoned transaction times out.",
        "Build the id from the pipeline's name and a number or pod name that the instance has again after a restart.",
    ),
    Rule(
        "transactional-id-changes-in-group",
        "warning",
        _SETTINGS,
        "The `transactional.id` is another one after each start, though the group fences",
        "Offsets sent with the group's metadata keep zombies out. But after a crash nobody ends the abandoned "
        "transaction: readers of committed records and the next owner wait until it times out.",
        "Build the id from the pipeline's name and a number or pod name that the instance has again after a restart.",
    ),
    Rule(
        "transactional-id-shared",
        "error",
        _SETTINGS,
        "Two producers have the same `transactional.id`",
        "Each start fences the other producer: they abort each other's transactions, and one of them always fails.",
        "Give each producer that runs at the same time its own id.",
    ),
    Rule(
        "transactional-id-fought-over",
        "warning",
        _CLUSTER,
        "A `transactional.id` was initialised several times while we looked",
        "Two instances share the id and fence each other, or one instance fails and restarts in a loop.",
        "Give each instance its own id; look into the log of the one that restarts.",
    ),
    # -- consuming -------------------------------------------------------------------------------------------------
    Rule(
        "auto-commit-with-transactions",
        "error",
        _SETTINGS,
        "Offsets are committed automatically beside transactions",
        "The position moves on by a timer, whether the transaction with the results commits or not: records are lost "
        "after an abort or a crash.",
        "Set enable.auto.commit=false and send the offsets in the transaction.",
    ),
    Rule(
        "read-uncommitted-beside-transactions",
        "warning",
        _SETTINGS,
        "`isolation.level=read_uncommitted` beside transactions",
        "The consumer sees records of transactions that are aborted later. What it makes of them stays.",
        "Set isolation.level=read_committed.",
    ),
    Rule(
        "group-reads-uncommitted",
        "warning",
        _CLUSTER,
        "A group has read beyond the last stable offset",
        "Its members read records of an open transaction. If that is aborted, they have processed records that "
        "never were.",
        "Set isolation.level=read_committed in the members of the group.",
    ),
    Rule(
        "offsets-expire",
        "error",
        _CLUSTER,
        "Committed offsets expire within the pipeline's longest pause",
        "After such a pause the group has no position: everything is read again, or what came meanwhile is skipped.",
        "Raise offsets.retention.minutes on every broker above the longest pause.",
    ),
    Rule(
        "position-in-memory",
        "error",
        ("settings",),
        "A source connector keeps its position in memory",
        "After each restart it begins again: all rows are sent once more, and what changed or was deleted meanwhile "
        "may be missing.",
        "Keep offsets in Kafka (KafkaOffsetBackingStore) or in a file that survives (FileOffsetBackingStore).",
    ),
    # -- topics and brokers ----------------------------------------------------------------------------------------
    Rule(
        "internal-topic-not-replicated",
        "error",
        ("settings", "cluster"),
        "A topic that exactly-once leans on has one replica",
        "If the broker that has it fails, transactions, offsets or the ledger are lost with it: batches repeat, or "
        "positions are gone.",
        "Raise the replication factor to 3 with kafka-reassign-partitions.sh.",
    ),
    Rule(
        "topic-not-replicated",
        "warning",
        _CLUSTER,
        "A topic has one replica in a cluster of several brokers",
        "If the broker that has it fails, its records are gone.",
        "Raise the replication factor to 3 with kafka-reassign-partitions.sh.",
    ),
    Rule(
        "min-insync-replicas-too-high",
        "error",
        _CLUSTER,
        "`min.insync.replicas` is above the replication factor",
        "Every write with `acks=all`, and so every transaction, is refused with NOT_ENOUGH_REPLICAS.",
        "Lower min.insync.replicas to one less than the replication factor, or add replicas.",
    ),
    Rule(
        "min-insync-replicas-equal-replication",
        "warning",
        _CLUSTER,
        "`min.insync.replicas` equals the replication factor",
        "Writes stop as soon as one broker is down, for an upgrade too.",
        "Lower min.insync.replicas to one less than the replication factor, or add a replica.",
    ),
    Rule(
        "min-insync-replicas-too-low",
        "warning",
        _CLUSTER,
        "`min.insync.replicas` is 1 though there are three replicas or more",
        "`acks=all` is satisfied by the leader alone when the others are behind: what was acknowledged, and what a "
        "transaction has committed, is lost if that broker fails.",
        "Set min.insync.replicas=2.",
    ),
    Rule(
        "unclean-leader-election",
        "warning",
        _CLUSTER,
        "Unclean leader election is allowed",
        "A replica that lacks acknowledged records may become leader, and they are gone, committed ones too.",
        "Set unclean.leader.election.enable=false.",
    ),
    Rule(
        "transaction-protocol-1",
        "note",
        _CLUSTER,
        "Transaction protocol 2 (KIP-890) is not finalized",
        "With protocol 1 a write that is delayed in the network can end up in the producer's next transaction. "
        "Semel's client is safe from that; others are not.",
        "On Kafka 4.0 or newer finalize transaction.version=2; older releases have to be upgraded first.",
    ),
    Rule(
        "many-producers",
        "warning",
        _CLUSTER,
        "A partition remembers very many producers",
        "Each takes memory of the broker until `producer.id.expiration.ms` has passed. It is a sign of programs that "
        "make a new producer for each record or request.",
        "Keep one producer for each process; lower producer.id.expiration.ms meanwhile.",
    ),
    Rule(
        "producer-epoch-near-its-end",
        "note",
        _CLUSTER,
        "A producer epoch is close to the largest one",
        "The coordinator then gives the transactional id a new producer id. Clients before Kafka 2.5 stop with an "
        "error at that point.",
        "Use clients of Kafka 2.5 or newer; nothing else is needed.",
    ),
    # -- programs --------------------------------------------------------------------------------------------------
    Rule(
        "database-write-in-transaction",
        "error",
        _CODE,
        "A database is written inside a Kafka transaction",
        "The two commit apart: after a crash or an abort between them the database has rows that Kafka never had, or "
        "has them twice, because the records come again.",
        "Write to the database alone and let `semel relay` bring the events to Kafka (an outbox), or write the results "
        "to Kafka alone and let a second pipeline (`semel.run(..., to=semel.Postgres(...))`) fill the database.",
    ),
    Rule(
        "http-call-in-transaction",
        "warning",
        _CODE,
        "An HTTP call that changes something is made inside a Kafka transaction",
        "The call is not part of the transaction: after an abort or a crash the records come again and the call is "
        "made again.",
        "Write what is to be called into a topic and make the calls with `semel.effects.run`, or let the other side "
        "recognise a repeated call by an idempotency key.",
    ),
    Rule(
        "foreach-batch-repeats",
        "warning",
        _CODE,
        "A `foreachBatch` function writes with a sink that repeats",
        "Spark runs the function again with the same batch after a failure, and rows are written twice: Spark's Kafka "
        "sink and JDBC writes do not recognise a batch, and the function does not look at its id.",
        "Use semel.KafkaSink or semel.DatabaseSink, which skip a batch that was committed before.",
    ),
    Rule(
        "spark-kafka-sink-repeats",
        "note",
        _CODE,
        "A query writes with Spark's own Kafka sink",
        "It is at-least-once: after a failure some records are in the topic twice.",
        "Use semel.write_stream(df, name=..., bootstrap=..., topic=..., checkpoint=...).",
    ),
    Rule(
        "checkpoint-without-atomic-rename",
        "warning",
        _SETTINGS,
        "A checkpoint on an object store without atomic rename",
        "Spark commits a batch by renaming a file. Where that copies and deletes, a crash leaves a checkpoint that is "
        "torn or older than the output, and the query repeats or stops.",
        "Put the checkpoint on HDFS, a shared file system or ABFS with a hierarchical namespace; for s3a set "
        "spark.sql.streaming.checkpointFileManagerClass to "
        "org.apache.spark.internal.io.cloud.AbortableStreamBasedCheckpointFileManager (in spark-hadoop-cloud).",
    ),
    Rule(
        "checkpoint-in-temporary-folder",
        "note",
        _SETTINGS,
        "A checkpoint below /tmp",
        "It may be gone after a restart of the machine, and with it the query's position and state.",
        "Put the checkpoint where it survives.",
    ),
    Rule(
        "data-loss-accepted",
        "warning",
        _SETTINGS,
        "`failOnDataLoss` is off",
        "Records that were deleted before the query read them are skipped without an error.",
        "Remove failOnDataLoss=false, unless gaps are acceptable.",
    ),
)

RULES: Final[Mapping[str, Rule]] = {rule.id: rule for rule in _TABLE}


def finding(rule: str, where: str, what: str, *commands: str) -> Finding:
    """A finding of the rule with this id."""
    return Finding(RULES[rule], where, what, commands)


def rules_as_markdown() -> str:
    """The sections of docs/doctor.md."""
    table = ["| rule | severity | looks at |", "|---|---|---|"]
    table += [f"| [{rule.id}](#{rule.id}) | {rule.severity} | {', '.join(rule.places)} |" for rule in _TABLE]
    sections = [f"### {rule.id}\n\n{rule.title}. {rule.reason}\n\nFix: {rule.fix}" for rule in _TABLE]
    return "\n".join(table) + "\n\n" + "\n\n".join(sections) + "\n"
