"""Records that cannot be processed go to their own topic, inside the same transaction, once."""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from confluent_kafka import Consumer, TopicPartition
from kio.schema.errors import ErrorCode
from session_scene import BROKER_CONFIG, Pipeline, wait_until

from semel.broker.faults import Error
from semel.client.admin import Admin
from semel.client.producer import Producer
from semel.errors import (
    ConfigError,
    InvalidState,
    KafkaError,
    NotAuthorized,
    RecordFailed,
    TooManyDeadLetters,
    UnknownTopic,
)
from semel.session.runner import RunReport, run
from semel.session.transaction import Row
from semel.testing.embedded import EmbeddedBroker
from semel.wire import Api


@pytest.fixture(scope="module")
def broker() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(config=BROKER_CONFIG, fsync="never") as broker:
        yield broker


class Letters(Pipeline):
    """A pipeline with a topic for dead letters."""

    def __init__(self, bootstrap: str, partitions: int = 2) -> None:
        super().__init__(bootstrap, partitions=partitions)
        self.dead = f"dead-{self.group}"
        with Admin({"bootstrap.servers": bootstrap}) as admin:
            admin.create_topics(self.dead)

    def write_values(self, values: list[bytes]) -> None:
        with Producer(bootstrap_servers=self.bootstrap) as producer:
            for number, value in enumerate(values):
                headers = [("colour", b"red"), ("none", None)]
                producer.send(self.source, value, key=b"key", headers=headers, partition=number % self.partitions)

    def run(self, transform: Any, **more: Any) -> RunReport:
        options: dict[str, Any] = {
            "to": self.target,
            "dead_letter": self.dead,
            "idle_ms": 400,
            "bootstrap": self.bootstrap,
            "group": self.group,
            "topics": [self.source],
            "name": self.group,
            "fetch_max_wait_ms": 50,
            **more,
        }
        return run(transform, **options)

    def letters(self) -> list[tuple[bytes | None, bytes | None, dict[str, bytes | None]]]:
        """Key, value and headers of every dead letter, as another client reads them."""
        consumer = Consumer(
            {"bootstrap.servers": self.bootstrap, "group.id": "observer", "isolation.level": "read_committed"}
        )
        try:
            _, end = cast("tuple[int, int]", consumer.get_watermark_offsets(TopicPartition(self.dead, 0), timeout=10))
            consumer.assign([TopicPartition(self.dead, 0, 0)])
            found: list[tuple[bytes | None, bytes | None, dict[str, bytes | None]]] = []

            def is_at_end() -> bool:
                message = consumer.poll(0.2)
                if message is not None and message.error() is None:
                    found.append((message.key(), message.value(), dict(message.headers() or [])))  # type: ignore[arg-type]
                [position] = consumer.position([TopicPartition(self.dead, 0)])
                return message is None and (position.offset >= end or end == 0)

            wait_until(is_at_end, "the end of the dead letters")
            return found
        finally:
            consumer.close()

    def dead_values(self) -> list[bytes | None]:
        return sorted((value for _, value, _ in self.letters()), key=repr)


def as_number(row: Row) -> bytes:
    return str(int(row.value or b"")).encode()


def as_numbers(table: pa.Table) -> pa.Table:
    numbers = pc.cast(pc.cast(table["value"], pa.string()), pa.int64())
    return pa.table({"key": table["key"], "value": pc.cast(pc.cast(numbers, pa.string()), pa.binary())})


@pytest.mark.parametrize(("by", "function"), [("row", as_number), ("table", as_numbers)])
def test_a_record_at_which_a_function_fails_goes_aside_once(broker: EmbeddedBroker, by: str, function: Any) -> None:
    """D8: as it was, with its origin, the error and the time; the records around it are processed."""
    letters = Letters(broker.bootstrap)
    letters.write_values([b"0", b"one", b"2", b"3", b"4", b"five", b"6", b"7"])
    report = letters.run(function, by=by)
    assert (report.records, report.dead_letters, report.aborted) == (8, 2, 0)
    assert letters.counts() == Counter([0, 2, 3, 4, 6, 7])
    found = sorted(letters.letters(), key=lambda letter: letter[1] or b"")
    assert [(key, value) for key, value, _ in found] == [(b"key", b"five"), (b"key", b"one")]
    headers = found[0][2]
    assert (headers["colour"], headers["none"]) == (b"red", None)
    assert headers["semel.dead-letter.topic"] == letters.source.encode()
    assert (headers["semel.dead-letter.partition"], headers["semel.dead-letter.offset"]) == (b"1", b"2")
    assert b"five" in (headers["semel.dead-letter.error"] or b"")
    assert int(headers["semel.dead-letter.time"] or b"") > 1_600_000_000_000
    assert letters.run(function, by=by).records == 0


@pytest.mark.parametrize("by", ["row", "table"])
@pytest.mark.parametrize("kind", ["oversized", "unknown topic", "wrong type", "over the topic's limit"])
def test_what_cannot_be_sent_goes_aside_too(broker: EmbeddedBroker, kind: str, by: Any) -> None:
    """D8: whether the client refuses it or the broker does."""
    letters = Letters(broker.bootstrap, partitions=1)
    if kind == "over the topic's limit":
        with Admin({"bootstrap.servers": broker.bootstrap}) as admin:
            admin.alter_configs("topic", letters.target, {"max.message.bytes": "3000"})
    letters.write_values([b"0", b"bad", b"2", b"3", b"4", b"bad", b"6"])

    def spoil(row: Row) -> Any:
        if row.value != b"bad":
            return row
        return {
            "oversized": b"x" * 3_000_000,
            "unknown topic": row._replace(topic="no-such-topic"),
            "wrong type": "text",
            "over the topic's limit": b"x" * 5_000,
        }[kind]

    def spoil_table(table: pa.Table) -> Any:
        if b"bad" not in table["value"].to_pylist():
            return table
        size = {"oversized": 3_000_000, "over the topic's limit": 5_000}.get(kind)
        if kind == "unknown topic":
            return {"no-such-topic": table}
        if size is None:
            return "text"
        values = [b"x" * size if value == b"bad" else value for value in table["value"].to_pylist()]
        return pa.table({"key": table["key"], "value": pa.array(values, pa.binary())})

    report = letters.run(spoil if by == "row" else spoil_table, by=by, batch_size=2_000)
    assert (report.records, report.dead_letters) == (7, 2)
    assert letters.counts() == Counter([0, 2, 3, 4, 6])
    assert letters.dead_values() == [b"bad", b"bad"]


class Unspeakable(Exception):
    """Its text cannot be made."""

    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    "result",
    [
        pytest.param({"a b/c": b"x"}, id="illegal name"),
        pytest.param({"__consumer_offsets": b"x"}, id="internal topic"),
        pytest.param({5: b"x"}, id="number"),
        pytest.param({None: b"x"}, id="none"),
        pytest.param({b"bytes": b"x"}, id="bytes"),
        pytest.param(Unspeakable(), id="unspeakable error"),
    ],
)
@pytest.mark.parametrize("by", ["row", "table", "column"])
def test_no_result_of_a_function_stops_a_run_with_dead_letters(broker: EmbeddedBroker, result: Any, by: str) -> None:
    """D8: topics that cannot be named or written to, and errors without a text, are the record's fault."""
    letters = Letters(broker.bootstrap, partitions=1)
    letters.write_values([b"0", b"bad", b"2"])

    def work(read: Any) -> Any:
        values = [read.value] if by == "row" else read["value"].to_pylist()
        if b"bad" in values and isinstance(result, Exception):
            raise result
        topic = next(iter(result)) if b"bad" in values and isinstance(result, dict) else letters.target
        if by == "row":
            return read._replace(topic=topic)
        table = pa.table({"value": read["value"]})
        return {topic: table} if by == "table" else table.append_column("topic", pa.array([topic] * len(values)))

    options: dict[str, Any] = {
        "by": "row" if by == "row" else "table",
        "to": None if by == "column" else letters.target,
    }
    report = letters.run(work, **options)
    assert (report.records, report.dead_letters) == (3, 1)
    assert letters.dead_values() == [b"bad"]
    if isinstance(result, Exception):
        assert letters.letters()[0][2]["semel.dead-letter.error"] == (
            b"Unspeakable: (its text cannot be shown: RuntimeError)"
        )
    with pytest.raises((RecordFailed, KafkaError)):
        letters.run(work, dead_letter=None, group=letters.group + "-2", **options)


@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("part", ["value", "key", "headers"])
def test_a_record_as_large_as_its_topic_allows_goes_aside_once_and_cut(
    broker: EmbeddedBroker, part: str, compression: str
) -> None:
    """D8: its dead letter would be too large. It says what was cut, and the records behind it are read."""
    letters = Letters(broker.bootstrap, partitions=1)
    large = random.Random(5).randbytes(1_048_588 - 200)
    record: dict[str, Any] = {"key": b"k", "headers": [], "value": b"v"}
    record[part] = [("h", large)] if part == "headers" else large
    with Producer(bootstrap_servers=broker.bootstrap, max_request_size=2_000_000) as producer:
        producer.send(letters.source, b"0")
        producer.send(letters.source, **record)
        producer.send(letters.source, b"2")

    def work(row: Row) -> bytes:
        if row.offset == 1:
            raise ValueError("\N{SNOWMAN}" * 5_000)
        return as_number(row)

    report = letters.run(work, by="row", compression_type=compression)
    assert (report.records, report.dead_letters, report.aborted) == (3, 1, 0)
    assert letters.counts() == Counter([0, 2])
    [(key, value, headers)] = letters.letters()
    if part == "headers":
        assert headers["semel.dead-letter.headers-dropped"] == b"1"
        return
    assert headers[f"semel.dead-letter.{part}-length"] == str(len(large)).encode()
    assert headers[f"semel.dead-letter.{part}-sha256"] == hashlib.sha256(large).hexdigest().encode()
    kept = key if part == "key" else value
    assert kept is not None
    assert large.startswith(kept)
    assert len(kept) > 1_000_000


def test_dead_letters_that_do_not_fit_into_one_batch_go_in_several(broker: EmbeddedBroker) -> None:
    """D8: each of them fits; the topic takes less than the producer gathers."""
    letters = Letters(broker.bootstrap, partitions=1)
    with Admin({"bootstrap.servers": broker.bootstrap}) as admin:
        admin.alter_configs("topic", letters.dead, {"max.message.bytes": "5000"})
    letters.write_values([b"x" * 3_000] * 10)
    report = letters.run(as_number, by="row")
    assert (report.dead_letters, report.aborted) == (10, 0)
    assert letters.dead_values() == [b"x" * 3_000] * 10


def test_dead_letters_cannot_go_to_a_compacted_topic(broker: EmbeddedBroker) -> None:
    """D8: those with one key would replace each other, and those without a key are refused."""
    letters = Letters(broker.bootstrap)
    letters.write_values([b"0"])
    with Admin({"bootstrap.servers": broker.bootstrap}) as admin:
        admin.alter_configs("topic", letters.dead, {"cleanup.policy": "compact"})
    with pytest.raises(ConfigError, match=f"dead-letter topic '{letters.dead}' is compacted.*cleanup.policy"):
        letters.run(as_number, by="row")
    with Admin({"bootstrap.servers": broker.bootstrap}) as admin:
        admin.alter_configs("topic", letters.dead, {"cleanup.policy": "delete", "max.message.bytes": "1000"})
    with pytest.raises(ConfigError, match="need room for 4096 bytes"):
        letters.run(as_number, by="row")
    assert letters.committed() == {}


@pytest.mark.parametrize("by", ["row", "table"])
@pytest.mark.parametrize("change", ["deleted", "smaller", "compacted"])
def test_a_dead_letter_that_is_refused_is_one_error(broker: EmbeddedBroker, change: str, by: Any) -> None:
    """D8: the topic changed while the pipeline ran. The error names the topic and why, and nothing is lost."""
    letters = Letters(broker.bootstrap, partitions=1)
    with Producer(bootstrap_servers=broker.bootstrap) as producer:
        for value in (b"0", b"bad" * 2_000, b"2"):
            producer.send(letters.source, value)

    def change_topic(_: object) -> Any:
        with Admin({"bootstrap.servers": broker.bootstrap}) as admin:
            if change == "deleted" and letters.dead in admin.list_topics():
                admin.delete_topics(letters.dead)
            elif change == "smaller":
                admin.alter_configs("topic", letters.dead, {"max.message.bytes": "1000"})
            elif change == "compacted":
                admin.alter_configs("topic", letters.dead, {"cleanup.policy": "compact"})
        raise ValueError("no")

    reason = {"deleted": "has no topic", "smaller": "max.message.bytes", "compacted": "without a key"}[change]
    with pytest.raises(RecordFailed, match=f"dead letter of {letters.source}-0 .*topic '{letters.dead}': .*{reason}"):
        letters.run(
            change_topic, by=by, delivery_timeout_ms=2_000, request_timeout_ms=1_000, default_api_timeout_ms=2_000
        )
    assert letters.committed() == {}


def test_a_refusal_that_is_no_fault_of_a_record_ends_the_run(broker: EmbeddedBroker) -> None:
    """D8: if the offsets are refused, also after the only record was put aside, the run must not go on for ever."""
    letters = Letters(broker.bootstrap, partitions=1)
    letters.write_values([b"0"])
    broker.faults.inject(Api.TXN_OFFSET_COMMIT, Error(ErrorCode.invalid_record), times=1_000)
    try:
        with pytest.raises(KafkaError, match="INVALID_RECORD"):
            letters.run(as_number, by="row")
    finally:
        broker.faults.clear()
    assert letters.letters() == []


def test_a_broker_that_is_away_makes_no_dead_letters(broker: EmbeddedBroker) -> None:
    """D8: that a topic cannot be looked up now says nothing about the record."""
    letters = Letters(broker.bootstrap, partitions=1)
    letters.write_values([b"0", b"1"])
    elsewhere = f"{letters.target}-elsewhere"

    def work(row: Row) -> Row:
        refused = broker.faults.inject(
            Api.METADATA,
            Error(ErrorCode.topic_authorization_failed),
            when=lambda request: any(topic.name == elsewhere for topic in request.topics or ()),
        )
        assert refused is not None
        return row._replace(topic=elsewhere)

    with pytest.raises(NotAuthorized):
        letters.run(work, by="row")
    broker.faults.clear()
    assert letters.letters() == []
    assert letters.committed() == {}


def test_too_many_dead_letters_stop_the_run(broker: EmbeddedBroker) -> None:
    """D8: a function that fails at everything must not move a whole topic aside."""
    letters = Letters(broker.bootstrap, partitions=1)
    letters.write_values([b"x%d" % number for number in range(10)])
    with pytest.raises(TooManyDeadLetters, match=r"More than dead_letter_max=4 .*offset 4"):
        letters.run(as_number, by="row", dead_letter_max=4, transaction_records_max=2)
    assert letters.dead_values() == [b"x0", b"x1", b"x2", b"x3"]
    assert letters.committed() == {0: 4}


def test_a_loop_puts_records_aside_by_itself(broker: EmbeddedBroker) -> None:
    """D8: `Session` has the same; an abort takes the dead letter with it."""
    letters = Letters(broker.bootstrap, partitions=1)
    letters.write_values([b"0", b"bad", b"2"])
    with letters.session(dead_letter=letters.dead) as session:
        for fails in (True, False):
            try:
                with session.transaction(10_000) as transaction:
                    for row in transaction.rows():
                        try:
                            transaction.send(letters.target, as_number(row), key=row.key)
                        except ValueError as error:
                            transaction.dead_letter(row, error)
                    assert not fails
            except AssertionError:
                assert session.dead_letter_count == 0
        assert session.dead_letter_count == 1
    assert letters.dead_values() == [b"bad"]
    assert letters.counts() == Counter([0, 2])
    with letters.session() as session, session.transaction(100) as transaction, pytest.raises(InvalidState):
        transaction.dead_letter(Row("t", 0, 0, 0, None, None), "none")


def test_the_topic_for_dead_letters_is_looked_at_first(broker: EmbeddedBroker) -> None:
    """D8, K3: not at the first failure, months later."""
    letters = Letters(broker.bootstrap)
    letters.write_values([b"0"])
    with pytest.raises(UnknownTopic, match="'no-such-topic'"):
        letters.run(as_number, by="row", dead_letter="no-such-topic")
    with pytest.raises(ConfigError, match="one of the topics that are read"):
        letters.run(as_number, by="row", dead_letter=letters.source)
    with pytest.raises(ConfigError, match="must not be negative"):
        letters.run(as_number, by="row", dead_letter_max=-1)
    assert letters.committed() == {}


def test_without_dead_letters_an_error_names_the_record(broker: EmbeddedBroker) -> None:
    """K3: topic, partition and offset, and the function's own error as the cause."""
    letters = Letters(broker.bootstrap, partitions=1)
    letters.write_values([b"0", b"1", b"two"])
    with pytest.raises(RecordFailed, match=f"ValueError at {letters.source}-0 at offset 2: .*two") as caught:
        letters.run(as_number, by="row", dead_letter=None)
    assert isinstance(caught.value.__cause__, ValueError)
    assert (caught.value.topic, caught.value.partition, caught.value.offset) == (letters.source, 0, 2)
    with pytest.raises(RecordFailed, match=f"in a table of 3 records .{letters.source}-0 offsets 0 to 2"):
        letters.run(as_numbers, by="table", dead_letter=None)


def test_a_function_that_returns_text_is_told_what_is_expected(broker: EmbeddedBroker) -> None:
    """K3: bytes, rows or None, and how to make bytes of text."""
    letters = Letters(broker.bootstrap, partitions=1)
    letters.write_values([b"0"])
    with pytest.raises(RecordFailed, match=r"returned str .'zero'.*return bytes .*text\.encode\(\)"):
        letters.run(lambda row: "zero", by="row", dead_letter=None)


def test_a_worker_that_is_killed_again_and_again_writes_each_dead_letter_once(broker: EmbeddedBroker) -> None:
    """D8: kill -9 at any moment; counted by another client."""
    letters = Letters(broker.bootstrap)
    values = [b"bad-%d" % n if n % 3 == 0 else str(n).encode() for n in range(120)]
    letters.write_values(values)
    program = Path(__file__).parent / "dead_letter_worker.py"
    command = [
        *(sys.executable, str(program)),
        *(letters.bootstrap, letters.group, letters.source, letters.target, letters.dead),
    ]
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    kills = 0
    while sum(letters.committed().values()) < 80 and kills < 3:
        worker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert worker.stdout is not None
        assert worker.stdout.readline() == "started\n"
        before = sum(letters.committed().values())
        wait_until(lambda before=before: sum(letters.committed().values()) > before, "a commit")
        try:
            worker.wait(chance.random() * 0.05)
        except subprocess.TimeoutExpired:
            worker.kill()
        worker.wait()
        worker.stdout.close()
        kills += 1
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "RunReport" in done.stdout
    assert letters.dead_values() == sorted((value for value in values if value.startswith(b"bad")), key=repr)
    assert letters.counts() == Counter(n * 2 for n in range(120) if n % 3)
